//! Loads a command's topology: from a file, standard input, a built-in machine, or this machine.
//!
//! Does not look at hardware (see `probe`) or parse text (see `topology`).
//!
//! *Invariant:* errors in a text name it as the user did, and exit with 2.

use std::path::Path;

use super::failure::{Exit, Failure};
use super::input::{self, InputError};
use crate::cluster;
use crate::plan::CallerEnvironment;
use crate::probe::{self, Examined, Options, ProbeError, Probed};
use crate::topology::{self, SIZE_LIMIT, Topology};

/// Probes this machine.
pub(crate) fn live() -> Result<Probed, Failure> {
    Options::from_environment().and_then(|options| probe::probe(&options)).map_err(broken)
}

/// Probes this machine, with what preflight judges.
pub(crate) fn examined(caller: &CallerEnvironment) -> Result<Examined, Failure> {
    cluster::examine(caller).map_err(broken)
}

fn broken(error: ProbeError) -> Failure {
    let hint = error.hint();
    let exit = match error {
        ProbeError::Limit(_) => Exit::Usage,
        ProbeError::Driver(_) | ProbeError::DriverHangs { .. } | ProbeError::Thread(_) => {
            Exit::Failed
        }
    };
    Failure::new(exit, error).maybe_hint(hint)
}

/// Loads a topology from a path, from `-` (standard input), or by the name of a built-in machine.
pub(crate) fn load(src: &str) -> Result<Topology, Failure> {
    if let Some(text) = topology::builtin(src) {
        return parse(src, text);
    }
    let path = Path::new(src);
    let text = input::read(path, SIZE_LIMIT).map_err(|error| {
        let absent = matches!(error, InputError::Absent);
        let failure = error.failure("topology", path);
        if absent { failure.hint(nearest(src)) } else { failure }
    })?;
    parse(&input::shown(path), &text)
}

fn parse(src: &str, text: &str) -> Result<Topology, Failure> {
    topology::parse(text).map_err(|error| {
        let hint = error.hint();
        Failure::new(
            Exit::Usage,
            anyhow::Error::new(error).context(format!("cannot read topology {src}")),
        )
        .maybe_hint(hint)
    })
}

/// The hint for a name that is neither a file nor a built-in machine.
fn nearest(src: &str) -> String {
    let stem = Path::new(src).file_stem().and_then(|stem| stem.to_str()).unwrap_or(src);
    crate::text::nearest(stem, topology::builtin_names()).map_or_else(
        || {
            let all: Vec<&str> = topology::builtin_names().collect();
            format!("there is no such file, and the built-in machines are {}", all.join(", "))
        },
        |name| format!("did you mean the built-in machine '{name}'?"),
    )
}
