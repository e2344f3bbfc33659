//! What an engine's own queues say: which tasks its workers have, and what holds the others back.

use serde::{Deserialize, Serialize};

use super::Evidence;

/// What an engine's scheduler and workers say of its tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tasks {
    /// Tasks that wait for the results of others.
    #[serde(default)]
    pub waiting: u64,
    /// Tasks that could run, and for which no worker has room.
    #[serde(default)]
    pub ready: u64,
    /// Tasks that no present worker may run.
    #[serde(default)]
    pub unplaced: u64,
    /// The first of those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<Held>,
    /// Tasks that workers have; not all of many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placed: Vec<Placed>,
    /// Results that workers fetch from each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fetches: Vec<Fetch>,
    /// Workers to which the scheduler gives no tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paused: Vec<Paused>,
}

/// A task that no present worker may run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub name: String,
    /// What it needs: a clause.
    pub why: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// A task that a worker has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// `3:17 (sleep)`, Dask's key.
    pub name: String,
    /// The name of its function, as far as known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub function: String,
    /// The worker.
    pub rank: String,
    /// Whether the worker says that it runs.
    #[serde(default)]
    pub runs: bool,
    /// The thread that runs it, if the worker says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<u32>,
    /// For how long it has run, or been with that worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
    /// Tasks that wait for its result, directly or not.
    #[serde(default)]
    pub dependents: u64,
    /// Whether there may be more of them than were counted.
    #[serde(default)]
    pub more: bool,
}

/// A result that a worker fetches from another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    pub name: String,
    /// Who fetches it.
    pub rank: String,
    /// Who has it.
    pub from: String,
    pub for_ms: u64,
    /// Tasks that wait for it there.
    #[serde(default)]
    pub tasks: u64,
    /// Its size, as far as known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// A worker to which the scheduler gives no tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    pub rank: String,
    /// Why: a clause.
    pub why: String,
}

impl Evidence {
    /// The task that a thread of a rank ran while it was looked at.
    ///
    /// Workers are asked after the looks. A task that has not run for as long as these took may
    /// have begun later.
    pub(crate) fn task(&self, rank: &str, tid: u32) -> Option<&Placed> {
        let here = |one: &&Placed| one.rank == rank && one.thread == Some(tid);
        let seen = |one: &&Placed| one.for_ms.is_some_and(|millis| millis >= self.interval_ms);
        self.tasks.as_ref()?.placed.iter().filter(here).find(seen)
    }
}
