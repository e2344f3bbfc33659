//! `down`: ends a running cluster and waits until nothing of it is left.

use std::time::{Duration, Instant};

use clap::Args;

use super::failure::{Exit, Failure};
use super::{output, reach};
use crate::cluster::{self, Found};
use crate::ids::ClusterName;
use crate::supervise::{ClusterState, Escalation};

/// Ends a cluster: SIGTERM, then SIGKILL after the grace.
#[derive(Args, Debug)]
pub(super) struct Down {
    /// The cluster; may be left out when only one runs.
    name: Option<ClusterName>,
    /// End every cluster of this user.
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Kill at once, without grace.
    #[arg(long)]
    kill: bool,
    /// Longest wait for the end, on top of the cluster's own grace, in seconds.
    #[arg(long, default_value_t = 30)]
    within: u64,
}

impl Down {
    pub(super) fn run(self) -> Result<Exit, Failure> {
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
            let body = serde_json::json!({ "how": how });
            let order = cluster.control();
            let _: ClusterState = reach::block_on(order.order("/v1/stop", &body))?;
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
            if began.elapsed() > Duration::from_secs(self.within) {
                let error = anyhow::anyhow!("{} is still ending after {} s", cluster.name, self.within);
                let hint = format!("cuda-cluster down --kill {}", cluster.name);
                return Err(Failure::new(Exit::NotReady, error).hint(hint));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
