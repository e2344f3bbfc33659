//! `why --read` and `why --ras`: which wires the bytes of a job took, and why not the fast ones.
//!
//! *Invariant:* what was read is shown as text, never as a terminal's commands.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::output::indented;
use super::sanitize::plain;
use super::{input, output};
use cuda_cluster_why::look::ras::{ADDRESS, RasLimits, ask};
use cuda_cluster_why::wires::{Wires, grouped, read};

/// The longest log that is read.
const LONGEST_LOG: usize = 256 << 20;

/// The version of the JSON form.
const VERSION: u32 = 1;

/// What says where bytes went.
#[derive(Args, Debug)]
pub(super) struct Sources {
    /// Read which wires a job used, and why not the fast ones, from its lines of NCCL
    /// (NCCL_DEBUG=INFO) and UCX (UCX_LOG_LEVEL=info, UCX_PROTO_INFO=y), or from answers of
    /// 'ncclras'; '-' is standard input
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = OTHERS)]
    read: Vec<PathBuf>,
    /// Ask the RAS of NCCL (2.24 or later) in a job that runs on this machine; without HOST:PORT
    /// at NCCL_RAS_ADDR, or else at localhost:28028
    #[arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = OTHERS,
    )]
    ras: Option<String>,
}

/// The options about processes.
const OTHERS: [&str; 3] = ["name", "save", "bundle"];

/// What `-o json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    version: u32,
    wires: &'a Wires,
}

impl Sources {
    /// Whether there is something to read.
    pub(super) fn given(&self) -> bool {
        !self.read.is_empty() || self.ras.is_some()
    }

    fn text(&self) -> Result<String, Failure> {
        let mut text = String::new();
        for path in &self.read {
            let log = input::read_log(path, LONGEST_LOG);
            text.push_str(&log.map_err(|error| error.failure("log", path))?);
            text.push('\n');
        }
        if let Some(address) = &self.ras {
            let named = || std::env::var("NCCL_RAS_ADDR").unwrap_or_else(|_| ADDRESS.to_owned());
            let address = if address.is_empty() { named() } else { address.clone() };
            let answer = ask(&address, RasLimits::default()).map_err(|error| {
                let hint = error.hint();
                Failure::new(Exit::Failed, error).maybe_hint(hint)
            })?;
            text.push_str(&answer);
        }
        Ok(text)
    }
}

/// Reads and prints.
pub(super) fn run(sources: &Sources, form: output::Form) -> Result<Exit, Failure> {
    let wires = read(&sources.text()?);
    match form {
        output::Form::Json => output::print_json(&Answer { version: VERSION, wires: &wires })?,
        output::Form::Table => output::print_text(&shown(&wires))?,
    }
    Ok(match (wires.causes.is_empty(), wires.any()) {
        (false, _) => Exit::Stalled,
        (true, true) => Exit::Done,
        (true, false) => Exit::Failed,
    })
}

fn shown(wires: &Wires) -> String {
    if wires.causes.is_empty() && !wires.any() {
        return "no line of NCCL or UCX was found\n".to_owned();
    }
    let mut text = String::new();
    for line in grouped(&wires.channels) {
        text.push_str(&format!("{}\n", indented(&line, "    ")));
    }
    if wires.channels.is_empty() {
        text.push_str("no line says which wires are used\n");
    }
    for found in &wires.causes {
        let times =
            if found.lines > 1 { format!(" ({} lines)", found.lines) } else { String::new() };
        text.push_str(&format!("{}\n", indented(&format!("* {}{times}", found.text), "  ")));
        // As it was written, so that it can be searched for.
        text.push_str(&format!("      {}\n", plain(&found.line)));
    }
    if wires.causes.is_empty() {
        text.push_str("nothing wrong is said\n");
    }
    for note in &wires.notes {
        text.push_str(&format!("{}\n", indented(&format!("note: {note}"), "  ")));
    }
    if wires.not_understood > 0 {
        let lines = wires.not_understood;
        text.push_str(&format!("lines of NCCL or UCX that were not understood: {lines}\n"));
    }
    text
}
