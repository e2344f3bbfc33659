//! Samples the stacks of a process, in a process of its own.
//!
//! *Invariant:* the one that looks ends with this program, and is given up after [`LONGEST`].

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use crate::aside;
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
    let mut command = aside::command(&own_program(), SUBCOMMAND);
    command.arg(pid.to_string()).stdin(Stdio::null());
    let failed = |error: &dyn std::fmt::Display| format!("the process that looks failed: {error}");
    let output = command.output();
    match tokio::time::timeout(LONGEST, output).await {
        Ok(Ok(output)) => serde_json::from_slice::<Result<Profile, String>>(&output.stdout)
            .unwrap_or_else(|error| Err(failed(&error))),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(format!("the process that looks did not answer within {LONGEST:?}")),
    }
}

/// Samples, and writes what was seen, or why nothing was, to standard output.
pub(crate) fn main() -> ExitCode {
    let bound = aside::end_with_the_starter();
    let pid = std::env::args().nth(2).and_then(|text| text.parse().ok());
    let (true, Some(pid)) = (bound, pid) else { return ExitCode::FAILURE };
    aside::answer(&profile(pid, SAMPLES, EVERY))
}
