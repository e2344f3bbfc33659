//! What is known of a cluster that `top` shows.
//!
//! Draws nothing. Reads the plan and the earlier events from the run directory once for each
//! cluster.
//!
//! *Invariant:* the last that was known of a cluster is kept when it has ended.

use std::collections::VecDeque;

use crate::cluster::{Paths, recorded_plan};
use crate::dashboard::{Figures, Lanes, Update};
use crate::ids::ClusterName;
use crate::plan::{Plan, WorkerPlan};
use crate::supervise::record::What;
use crate::supervise::{ClusterState, ProcessState, Record};
use crate::wire::tasks::WorkerOverview;

/// Number of events that are kept: more than a screen shows.
const RECORDS: usize = 200;

/// What is known of a cluster.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) name: ClusterName,
    pub(super) plan: Option<Plan>,
    pub(super) state: Option<ClusterState>,
    pub(super) lanes: Lanes,
    pub(super) figures: Figures,
    /// Tasks that were finished per second between the last two readings.
    pub(super) tasks_per_s: Option<f64>,
    pub(super) records: VecDeque<Record>,
    /// Why the supervisor can't be asked.
    pub(super) silent: Option<String>,
    /// How the cluster has ended.
    pub(super) end: Option<String>,
}

impl Picture {
    pub(super) fn new(name: ClusterName) -> Self {
        Self {
            name,
            plan: None,
            state: None,
            lanes: Lanes::default(),
            figures: Figures::default(),
            tasks_per_s: None,
            records: VecDeque::new(),
            silent: None,
            end: None,
        }
    }

    /// Takes in a piece of news.
    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::State(state) => {
                if self.state.as_ref().is_none_or(|last| last.started_at != state.started_at) {
                    self.read_files();
                }
                self.state = Some(*state);
                (self.silent, self.end) = (None, None);
            }
            Update::Lanes(lanes) => self.lanes = lanes,
            Update::Figures(figures) => {
                self.tasks_per_s = rate(&self.figures, &figures);
                self.figures = *figures;
            }
            Update::Event(record) => self.add(record),
            Update::Silent(text) => self.silent = Some(text),
            Update::End(text) => self.end = Some(text),
            Update::Begin => *self = Self::new(self.name.clone()),
        }
    }

    fn read_files(&mut self) {
        let paths = Paths::of(&self.name);
        self.plan = recorded_plan(&paths);
        let text = std::fs::read_to_string(paths.events()).unwrap_or_default();
        let live = std::mem::take(&mut self.records);
        // The last line may be incomplete.
        let earlier = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        earlier.chain(live).for_each(|record| self.add(record));
    }

    /// Adds a record, unless it is known.
    fn add(&mut self, record: Record) {
        let is_step = matches!(record.what, What::Step { .. });
        if is_step || self.records.contains(&record) {
            return;
        }
        self.records.push_back(record);
        if self.records.len() > RECORDS {
            self.records.pop_front();
        }
    }

    /// The scheduler, then the workers by rank, then those that bring up other machines' workers.
    pub(super) fn processes(&self) -> impl Iterator<Item = &ProcessState> {
        self.state.iter().flat_map(ClusterState::processes)
    }

    pub(super) fn planned(&self, name: &str) -> Option<&WorkerPlan> {
        self.plan.as_ref()?.workers.iter().find(|worker| worker.name == name)
    }

    pub(super) fn tasks(&self, name: &str) -> Option<&WorkerOverview> {
        self.figures.tasks.as_ref()?.workers.iter().find(|worker| worker.name == name)
    }
}

/// Tasks that all workers together have finished per second between two readings.
fn rate(before: &Figures, now: &Figures) -> Option<f64> {
    let finished = |figures: &Figures| {
        let workers = &figures.tasks.as_ref()?.workers;
        Some(workers.iter().map(|worker| worker.finished).sum::<u64>())
    };
    // A worker that was restarted counts from zero.
    let grown = finished(now)?.checked_sub(finished(before)?)?;
    let milliseconds = now.at.checked_sub(before.at).filter(|between| *between > 0)?;
    Some(grown as f64 * 1e3 / milliseconds as f64)
}
