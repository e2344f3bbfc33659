//! What sets a rank apart from the others: where it is, and which programs it has.
//!
//! *Invariant:* only what most ranks have in common is expected of all.

use std::collections::{BTreeMap, BTreeSet};

use crate::calls;
use crate::condition::Condition;
use crate::evidence::{Evidence, Frame, State, Thread};

/// Those of these ranks that are not where most ranks are, by the functions that their main threads
/// are in, with the line where each has left the others' way; all of them, without a line, if that
/// tells nobody apart.
pub(super) fn elsewhere(evidence: &Evidence, among: Vec<String>) -> Vec<(String, Option<&Frame>)> {
    let frames = |name: &str| main(evidence, name).map_or(&[][..], |main| &main.frames);
    let ways: Vec<Vec<Function<'_>>> =
        evidence.ranks.iter().map(|rank| functions(frames(&rank.name))).collect();
    let most = ways.iter().find(|one| {
        !one.is_empty() && ways.iter().filter(|other| other == one).count() * 2 > ways.len()
    });
    let left = |name: &str| {
        let most = most.filter(|most| functions(frames(name)) != **most)?;
        let mut apart = frames(name).iter().filter(|frame| !most.contains(&function(frame)));
        apart.find(|frame| calls::is_own(frame))
    };
    let found: Vec<_> = among.into_iter().map(|name| (left(&name), name)).collect();
    let apart = found.iter().any(|(left, _)| left.is_some());
    let found = found.into_iter().filter(|(left, _)| left.is_some() || !apart);
    found.map(|(left, name)| (name, left)).collect()
}

/// The thread that a rank began with.
fn main<'a>(evidence: &'a Evidence, rank: &str) -> Option<&'a Thread> {
    let rank = evidence.ranks.iter().find(|one| one.name == rank)?;
    evidence.process(rank.pid?)?.threads.first()
}

/// The file and the function of a frame. Lines differ in what all do alike, too.
type Function<'a> = (&'a str, &'a str);

fn function(frame: &Frame) -> Function<'_> {
    (&frame.file, &frame.function)
}

fn functions(frames: &[Frame]) -> Vec<Function<'_>> {
    frames.iter().map(function).collect()
}

/// What of these ranks have sent to whom they wait for, and lies there unread.
pub(super) fn unread(
    evidence: &Evidence,
    odd: &[String],
    all: &BTreeMap<String, Condition>,
) -> Option<String> {
    odd.iter().find_map(|name| {
        let on = all.get(name)?.on.first()?;
        let theirs = evidence.processes.iter().filter(|process| process.rank == *on);
        let mut connections = theirs.flat_map(|process| &process.connections);
        let from = connections.find(|one| {
            let rank = one.peer.as_ref().and_then(|peer| peer.rank.as_ref());
            rank == Some(name) && one.unread_bytes > 0
        })?;
        Some(format!("{on} does not read the {} bytes that {name} has sent", from.unread_bytes))
    })
}

/// The programs that each other rank has and one of these lacks, where it has others.
pub(super) fn lacking(evidence: &Evidence, odd: &[String]) -> Option<String> {
    let mut programs: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for process in evidence.processes.iter().filter(|one| one.state != State::Zombie) {
        programs.entry(&process.rank).or_default().insert(&process.name);
    }
    let name = odd.first().filter(|_| odd.len() == 1)?;
    let own = programs.get(name.as_str())?;
    let mut others = programs.iter().filter(|(rank, _)| *rank != name).map(|(_, names)| names);
    let first = others.next()?.clone();
    let more = others.clone().next().is_some();
    let all = others.fold(first, |all, names| &all & names);
    let lacks: Vec<&str> = all.difference(own).copied().collect();
    let has: Vec<&str> = own.difference(&all).copied().collect();
    (more && !lacks.is_empty() && !has.is_empty()).then(|| {
        let (lacks, has) = (lacks.join(", "), has.join(", "));
        format!("all others have a process {lacks}, and {name} has none, but {has}")
    })
}
