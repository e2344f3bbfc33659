//! `down`: stops a running cluster and waits until nothing of it is left.

use std::collections::BTreeMap;

use clap::Args;
use tokio::task::JoinSet;

use super::failure::{Exit, Failure};
use super::{output, reach};
use crate::cluster::{self, Clusters, Ended, FindError, Handle, TakeDownError};
use crate::ids::ClusterName;
use crate::supervise::Escalation;
use crate::units::Span;

/// Stops a cluster: SIGTERM, then SIGKILL after the grace period.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster down demo
  cuda-cluster down --all
  cuda-cluster down --kill demo                    # if the supervisor hangs")]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    name: Option<ClusterName>,
    /// Stop all clusters of this user, and remove what killed clusters have left behind
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Kill at once, without a grace period; also the supervisor, if it does not answer
    #[arg(long)]
    kill: bool,
    /// Longest time to wait for the cluster to end
    #[arg(long, value_name = "SPAN", default_value = "30s")]
    timeout: Span,
}

/// Stops clusters.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    if arguments.all {
        return arguments.end_all();
    }
    match cluster::find(arguments.name.as_ref()) {
        Ok(found) => arguments.end(vec![found]),
        Err(FindError::Ended(ended)) => {
            ended.sweep().map_err(reach::unusable)?;
            output::status(&format!("{} is down: it {}", ended.name, ended.summary()));
            Ok(Exit::Done)
        }
        Err(error) => Err(reach::not_found(error)),
    }
}

impl Arguments {
    fn end_all(&self) -> Result<Exit, Failure> {
        let Clusters { running, ended, unreadable } =
            cluster::clusters().map_err(reach::not_found)?;
        if running.is_empty() && unreadable.is_empty() {
            output::note(&"no cluster is running");
        }
        let swept = ended.iter().map(Ended::sweep).filter_map(Result::err);
        let mut failures: Vec<Failure> =
            unreadable.into_iter().chain(swept).map(reach::unusable).collect();
        failures.extend(self.end(running).err());
        reach::last_of(failures)
    }

    /// Stops clusters concurrently, and reports each one as soon as it is down.
    fn end(&self, clusters: Vec<Handle>) -> Result<Exit, Failure> {
        let (kill, within) = (self.kill, self.timeout.0);
        reach::runtime()?.block_on(async move {
            let mut ending = JoinSet::new();
            let mut names = BTreeMap::new();
            for found in clusters {
                let name = found.name.clone();
                let task = ending.spawn(async move {
                    match kill {
                        true => found.kill(within).await,
                        false => found.stop(Escalation::Graceful, within).await,
                    }
                });
                names.insert(task.id(), name);
            }
            let mut failures = Vec::new();
            while let Some(ended) = ending.join_next_with_id().await {
                match ended {
                    Ok((id, Ok(()))) => {
                        let name = names.get(&id).map(ClusterName::as_str).unwrap_or_default();
                        output::status(&format!("{name} is down"));
                    }
                    Ok((_, Err(error))) => failures.push(failure(error)),
                    Err(error) => failures.push(Failure::new(Exit::Failed, error)),
                }
            }
            reach::last_of(failures)
        })
    }
}

fn failure(error: TakeDownError) -> Failure {
    let exit = match error {
        TakeDownError::StillEnding { .. } => Exit::NotReady,
        _ => Exit::Failed,
    };
    let hint = error.hint();
    Failure::new(exit, error).maybe_hint(hint)
}
