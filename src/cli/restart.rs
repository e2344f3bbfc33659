//! `restart` and `scale`: request changes from a running cluster's supervisor.

use clap::Args;

use super::failure::{Exit, Failure};
use super::{output, reach};
use crate::cluster::Handle;

/// Arguments of `restart`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster restart demo gpu3")]
pub(super) struct Restart {
    /// The cluster (optional if only one is running), then the process: a worker such as gpu3, or
    /// scheduler for the whole cluster
    #[arg(num_args = 1..=2, required = true, value_name = "[NAME] PROCESS")]
    words: Vec<String>,
}

/// Arguments of `scale`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster scale demo 4")]
pub(super) struct Scale {
    /// The cluster (optional if only one is running), then the number of workers to run: the first
    /// ones of the plan
    #[arg(num_args = 1..=2, required = true, value_name = "[NAME] WORKERS")]
    words: Vec<String>,
}

/// Restarts a process.
pub(super) fn restart(arguments: &Restart) -> Result<Exit, Failure> {
    let (found, process) = meant(&arguments.words)?;
    reach::block_on(found.restart(process))?;
    output::status(&format!("{}: {process} starts again", found.name));
    Ok(Exit::Done)
}

/// Changes the number of running workers.
pub(super) fn scale(arguments: &Scale) -> Result<Exit, Failure> {
    let (found, workers) = meant(&arguments.words)?;
    let workers: usize = workers.parse().map_err(|_| {
        let error = anyhow::anyhow!("{workers:?} is not a number of workers");
        Failure::new(Exit::Usage, error)
    })?;
    reach::block_on(found.scale(workers))?;
    output::status(&format!("{}: {workers} workers", found.name));
    Ok(Exit::Done)
}

/// The cluster and the requested change.
fn meant(words: &[String]) -> Result<(Handle, &str), Failure> {
    let (wish, name) = match words {
        [wish] => (wish, None),
        [name, wish] => {
            (wish, Some(name.parse().map_err(|error| Failure::new(Exit::Usage, error))?))
        }
        _ => unreachable!("clap takes one or two words"),
    };
    if wish.is_empty() {
        let error = anyhow::anyhow!("an empty word is the name of no process");
        return Err(Failure::new(Exit::Usage, error).hint("cuda-cluster ps shows their names"));
    }
    // The word becomes part of a URL's path or query.
    if let Some(odd) = wish.chars().find(|c| !(c.is_ascii_alphanumeric() || "-_.".contains(*c))) {
        let error = anyhow::anyhow!("{wish:?} has a {odd:?}, which no name has");
        return Err(Failure::new(Exit::Usage, error));
    }
    Ok((reach::find(name.as_ref())?, wish))
}
