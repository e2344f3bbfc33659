//! `ps`: shows the processes of running clusters, and how others have ended.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::failure::{Exit, Failure};
use super::{output, reach, workers};
use crate::cluster::{self, Clusters, Ended, FindError, Found};
use crate::ids::ClusterName;
use crate::plan::Plan;
use crate::supervise::state::{self, ClusterState, time_of_day};
use crate::supervise::{ClusterPhase, ProcessState};

/// Shows running clusters and their processes.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster ps                                  # running clusters
  cuda-cluster ps -o wide demo
  cuda-cluster ps --watch
  cuda-cluster ps -a                               # also how others have ended")]
pub(super) struct Arguments {
    /// The cluster [default: all]
    name: Option<ClusterName>,
    /// Also show clusters that have ended and why, until their names are used again
    #[arg(short, long)]
    all: bool,
    /// Show it again every two seconds, until Ctrl-C or the cluster's end
    #[arg(short, long)]
    watch: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// A table
    Table,
    /// A table that adds containment, UCX library, lanes, device memory and last exits
    Wide,
    /// JSON with a stable schema: one cluster, or a list with -a and no name
    Json,
}

/// Shows clusters.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    if !arguments.watch {
        return arguments.once();
    }
    let terminal = console::Term::stdout();
    if !terminal.is_term() || arguments.output == Form::Json {
        let error = anyhow::anyhow!("--watch shows a table on a terminal, again and again");
        let hint = "for a program: cuda-cluster events --follow --json";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    loop {
        // A terminal that can't be cleared shows one table below the other.
        let _ = terminal.clear_screen();
        arguments.once()?;
        std::thread::sleep(WATCH);
    }
}

/// Time between two tables.
const WATCH: Duration = Duration::from_secs(2);

impl Arguments {
    /// Shows clusters once.
    fn once(&self) -> Result<Exit, Failure> {
        let clusters = self.meant()?;
        match self.output {
            Form::Json => self.print(clusters),
            Form::Table | Form::Wide => self.show(clusters),
        }
    }

    /// The clusters to show.
    fn meant(&self) -> Result<Clusters, Failure> {
        // JSON without a list has exactly one cluster.
        let one = self.name.is_some() || (self.output == Form::Json && !self.all);
        let found = match one {
            true => cluster::find(self.name.as_ref()),
            false => return cluster::clusters().map_err(reach::not_found),
        };
        match found {
            Ok(found) => Ok(Clusters { running: vec![found], ..Clusters::default() }),
            Err(FindError::Ended(ended)) if self.all => {
                Ok(Clusters { ended: vec![*ended], ..Clusters::default() })
            }
            Err(FindError::Ended(ended)) => {
                let hint = format!("cuda-cluster ps -a {}", ended.name);
                Err(reach::not_found(FindError::Ended(ended)).hint(hint))
            }
            Err(error) => Err(reach::not_found(error)),
        }
    }

    fn state_of(&self, cluster: &Found) -> Result<ClusterState, Failure> {
        reach::block_on(cluster.control().read(match self.output {
            Form::Table => "/v1/state",
            Form::Wide | Form::Json => "/v1/state?fresh=true",
        }))
    }

    fn print(&self, clusters: Clusters) -> Result<Exit, Failure> {
        let running = clusters.running.iter().map(|found| Ok(json!(self.state_of(found)?)));
        let ended = clusters.ended.iter().map(|ended| Ok(final_state(ended)));
        let states: Vec<Value> = running.chain(ended).collect::<Result<_, Failure>>()?;
        match (&states[..], self.name.is_some() || !self.all) {
            ([only], true) => output::print_json(only)?,
            _ => output::print_json(&json!({ "version": state::VERSION, "clusters": states }))?,
        }
        reach::last_of(clusters.unreadable.into_iter().map(reach::unusable).collect())
    }

    fn show(&self, clusters: Clusters) -> Result<Exit, Failure> {
        let Clusters { running, mut ended, unreadable } = clusters;
        let mut failures = Vec::new();
        let mut gap = "";
        for found in &running {
            // A cluster that cannot be shown must not hide the others.
            match self.state_of(found).and_then(|state| self.table(found, &state)) {
                Ok(text) => {
                    output::print(&format!("{gap}{text}"))?;
                    gap = "\n";
                }
                Err(failure) => match reach::ended_meanwhile(found) {
                    Some(FindError::Ended(one)) => ended.push(*one),
                    Some(_) => {}
                    None => failures.push(Failure {
                        error: failure.error.context(format!("cannot show {}", found.name)),
                        ..failure
                    }),
                },
            }
        }
        for ended in ended.iter().filter(|_| self.all) {
            output::print(&format!("{gap}{}", self.end_of(ended)))?;
            gap = "\n";
        }
        failures.extend(unreadable.into_iter().map(reach::unusable));
        if gap.is_empty() && failures.is_empty() {
            match ended.len() {
                0 => output::note(&"no cluster is running"),
                1 => output::note(&"no cluster is running, 1 has ended: cuda-cluster ps -a"),
                some => output::note(&format!(
                    "no cluster is running, {some} have ended: cuda-cluster ps -a"
                )),
            }
        }
        reach::last_of(failures)
    }

    fn table(&self, cluster: &Found, state: &ClusterState) -> Result<String, Failure> {
        let plan: Plan = reach::block_on(cluster.control().read("/v1/plan"))?;
        let simulated = if state.simulated { ", simulated GPUs" } else { "" };
        let mut text =
            format!("{}: {}, {} engine{simulated}", state.name, state.state, state.engine);
        if let Some(cause) = &state.cause {
            text.push_str(&format!(": {}", cause.text));
        }
        text.push('\n');
        text.push_str(&self.processes(state, &plan));
        for line in workers::addresses(state).iter().chain(&workers::troubles(state)) {
            text.push_str(&format!("{line}\n"));
        }
        Ok(text)
    }

    /// How a cluster ended, and the last state of its processes.
    fn end_of(&self, ended: &Ended) -> String {
        let mut text = format!("{}: {}", ended.name, ended.summary());
        let Some(state) = &ended.state else { return text + "\n" };
        if let Some(cause) = &state.cause {
            // The last lines of the log come after this text.
            let whole = cause.to_string();
            text.push_str(whole.strip_prefix(&cause.text).unwrap_or_default());
        }
        text.push('\n');
        let plan = std::fs::read(ended.paths.plan()).ok();
        if let Some(plan) = plan.and_then(|text| serde_json::from_slice::<Plan>(&text).ok()) {
            text.push_str(&self.processes(state, &plan));
        }
        text
    }

    fn processes(&self, state: &ClusterState, plan: &Plan) -> String {
        let mut text = workers::table(state, plan, self.output == Form::Wide);
        if self.output == Form::Wide {
            let of = |worker: &ProcessState| worker.ucx.clone();
            for ucx in state.workers.iter().filter_map(of).collect::<BTreeSet<_>>() {
                text.push_str(&format!("UCX {ucx}\n"));
            }
        }
        if let (Some(pid), Some(since)) = (state.guardian_pid, &state.guardian_not_answering_since)
        {
            let since = time_of_day(since);
            text.push_str(&format!(
                "the guardian (process {pid}) is not answering since {since}\n"
            ));
        }
        for note in &state.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

/// The last state of an ended cluster, or a substitute if none was written.
fn final_state(ended: &Ended) -> Value {
    match &ended.state {
        Some(state) => json!(state),
        None => json!({
            "version": state::VERSION,
            "name": ended.name,
            "state": ClusterPhase::Failed,
            "run_directory": ended.paths.root(),
            "cause": { "text": ended.summary() },
        }),
    }
}
