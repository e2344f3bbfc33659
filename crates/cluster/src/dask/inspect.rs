//! What a Python environment contains: its version and packages, found without importing any.
//!
//! Does not judge the result; `packages` does.
//!
//! *Invariant:* an [`Inspection`] is what the Python itself reported.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

use super::DaskError;

const SCRIPT: &str = include_str!("../python/inspect_packages.py");

/// Longest wait for an answer; an environment on a network file system can be slow.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// What a Python environment contains.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Inspection {
    /// Its version, like `3.11.7`.
    pub version: String,
    /// Its environment's directory.
    pub prefix: PathBuf,
    /// Distribution names, in lower case with hyphens, and their versions.
    pub packages: BTreeMap<String, String>,
}

/// Asks a Python for its version and packages.
///
/// # Errors
/// If it cannot be run, or does not answer like a Python interpreter.
pub async fn inspect(python: &Path) -> Result<Inspection, DaskError> {
    let mut command = Command::new(python);
    command.args(["-S", "-c", SCRIPT]).stdin(Stdio::null()).kill_on_drop(true);
    let mute = |output: String| DaskError::Mute { path: python.to_owned(), output };
    let answer = match tokio::time::timeout(ANSWER_WITHIN, command.output()).await {
        Err(_) => return Err(mute(format!("silent for {} s", ANSWER_WITHIN.as_secs()))),
        Ok(Err(source)) => return Err(DaskError::Run { path: python.to_owned(), source }),
        Ok(Ok(answer)) => answer,
    };
    let text = String::from_utf8_lossy(&answer.stdout);
    serde_json::from_str(text.trim()).map_err(|_| {
        let words = if answer.stderr.is_empty() { &answer.stdout } else { &answer.stderr };
        let words = String::from_utf8_lossy(words);
        mute(words.lines().last().unwrap_or("it says nothing").trim().to_owned())
    })
}
