//! `down`: ends a running cluster and waits until nothing of it is left.

use std::time::{Duration, Instant};

use clap::Args;

use super::failure::{Exit, Failure};
use super::{output, reach};
use crate::cluster::{self, Found};
use crate::ids::ClusterName;
use crate::supervise::Escalation;
use crate::units::Span;

/// Ends a cluster: SIGTERM, then SIGKILL after the grace.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// The cluster; may be left out when only one runs.
    name: Option<ClusterName>,
    /// End every cluster of this user.
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Kill at once, without grace.
    #[arg(long)]
    kill: bool,
    /// Longest wait for the end
    #[arg(long, value_name = "SPAN", default_value = "30s")]
    timeout: Span,
}

/// Ends clusters.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    arguments.carry_out()
}

impl Arguments {
    fn carry_out(&self) -> Result<Exit, Failure> {
        let found = match self.all {
            true => cluster::running(),
            false => vec![reach::find(self.name.as_ref())?],
        };
        if found.is_empty() {
            output::note(&"no cluster is running");
        }
        let how = if self.kill { Escalation::Kill } else { Escalation::Graceful };
        let began = Instant::now();
        for cluster in &found {
            reach::block_on(cluster.control().order(&format!("/v1/stop?how={how}")))?;
        }
        for cluster in &found {
            self.wait(cluster, began)?;
            output::status(&format!("{} is down", cluster.name));
        }
        Ok(Exit::Done)
    }

    /// The lock of the run directory is free when no process of the cluster is left.
    fn wait(&self, cluster: &Found, began: Instant) -> Result<(), Failure> {
        while cluster.paths.is_alive() {
            if began.elapsed() > self.timeout.0 {
                let error =
                    anyhow::anyhow!("{} is still ending after {}", cluster.name, self.timeout);
                let hint = format!("cuda-cluster down --kill {}", cluster.name);
                return Err(Failure::new(Exit::NotReady, error).hint(hint));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
