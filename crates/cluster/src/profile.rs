//! Samples the stacks of a process, in a process of its own: the kernel may hold whoever reads the
//! memory of one that it holds.
//!
//! *Invariant:* the one that looks ends with this program, and is given up after [`LONGEST`].

use std::io::{self, Write};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use tokio::process::Command;

use cuda_cluster_machine::os::process::own_program;
use cuda_cluster_why::look::profile::{Profile, profile};

/// The hidden subcommand that samples the process of the given number.
pub(crate) const SUBCOMMAND: &str = "__profile";

/// Samples, and the time between two.
const SAMPLES: u32 = 60;
const EVERY: Duration = Duration::from_millis(50);

/// How long it may take: a hundred threads that run are waited for.
const LONGEST: Duration = Duration::from_secs(30);

/// Samples the stacks of a process of this user for some seconds.
///
/// # Errors
/// Why nothing was seen.
pub async fn profile_of(pid: u32) -> Result<Profile, String> {
    let mut command = Command::new(own_program());
    command.args([SUBCOMMAND, &pid.to_string()]).stdin(Stdio::null()).stderr(Stdio::null());
    let failed = |error: &dyn std::fmt::Display| format!("the process that looks failed: {error}");
    let output = command.kill_on_drop(true).output();
    match tokio::time::timeout(LONGEST, output).await {
        Ok(Ok(output)) => {
            let seen: Result<Profile, String> =
                serde_json::from_slice(&output.stdout).map_err(|error| failed(&error))?;
            seen
        }
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(format!("the process that looks did not answer within {LONGEST:?}")),
    }
}

/// Samples, and writes what was seen, or why nothing was, to standard output.
pub(crate) fn main() -> ExitCode {
    // The thread that has started it stays while the page is served.
    let bound = set_pdeathsig(Signal::SIGKILL);
    let pid = std::env::args().nth(2).and_then(|text| text.parse().ok());
    let (Ok(()), Some(pid)) = (bound, pid) else { return ExitCode::FAILURE };
    let seen = profile(pid, SAMPLES, EVERY);
    let written = serde_json::to_string(&seen).map(|text| writeln!(io::stdout(), "{text}"));
    if matches!(written, Ok(Ok(()))) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
