//! What processes have in common that look at others for this program: the kernel may hold whoever
//! reads the memory of one that it holds.
//!
//! *Invariant:* each ends with the thread that has started it, and writes to who has asked alone.

use std::io::{self, Write};
use std::path::Path;
use std::process::{ExitCode, Stdio};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use serde::Serialize;
use tokio::process::Command;

/// The program's hidden subcommand, which is killed when its handle is dropped.
pub(crate) fn command(program: &Path, subcommand: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(subcommand).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.kill_on_drop(true);
    command
}

/// Has this process end with who has started it: its thread, which stays as long as it asks.
/// Without that it must not go on.
pub(crate) fn end_with_the_starter() -> bool {
    set_pdeathsig(Signal::SIGKILL).is_ok()
}

/// Writes an answer, and ends well if somebody has it.
///
/// A line, because the end of the output may wait for the kernel, as the process's end does.
pub(crate) fn answer(answer: &impl Serialize) -> ExitCode {
    let written = serde_json::to_string(answer).map(|text| writeln!(io::stdout(), "{text}"));
    if matches!(written, Ok(Ok(()))) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
