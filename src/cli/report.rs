//! `report`: writes what is known about a cluster into a file to attach to an issue.

use std::path::{Path, PathBuf};

use clap::Args;

use super::failure::{Exit, Failure};
use super::{output, reach};
use crate::cluster::{self, BugReport, FindError};
use crate::ids::ClusterName;
use crate::supervise::ClusterState;

/// Arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster report demo                       # writes cuda-cluster-demo-report.json
  cuda-cluster report demo -f - | jq .state      # prints it")]
pub(super) struct Arguments {
    /// The cluster, also one that has ended; optional if only one is running
    name: Option<ClusterName>,
    /// The file, or '-' for standard output [default: cuda-cluster-NAME-report.json]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Writes a report.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let (name, paths, state): (_, _, Option<ClusterState>) =
        match cluster::find(arguments.name.as_ref()) {
            // A supervisor that does not answer is a reason for a report.
            Ok(found) => {
                let state = reach::block_on(found.control().read("/v1/state?fresh=true")).ok();
                (found.name, found.paths, state)
            }
            Err(FindError::Ended(ended)) => (ended.name, ended.paths, ended.state),
            Err(error) => return Err(reach::not_found(error)),
        };
    let report = BugReport::collect(&name, &paths, state.as_ref());
    let file = arguments.file.clone();
    let file = file.unwrap_or_else(|| format!("cuda-cluster-{name}-report.json").into());
    if file == Path::new("-") {
        output::print_json(&report)?;
        return Ok(Exit::Done);
    }
    output::write_json(&file, &report)?;
    output::status(&format!(
        "{}: machine, plan, preflight, state, events, history, logs and crashes; values with a \
         secret's name are masked, but read it before you share it",
        file.display()
    ));
    Ok(Exit::Done)
}
