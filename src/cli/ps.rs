//! `ps`: shows the processes of running clusters, and how others have ended.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::failure::{Exit, Failure};
use super::signals::Signals;
use super::{audit, output, reach, workers};
use crate::cluster::{self, Clusters, Ended, FindError, Handle, recorded_audit, recorded_machine};
use crate::dashboard::{Figures, Meter, processes_of};
use crate::ids::ClusterName;
use crate::os::process;
use crate::plan::Plan;
use crate::supervise::state::{self, ClusterState, GpuUse, time_of_day};
use crate::supervise::{ClusterPhase, ProcessState};
use crate::units::HumanSpan;

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
    /// A table with all columns: also limits, containment, UCX library, lanes, device memory and
    /// last exits
    Wide,
    /// JSON with a stable schema: one cluster, or a list with -a and no name
    Json,
}

/// Shows clusters.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let mut meters = Meters::default();
    if !arguments.watch {
        let clusters = arguments.meant()?;
        return match arguments.output {
            Form::Json => arguments.print(clusters),
            Form::Table | Form::Wide => {
                let shown = arguments.show(clusters, &mut meters);
                output::print(&shown.text)?;
                reach::last_of(shown.failures)
            }
        };
    }
    let terminal = console::Term::stdout();
    if !terminal.is_term() || arguments.output == Form::Json {
        let error = anyhow::anyhow!("--watch shows a table on a terminal, again and again");
        let hint = "for a program: cuda-cluster events --follow --json";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    let event_loop = reach::runtime()?;
    let mut signals = event_loop.block_on(async { Signals::new() })?;
    let mut has_shown = false;
    loop {
        let clusters = match arguments.meant() {
            Ok(clusters) if has_shown && clusters.running.is_empty() => {
                output::status("no cluster is running any more");
                return Ok(Exit::Done);
            }
            Ok(clusters) => clusters,
            Err(_) if has_shown => {
                output::status(&arguments.ended());
                return Ok(Exit::Done);
            }
            Err(failure) => return Err(failure),
        };
        has_shown = !clusters.running.is_empty();
        let shown = arguments.show(clusters, &mut meters);
        // A terminal that can't be cleared shows one table below the other.
        let _ = terminal.clear_screen();
        output::print(&shown.text)?;
        shown.failures.iter().for_each(output::failure);
        if !has_shown {
            return Ok(Exit::Done);
        }
        let signal =
            event_loop.block_on(async { tokio::time::timeout(WATCH, signals.next()).await });
        if let Ok(number) = signal {
            // The shell's prompt has a line of its own.
            output::status("");
            return Ok(Exit::Signal(number));
        }
    }
}

/// Time between two tables.
const WATCH: Duration = Duration::from_secs(2);

/// Time between the two readings that the use of CPUs is told from, if the supervisor has taken
/// none before. The kernel counts in steps of 10 ms.
const READINGS: Duration = Duration::from_millis(200);

/// What is shown, and why it is not all.
#[derive(Default)]
struct Shown {
    text: String,
    failures: Vec<Failure>,
}

/// The meters of clusters, by name and start. The first reading of one is its supervisor's, or is
/// repeated, so that there are rates.
#[derive(Default)]
struct Meters(BTreeMap<(ClusterName, String), Meter>);

impl Meters {
    /// Reads the figures of clusters, in their order.
    fn read(&mut self, states: &[(Handle, ClusterState)]) -> Vec<Figures> {
        let mut is_first = false;
        for (found, state) in states {
            self.0.entry((state.name.clone(), state.started_at.clone())).or_insert_with(|| {
                let mut meter = Meter::new(machine(found, state).as_ref());
                if !meter.begin(state) {
                    is_first = true;
                    meter.read(&processes_of(state));
                }
                meter
            });
        }
        if is_first {
            std::thread::sleep(READINGS);
        }
        let figures = |(_, state): &(Handle, ClusterState)| {
            let meter = self.0.get_mut(&(state.name.clone(), state.started_at.clone()));
            meter.map(|meter| meter.read(&processes_of(state))).unwrap_or_default()
        };
        states.iter().map(figures).collect()
    }
}

/// The machine that has the cluster's GPUs; none if they are simulated.
fn machine(found: &Handle, state: &ClusterState) -> Option<crate::topology::Topology> {
    recorded_machine(&found.paths).filter(|_| !state.simulated)
}

impl Arguments {
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

    fn state_of(&self, cluster: &Handle) -> Result<ClusterState, Failure> {
        reach::block_on(cluster.control().read(match self.output {
            Form::Table => "/v1/state",
            Form::Wide | Form::Json => "/v1/state?fresh=true",
        }))
    }

