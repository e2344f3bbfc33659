//! `cuda-cluster topo`: shows a machine in any of its text forms.
//!
//! Does not judge the machine; shows what its source reported.
//!
//! *Invariant:* notes about the topology go to standard error, unless the format includes them.

use std::path::PathBuf;

use anstyle::{AnsiColor, Color, Style};
use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::sanitize::plain;
use super::{output, plan, source};
use crate::predict::link_rates;
use crate::topology::{LinkKind, Occupant, Topology};

/// Arguments of `topo`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster topo                                # this machine
  cuda-cluster topo -o tree --topology dgx-h100    # a built-in one
  cuda-cluster topo -o yaml --anonymize > here.yaml")]
pub(super) struct Arguments {
    /// A file, '-', or a built-in machine such as dgx-h100; the format is detected [default: this
    /// machine]
    #[arg(long, value_name = "SRC")]
    topology: Option<String>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,

    /// Also show the workers of a plan printed by 'plan -o yaml' ('-' for standard input); requires
    /// '-o tree' or '-o svg'
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,

    /// Remove identifying data (UUIDs, host name), so that the output can be shared
    #[arg(long)]
    anonymize: bool,

    /// Print to standard error how long NVML, hwloc and sysfs took
    #[arg(long, conflicts_with = "topology")]
    timings: bool,
}

/// Output formats of a topology.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// A matrix like that of `nvidia-smi topo -m`; in parts if the terminal is narrower
    #[default]
    Matrix,
    /// A tree: package, NUMA node, switch, device
    Tree,
    /// The complete topology, for programs
    Json,
    /// The complete topology, as a file to keep, edit or share
    Yaml,
    /// For NCCL, through NCCL_TOPO_FILE
    Nccl,
    /// For Graphviz
    Dot,
    /// A picture
    Svg,
}

impl Form {
    fn carries_notes(self) -> bool {
        matches!(self, Form::Json | Form::Yaml)
    }

    fn shows_workers(self) -> bool {
        matches!(self, Form::Tree | Form::Svg)
    }
}

/// Prints a machine.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let workers = workers(arguments)?;
    let topology = read(arguments)?;
    let topology = if arguments.anonymize { topology.anonymized() } else { topology };
    match arguments.output {
        Form::Json => output::print_json(&topology)?,
        Form::Yaml => output::print(&topology.to_yaml())?,
        // Without devices the matrix would be empty; the rest of the machine is still useful.
        Form::Matrix if topology.gpus.is_empty() && topology.nics.is_empty() => {
            output::print_text(&plain(&topology.to_tree_with(&workers)))?;
        }
        Form::Matrix => {
            let width = output::columns().unwrap_or(usize::MAX);
            output::print(&coloured(&plain(&topology.to_matrix_within(width))))?;
        }
        Form::Tree => output::print_text(&plain(&topology.to_tree_with(&workers)))?,
        Form::Nccl => {
            let text = topology.to_nccl().map_err(|error| Failure::new(Exit::Usage, error))?;
            output::print(&text)?;
        }
        Form::Dot => output::print(&topology.to_dot())?,
        Form::Svg => output::print(&topology.to_svg_with(&workers, &link_rates(&topology)))?,
    }
    if !arguments.output.carries_notes() {
        topology.notes.iter().for_each(|note| output::note(note));
    }
    Ok(Exit::Done)
}

/// The workers to show; none without a plan.
fn workers(arguments: &Arguments) -> Result<Vec<Occupant>, Failure> {
    let Some(path) = &arguments.plan else { return Ok(Vec::new()) };
    if arguments.output.shows_workers() {
        return Ok(plan::load(path)?.occupants());
    }
    let error = anyhow::anyhow!("this form has no place for the workers of a plan");
    Err(Failure::new(Exit::Usage, error).hint("ask for '-o svg' or '-o tree'"))
}

/// The requested machine: from a text, or this one.
fn read(arguments: &Arguments) -> Result<Topology, Failure> {
    match &arguments.topology {
        Some(src) => source::load(src),
        None => {
            let probed = source::live()?;
            if arguments.timings {
                output::remark("timings", &probed.timings);
            }
            Ok(probed.topology)
        }
    }
}

/// The matrix with bold headings and links coloured by distance; colours are for terminals only.
fn coloured(matrix: &str) -> String {
    let bold = Style::new().bold();
    let mut text = String::new();
    for line in matrix.lines() {
        // A heading has no name in its first column; legends are indented less.
        if line.starts_with("    ") {
            text.push_str(&format!("{bold}{line}{bold:#}\n"));
            continue;
        }
        for cell in line.split_inclusive(' ') {
            let word = cell.trim_end();
            match word.parse().ok().and_then(colour) {
                Some(style) => {
                    text.push_str(&format!("{style}{word}{style:#}{}", &cell[word.len()..]));
                }
                None => text.push_str(cell),
            }
        }
        text.push('\n');
    }
    text
}

fn colour(kind: LinkKind) -> Option<Style> {
    let colour = match kind {
        LinkKind::X => return None,
        LinkKind::Nv(_) => AnsiColor::Green,
        LinkKind::Pix | LinkKind::Pxb => AnsiColor::Cyan,
        LinkKind::Phb | LinkKind::Node => AnsiColor::Yellow,
        LinkKind::Sys => AnsiColor::Red,
    };
    Some(Style::new().fg_color(Some(Color::Ansi(colour))))
}
