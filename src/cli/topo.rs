//! `cuda-cluster topo`: a machine, in any of its text forms.
//!
//! Does not judge the machine; it shows what its source said.
//!
//! *Invariant:* notes about the topology go to standard error, unless the form carries them.

use std::path::PathBuf;

use anstyle::{AnsiColor, Color, Style};
use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::{output, plan, source};
use crate::topology::{LinkKind, Occupant, Topology};

/// Arguments of `topo`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// A file, `-`, or a built-in machine such as dgx-h100, in any form that is recognised from
    /// its content; without it, this machine
    #[arg(long, value_name = "SRC")]
    topology: Option<String>,

    /// The form to show it in
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,

    /// Show the workers of this plan too, as 'plan -o yaml' printed it ('-' for standard input);
    /// with '-o tree' or '-o svg'
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,

    /// Leave out what identifies the machine (UUIDs, host name), to send it to somebody
    #[arg(long)]
    anonymize: bool,

    /// Print how long NVML, hwloc and sysfs took, to standard error
    #[arg(long, conflicts_with = "topology")]
    timings: bool,
}

/// The forms that a topology can be shown in.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// As `nvidia-smi topo -m` prints it.
    #[default]
    Matrix,
    /// Package, NUMA node, switch, device.
    Tree,
    /// Complete, for programs.
    Json,
    /// Complete, as a file to keep, edit or send.
    Yaml,
    /// For NCCL, through NCCL_TOPO_FILE.
    Nccl,
    /// For Graphviz.
    Dot,
    /// A picture.
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

/// Shows a machine.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let workers = workers(arguments)?;
    let topology = read(arguments)?;
    let topology = if arguments.anonymize { topology.anonymized() } else { topology };
    match arguments.output {
        Form::Json => output::print_json(&topology)?,
        Form::Yaml => output::print(&topology.to_yaml())?,
        // A matrix of no devices says nothing; the rest of the machine does.
        Form::Matrix if topology.gpus.is_empty() && topology.nics.is_empty() => {
            output::print(&topology.to_tree_with(&workers))?;
        }
        Form::Matrix => output::print(&coloured(&topology.to_matrix()))?,
        Form::Tree => output::print(&topology.to_tree_with(&workers))?,
        Form::Nccl => {
            let text = topology.to_nccl().map_err(|error| Failure::new(Exit::Usage, error))?;
            output::print(&text)?;
        }
        Form::Dot => output::print(&topology.to_dot())?,
        Form::Svg => output::print(&topology.to_svg_with(&workers))?,
    }
    if !arguments.output.carries_notes() {
        topology.notes.iter().for_each(|note| output::note(note));
    }
    Ok(Exit::Done)
}

/// The workers that are to be shown: none without a plan.
fn workers(arguments: &Arguments) -> Result<Vec<Occupant>, Failure> {
    let Some(path) = &arguments.plan else { return Ok(Vec::new()) };
    if arguments.output.shows_workers() {
        return Ok(plan::load(path)?.occupants());
    }
    let error = anyhow::anyhow!("this form has no place for the workers of a plan");
    Err(Failure::new(Exit::Usage, error).hint("ask for '-o svg' or '-o tree'"))
}

/// The machine that was asked for: a text's, or this one.
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

/// The matrix with its heading in bold and its links by nearness; the colours reach terminals only.
fn coloured(matrix: &str) -> String {
    let bold = Style::new().bold();
    let mut lines = matrix.lines();
    let heading = lines.next().unwrap_or_default();
    let mut text = format!("{bold}{heading}{bold:#}\n");
    for line in lines {
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
