//! What follows from an engine's own queues.
//!
//! *Invariant:* a task is said to run only if its worker says so.

use super::{Found, Kind, Standing};
use crate::condition::{Condition, is_long, short};
use crate::evidence::{Fetch, Held, Paused, Placed, Tasks};
use cuda_cluster_model::units::HumanBytes;

/// No process of the engine does anything that explains a wait: what its queues say.
pub(super) fn alone(tasks: &Tasks) -> Found {
    let placed = tasks.placed.iter();
    let running = placed.clone().filter(|one| one.runs).max_by_key(|one| one.for_ms);
    if let Some(task) = running {
        let text = format!(
            "{}, in no thread that was seen in a task: it may be asynchronous, or have begun just \
             now",
            placed_at(task)
        );
        return (Standing::CannotTell, None, vec![task.rank.clone()], text);
    }
    let fetch = tasks.fetches.iter().max_by_key(|one| one.for_ms);
    if let Some(fetch) = fetch.filter(|one| is_long(Some(one.for_ms))) {
        // Engines give up in the end, and fetch from elsewhere.
        return (Standing::Waiting, Some(Kind::Peer), vec![fetch.from.clone()], fetched(fetch));
    }
    if let Some(task) = placed.max_by_key(|one| one.for_ms) {
        let paused = tasks.paused.iter().find(|one| one.rank == task.rank);
        let text = match paused {
            Some(Paused { why, .. }) => format!("{}, which {why}", placed_at(task)),
            None => format!("{}, which does not say that it runs", placed_at(task)),
        };
        let standing = if paused.is_some() { Standing::Waiting } else { Standing::CannotTell };
        return (standing, paused.map(|_| Kind::Memory), vec![task.rank.clone()], text);
    }
    // Where a worker is asked for by name and takes no tasks.
    let asked_for = |one: &&Paused| {
        let mut held = tasks.held.iter();
        held.any(|held| held.why.split([' ', ',']).any(|word| word == one.rank))
    };
    if let Some(Paused { rank, why }) = tasks.paused.iter().find(asked_for) {
        let text = format!("tasks wait for {rank}, which {why}");
        return (Standing::Waiting, Some(Kind::Memory), vec![rank.clone()], text);
    }
    if tasks.unplaced > 0 {
        let long = tasks.held.iter().all(|held| is_long(held.for_ms));
        let standing = if long { Standing::Stalled } else { Standing::Waiting };
        return (standing, Some(Kind::Unplaced), Vec::new(), String::new());
    }
    let text = match (tasks.ready, tasks.waiting) {
        (0, 0) => return (Standing::Idle, None, Vec::new(), String::new()),
        (0, waiting) => format!(
            "{} for results of others, and no worker has a task",
            counted(waiting, "waits", "wait")
        ),
        (ready, _) => format!("{} run, and no worker has a task", counted(ready, "could", "could")),
    };
    (Standing::CannotTell, None, Vec::new(), text)
}

/// What is to be said of tasks beside the ranks: those that the odd ones have, and those that
/// nobody may run.
pub(super) fn beside(tasks: &Tasks, odd: &[String], root: Option<&Condition>) -> Vec<String> {
    let here = tasks.placed.iter().filter(|one| odd.contains(&one.rank));
    let place = root.and_then(|root| root.place.as_deref()).unwrap_or_default();
    let function = |one: &Placed| {
        let name = place.rsplit([' ', '.', ':']).next().unwrap_or_default();
        !name.is_empty() && (one.function == name || one.function == place)
    };
    // A worker may have several: that in whose function it is, or else the one that has run for
    // longest.
    let said = here.max_by_key(|one| (one.runs, function(one), one.for_ms));
    let parts = [said.map(placed_at), root.and(waited_for(tasks, odd)), unplaced(tasks)];
    parts.into_iter().flatten().collect()
}

/// What is fetched for long, from these if that is so: what has taken longest, and how much more
/// there is.
fn waited_for(tasks: &Tasks, odd: &[String]) -> Option<String> {
    let long = || tasks.fetches.iter().filter(|one| is_long(Some(one.for_ms)));
    let theirs = || long().filter(|one| odd.contains(&one.from));
    let longest = theirs().max_by_key(|one| one.for_ms);
    let longest = longest.or_else(|| long().max_by_key(|one| one.for_ms))?;
    let others = match long().count().saturating_sub(1) {
        0 => String::new(),
        1 => ", and 1 other fetch has taken long".to_owned(),
        others => format!(", and {others} other fetches have taken long"),
    };
    Some(format!("{}{others}", fetched(longest)))
}

/// `no worker may run task 1:4 (f): it needs gpu=8`.
fn unplaced(tasks: &Tasks) -> Option<String> {
    let Held { name, why, for_ms } = tasks.held.first()?;
    let since = for_ms.filter(|millis| *millis >= 1000);
    let since = since.map_or(String::new(), |millis| format!(" (for {} now)", short(millis)));
    let others = match tasks.unplaced.saturating_sub(1) {
        0 => String::new(),
        others => format!(", nor {}", others_of(others)),
    };
    Some(format!("no worker may run task {name}{since}{others}: {why}"))
}

/// `task 3:17 (sleep) has run on gpu3 for 41 s, and 120 others wait for it`.
fn placed_at(task: &Placed) -> String {
    let Placed { name, rank, runs, for_ms, dependents, more, .. } = task;
    let since = for_ms.map(short);
    let stands = match (runs, since) {
        (true, Some(since)) => format!("has run on {rank} for {since}"),
        (true, None) => format!("runs on {rank}"),
        (false, Some(since)) => format!("has been with {rank} for {since}"),
        (false, None) => format!("is with {rank}"),
    };
    let least = if *more { "at least " } else { "" };
    let waiting = match dependents {
        0 => String::new(),
        1 => format!(", and {least}1 other waits for it"),
        all => format!(", and {least}{all} others wait for it"),
    };
    format!("task {name} {stands}{waiting}")
}

/// `gpu2 has been fetching chunk-7 (128 MiB) from gpu5 for 40 s, for which 1 task waits there`.
fn fetched(fetch: &Fetch) -> String {
    let Fetch { name, rank, from, for_ms, tasks, bytes } = fetch;
    let size = bytes.map_or(String::new(), |bytes| format!(" ({:#})", HumanBytes(bytes)));
    let waiting = match tasks {
        0 => String::new(),
        tasks => format!(", for which {} there", counted(*tasks, "waits", "wait")),
    };
    format!("{rank} has been fetching {name}{size} from {from} for {}{waiting}", short(*for_ms))
}

fn others_of(count: u64) -> String {
    if count == 1 { "1 other".to_owned() } else { format!("{count} others") }
}

/// `1 task waits`, `3 tasks wait`.
fn counted(count: u64, one: &str, more: &str) -> String {
    if count == 1 { format!("1 task {one}") } else { format!("{count} tasks {more}") }
}
