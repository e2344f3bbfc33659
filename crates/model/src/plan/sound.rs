//! What every plan has, so that one that was stored and edited is refused before anything starts.
//!
//! Does not judge whether a plan is good, or fits a machine.
//!
//! *Invariant:* a plan that [`plan`](super::plan()) makes is sound (`tests/plan/laws.rs`).

use std::collections::BTreeSet;

use super::engine::EnginePlan;
use super::error::{LONGEST, Unsound};
use super::form::Plan;
use crate::ids::RESERVED;
use crate::spec;

impl Plan {
    /// Whether there is a program of this name among several.
    fn has(&self, name: &str) -> bool {
        let EnginePlan::Command(command) = &self.engine else { return false };
        command.programs.iter().any(|program| program.name == name)
    }

    /// Checks what every plan has.
    ///
    /// # Errors
    /// If it has no worker, names that are no names, are reserved or occur twice, ranks out of
    /// order, numbers that no spec may have, a NUL byte in any text, or lacks the scheduler of its
    /// engine.
    pub fn check(&self) -> Result<(), Unsound> {
        let hosts = match &self.engine {
            EnginePlan::Dask(dask) => &dask.hosts[..],
            EnginePlan::Native(_) | EnginePlan::Command(_) => &[],
        };
        if self.workers.is_empty() && hosts.is_empty() {
            return Err(Unsound::NoWorker);
        }
        let mut names = BTreeSet::new();
        for (at, worker) in self.workers.iter().enumerate() {
            let name = worker.name.as_str();
            if !is_name(name) {
                return Err(Unsound::Name { at, name: name.chars().take(80).collect() });
            }
            if RESERVED.contains(&name) {
                return Err(Unsound::Reserved { at, name: name.to_owned() });
            }
            if !names.insert(name) {
                return Err(Unsound::Taken { at, name: name.to_owned() });
            }
            if let Some(program) = worker.program.as_ref().filter(|name| !self.has(name)) {
                return Err(Unsound::Program { at, program: program.clone() });
            }
            if usize::try_from(worker.rank) != Ok(at) {
                return Err(Unsound::Rank { at, rank: worker.rank });
            }
            if !(1..=spec::MOST_THREADS).contains(&worker.threads) {
                return Err(Unsound::Threads { at, threads: worker.threads });
            }
        }
        if self.supervision.log_keep > spec::MOST_LOGS {
            return Err(Unsound::Logs { keep: self.supervision.log_keep });
        }
        let has_one = match &self.engine {
            EnginePlan::Native(_) => true,
            EnginePlan::Dask(dask) => dask.join.is_none(),
            EnginePlan::Command(_) => false,
        };
        if has_one && self.scheduler.is_none() {
            return Err(Unsound::NoScheduler { engine: self.engine.kind() });
        }
        let text = serde_json::to_string(self)
            .unwrap_or_else(|error| panic!("a plan has a JSON form: {error}"));
        // As JSON writes a NUL byte. To find where it is takes far longer than that there is none.
        if !text.contains("\\u0000") {
            return Ok(());
        }
        let value = serde_json::to_value(self)
            .unwrap_or_else(|error| panic!("a plan has a JSON form: {error}"));
        spec::each_text("", &value, &|key, text| match text.contains('\0') {
            true => Err(Unsound::Nul { key: key.replace('\0', "\\0"), text: text.to_owned() }),
            false => Ok(()),
        })
    }
}

fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    name.len() <= LONGEST
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(is_allowed)
}
