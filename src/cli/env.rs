//! `env`: what a client of a running cluster needs in its environment, for `eval` in a shell.

use clap::Args;

use super::failure::{Exit, Failure};
use super::{output, plan, reach};
use crate::ids::ClusterName;
use crate::plan::Plan;

/// Arguments of `env`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// The cluster; may be left out when only one runs
    name: Option<ClusterName>,
}

/// Prints shell assignments.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let found = reach::find(arguments.name.as_ref())?;
    let planned: Plan = reach::block_on(found.control().read("/v1/plan"))?;
    let directory = found.paths.root().display().to_string();
    let own = [("CUDA_CLUSTER_RUN_DIR".to_owned(), directory)];
    output::print(&plan::assignments(planned.client_env.into_iter().chain(own)))?;
    Ok(Exit::Done)
}
