//! Waits for what comes through descriptors: who is at their other ends.
//!
//! *Invariant:* who is outside of the job is a cause only if nobody of the job is at another end.

use std::collections::BTreeSet;

use super::{Visited, Walk};
use crate::condition::{Condition, Kind};
use crate::evidence::{Connection, End, Holder, Outsider, Process, Thread, is_a_device};

/// Who has the other ends of descriptors: other ranks, processes of the rank itself, and what is
/// not of the job.
#[derive(Default)]
struct Far<'a> {
    on: BTreeSet<String>,
    own: Vec<u32>,
    outside: BTreeSet<String>,
    /// Of those outside, some that work, or sleep for a time.
    busy: Vec<&'a Outsider>,
}

impl<'a> Walk<'a> {
    /// Descriptors: who is at their other ends?
    pub(super) fn ends(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        ends: &[End],
        writes: bool,
        visited: &mut Visited,
    ) -> Condition {
        let at = |kind, text| self.at(process, Some(thread), kind, text);
        if let Some((kind, text)) = ends.iter().find_map(known) {
            return at(kind, text);
        }
        if let Some(text) = ends.iter().rev().find_map(|end| unanswered(process, end)) {
            return at(Kind::Network, text);
        }
        let Far { on, own, outside, busy } = self.far(process, ends, writes);
        let next = own.iter().filter_map(|pid| self.evidence.process(*pid));
        let next = next.filter(|one| one.pid != process.pid && one.parent == process.pid);
        for child in next {
            if visited.insert(child.pid) {
                return self.process(child, visited);
            }
        }
        let doing = if writes { "writes what is not read by" } else { "waits for" };
        if let (Some(other), true) = (own.first(), on.is_empty()) {
            return at(Kind::Child, format!("{doing} its process {other}, which waits for it"));
        }
        if !on.is_empty() {
            let on: Vec<String> = on.into_iter().collect();
            return Condition {
                text: format!("{doing} {}", on.join(", ")),
                on,
                ..at(Kind::Peer, String::new())
            };
        }
        if let Some(other) = busy.iter().max_by_key(|other| other.works) {
            let Outsider { pid, name, works, .. } = other;
            let (kind, how) =
                if *works { (Kind::Works, "works") } else { (Kind::Outside, "sleeps") };
            let text = format!("{doing} process {pid} ({name}), which {how}");
            return Condition { timed: !works, ..at(kind, text) };
        }
        match outside.first() {
            Some(who) if writes => at(Kind::Unread, format!("{doing} {who}")),
            Some(who) => at(Kind::Outside, format!("{doing} {who}")),
            None => at(Kind::Idle, "waits for events".to_owned()),
        }
    }

    /// Who has the other ends.
    fn far(&self, process: &Process, ends: &[End], writes: bool) -> Far<'a> {
        let mut far = Far::default();
        for end in ends {
            let others: &[Holder] = match end {
                End::Pipe { others, .. } => {
                    if others.is_empty() && !writes {
                        far.outside.insert("a pipe that only it has".to_owned());
                    }
                    others
                }
                End::Connection(number) => {
                    let Some(connection) = process.connections.get(*number) else { continue };
                    if connection.peer.is_none() && connection.remote != "unix" {
                        far.outside.insert(connection.remote.clone());
                    }
                    connection.peer.as_slice()
                }
                End::File { path, .. } => {
                    far.outside.insert(path.clone());
                    &[]
                }
                End::Terminal { .. }
                | End::Listener { .. }
                | End::Event
                | End::Timer
                | End::Other(_) => &[],
            };
            for other in others {
                match &other.rank {
                    Some(rank) if rank == self.rank => far.own.push(other.pid),
                    Some(rank) => drop(far.on.insert(rank.clone())),
                    None => {
                        far.outside.insert(format!("process {}", other.pid));
                        let known = self.evidence.outside.iter().find(|one| one.pid == other.pid);
                        far.busy.extend(known.filter(|one| one.works || one.sleeps));
                    }
                }
            }
        }
        far
    }
}

/// What a wait for this is, whoever else has it: for a person, or for a device.
fn known(end: &End) -> Option<(Kind, String)> {
    match end {
        End::Terminal { path } => Some((Kind::Input, format!("waits for input from {path}"))),
        End::File { path, .. } if is_a_device(path) => {
            Some((Kind::Device, format!("waits for {path}")))
        }
        _ => None,
    }
}

/// A connection whose other end does not answer, in words.
fn unanswered(process: &Process, end: &End) -> Option<String> {
    let End::Connection(number) = end else { return None };
    let connection = process.connections.get(*number)?;
    let Connection { remote, unanswered, unsent_bytes, connecting, .. } = connection;
    let what = if *connecting { "connects to" } else { "has no answer from" };
    let lost = *connecting || *unanswered > 1;
    lost.then(|| format!("{what} {remote} ({unsent_bytes} bytes sent again {unanswered} times)"))
}