    fn print(&self, clusters: Clusters) -> Result<Exit, Failure> {
        let running = clusters.running.iter().map(|found| {
            let mut state = self.state_of(found)?;
            add_gpu_use(found, &mut state);
            let mut state = json!(state);
            if let Some(audit) = recorded_audit(&found.paths) {
                state["audit"] = json!(audit);
            }
            Ok(state)
        });
        let ended = clusters.ended.iter().map(|ended| Ok(final_state(ended)));
        let states: Vec<Value> = running.chain(ended).collect::<Result<_, Failure>>()?;
        match (&states[..], self.name.is_some() || !self.all) {
            ([only], true) => output::print_json(only)?,
            _ => output::print_json(&json!({ "version": state::VERSION, "clusters": states }))?,
        }
        reach::last_of(clusters.unreadable.into_iter().map(reach::unusable).collect())
    }

    fn show(&self, clusters: Clusters, meters: &mut Meters) -> Shown {
        let Clusters { running, mut ended, unreadable } = clusters;
        let (mut tables, mut failures) = (Vec::new(), Vec::new());
        // A cluster that cannot be shown must not hide the others.
        let mut missed = |found: &Handle, failure: Failure| match reach::ended_meanwhile(found) {
            Some(FindError::Ended(one)) => ended.push(*one),
            Some(_) => {}
            None => failures.push(Failure {
                error: failure.error.context(format!("cannot show {}", found.name)),
                ..failure
            }),
        };
        let mut states = Vec::new();
        for found in running {
            match self.state_of(&found) {
                Ok(state) => states.push((found, state)),
                Err(failure) => missed(&found, failure),
            }
        }
        let figures = meters.read(&states);
        for ((found, state), figures) in states.iter().zip(&figures) {
            match self.table(found, state, figures) {
                Ok(text) => tables.push(text),
                Err(failure) => missed(found, failure),
            }
        }
        tables.extend(ended.iter().filter(|_| self.all).map(|ended| self.end_of(ended)));
        failures.extend(unreadable.into_iter().map(reach::unusable));
        if tables.is_empty() && failures.is_empty() {
            match ended.len() {
                0 => output::note(&"no cluster is running"),
                1 => output::note(&"no cluster is running, 1 has ended: cuda-cluster ps -a"),
                some => output::note(&format!(
                    "no cluster is running, {some} have ended: cuda-cluster ps -a"
                )),
            }
        }
        Shown { text: tables.join("\n"), failures }
    }

    /// How the cluster that was watched has ended.
    fn ended(&self) -> String {
        match cluster::find(self.name.as_ref()) {
            Err(FindError::Ended(ended)) => format!("{} {}", ended.name, ended.summary()),
            Err(error @ (FindError::Unreadable(_) | FindError::Unclear { .. })) => {
                error.to_string()
            }
            // Nothing is left of a cluster that was stopped.
            _ => self.name.as_ref().map_or_else(String::new, |name| format!("{name} was stopped")),
        }
    }

    fn table(
        &self,
        cluster: &Handle,
        state: &ClusterState,
        figures: &Figures,
    ) -> Result<String, Failure> {
        let plan: Plan = reach::block_on(cluster.control().read("/v1/plan"))?;
        let simulated = if state.simulated { ", simulated GPUs" } else { "" };
        let mut text =
            format!("{}: {}, {} engine{simulated}", state.name, state.state, state.engine);
        // Not by the time of day, which may have been set since.
        if let Some(up) = process::age(state.supervisor_pid) {
            text.push_str(&format!(", up {}", HumanSpan(up)));
        }
        if let Some(cause) = &state.cause {
            text.push_str(&format!(": {}", cause.text));
        }
        text.push('\n');
        text.push_str(&self.processes(state, &plan, figures));
        for line in workers::addresses(state).iter().chain(&workers::troubles(state)) {
            text.push_str(&format!("{line}\n"));
        }
        if let Some(audit) = recorded_audit(&cluster.paths).filter(|_| self.output == Form::Wide) {
            text.push_str("which wires the bytes took:\n");
            for line in audit::lines(&audit, true) {
                text.push_str(&format!("{line}\n"));
            }
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
            text.push_str(&self.processes(state, &plan, &Figures::default()));
        }
        text
    }

    fn processes(&self, state: &ClusterState, plan: &Plan, figures: &Figures) -> String {
        let mut text = workers::table(state, plan, figures, self.output == Form::Wide);
        text.push_str(&workers::hosts(state));
        text.push_str(&workers::joined(state));
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

/// Adds what the GPUs do, which the supervisor does not know.
fn add_gpu_use(found: &Handle, state: &mut ClusterState) {
    let Some(machine) = machine(found, state) else { return };
    let figures = Meter::new(Some(&machine)).read(&[]);
    for worker in &mut state.workers {
        worker.gpu_use = figures.gauges(worker).map(|gauges| GpuUse {
            used_bytes: gauges.used_bytes,
            total_bytes: gauges.total_bytes,
            busy_percent: gauges.busy_percent,
        });
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
