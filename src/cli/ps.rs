//! `ps`: the processes of running clusters.

use std::collections::BTreeSet;

use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::{output, reach, workers};
use crate::cluster::{self, Found};
use crate::ids::ClusterName;
use crate::plan::Plan;
use crate::supervise::{ClusterState, ProcessState};

/// Shows running clusters and their processes.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// The cluster; all of them when left out.
    name: Option<ClusterName>,
    /// How to show them.
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Form {
    /// A table.
    Table,
    /// A table, with what keeps the processes together, their UCX, lanes and last exits.
    Wide,
    /// JSON, stable.
    Json,
}

/// Shows running clusters.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    arguments.carry_out()
}

impl Arguments {
    fn carry_out(&self) -> Result<Exit, Failure> {
        let found = match (&self.name, self.output) {
            (None, Form::Table | Form::Wide) => cluster::running(),
            (name, _) => vec![reach::find(name.as_ref())?],
        };
        if found.is_empty() {
            output::note(&"no cluster is running");
            return Ok(Exit::Done);
        }
        for (at, cluster) in found.iter().enumerate() {
            let state: ClusterState = reach::block_on(cluster.control().read("/v1/state"))?;
            match self.output {
                Form::Json => output::print_json(&state)?,
                Form::Table | Form::Wide => {
                    let gap = if at > 0 { "\n" } else { "" };
                    output::print(&format!("{gap}{}", self.show(cluster, &state)?))?;
                }
            }
        }
        Ok(Exit::Done)
    }

    fn show(&self, cluster: &Found, state: &ClusterState) -> Result<String, Failure> {
        let plan: Plan = reach::block_on(cluster.control().read("/v1/plan"))?;
        let simulated = if state.simulated { ", simulated GPUs" } else { "" };
        let mut text =
            format!("{}: {}, {} engine{simulated}", state.name, state.state, state.engine);
        if let Some(cause) = &state.cause {
            text.push_str(&format!(": {}", cause.text));
        }
        text.push('\n');
        text.push_str(&workers::table(state, &plan, matches!(self.output, Form::Wide)));
        if matches!(self.output, Form::Wide) {
            let of = |worker: &ProcessState| worker.ucx.clone();
            for ucx in state.workers.iter().filter_map(of).collect::<BTreeSet<_>>() {
                text.push_str(&format!("UCX {ucx}\n"));
            }
        }
        for line in workers::addresses(state).iter().chain(&workers::troubles(state)) {
            text.push_str(&format!("{line}\n"));
        }
        for note in &state.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        Ok(text)
    }
}
