//! Which processes of a cluster have logs.
//!
//! *Invariant:* each is named once, always in the same order.

use std::fs;
use std::io;

use super::{Paths, SCHEDULER, recorded_plan};

/// Names of the processes that have a log, or will have one with their first line: the scheduler
/// first, then by name and number.
///
/// # Errors
/// If the directory of the logs can't be read.
pub fn logged(paths: &Paths) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(paths.logs())?;
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".log").map(str::to_owned));
    // A directory without a readable plan still has logs.
    let plan = recorded_plan(paths);
    let planned = plan.iter().flat_map(|plan| {
        let scheduler = plan.scheduler.is_some().then(|| SCHEDULER.to_owned());
        scheduler.into_iter().chain(plan.workers.iter().map(|worker| worker.name.clone()))
    });
    let mut names: Vec<String> = names.chain(planned).collect();
    let number = |name: &str| {
        let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        digits.split('.').next().and_then(|digits| digits.parse::<u32>().ok())
    };
    names.sort_by_key(|name| (name != SCHEDULER, number(name), name.clone()));
    names.dedup();
    Ok(names)
}
