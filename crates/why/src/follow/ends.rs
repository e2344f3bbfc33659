//! Waits for what comes through descriptors: who is at their other ends.
//!
//! *Invariant:* who is outside of the job is a cause only if nobody of the job is at another end.

use std::collections::BTreeSet;

use super::{Visited, Walk, file_of, is_hung};
use crate::calls;
use crate::condition::{Condition, Kind, is_long};
use crate::evidence::{Connection, End, Holder, Outsider, Process, Thread, is_a_device};

/// Who has the other ends of descriptors: other ranks, processes of the rank itself, and what is
/// not of the job.
#[derive(Default)]
struct Far<'a> {
    on: BTreeSet<String>,
    own: Vec<u32>,
    outside: BTreeSet<String>,
    /// Whether one of those outside may go on, for all that is known.
    open: bool,
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
        if let ([End::File { .. }], true) = (ends, writes) {
            let (name, file) = file_of(thread);
            let open = !is_hung(thread);
            return Condition { open, ..at(Kind::File, format!("is in {name}{file}")) };
        }
        let lost = ends.iter().rev().find_map(|end| {
            unanswered(process, end).or_else(|| unacknowledged(process, thread, end))
        });
        if let Some(text) = lost {
            return at(Kind::Network, text);
        }
        let Far { on, own, outside, open, busy } = self.far(process, ends, writes);
        let next = own.iter().filter_map(|pid| self.evidence.process(*pid));
        let next = next.filter(|one| one.pid != process.pid && one.parent == process.pid);
        for child in next {
            if visited.insert(child.pid) {
                let found = self.process(child, visited);
                let idle = found.kind == Kind::Idle;
                let other = if idle { self.beside_idle(child, visited) } else { None };
                return self.through(process, thread, other.unwrap_or(found));
            }
        }
        let doing = if writes { "writes what is not read by" } else { "waits for" };
        if let (Some(other), true) = (own.first(), on.is_empty()) {
            let pipe = ends.iter().any(|end| matches!(end, End::Pipe { .. }));
            let how = match (writes, pipe) {
                (false, true) => "reads from a pipe that is written by",
                _ => doing,
            };
            return at(Kind::Child, format!("{how} its process {other}, which waits for it"));
        }
        if !on.is_empty() {
            let on: Vec<String> = on.into_iter().collect();
            return Condition {
                text: format!("{doing} {}", on.join(", ")),
                open: on.iter().any(|rank| self.does_something(rank)),
                on,
                ..at(Kind::Peer, String::new())
            };
        }
        if let Some(other) = busy.iter().max_by_key(|other| other.works) {
            let Outsider { pid, name, works, .. } = other;
            let (kind, how) =
                if *works { (Kind::Works, "works") } else { (Kind::Outside, "sleeps") };
            let text = format!("{doing} process {pid} ({name}), which {how}");
            return Condition { timed: !works, open, ..at(kind, text) };
        }
        let kind = if writes { Kind::Unread } else { Kind::Outside };
        match (outside.first(), ends) {
            (Some(who), _) => Condition { open, ..at(kind, format!("{doing} {who}")) },
            (None, [End::Changes]) => {
                at(Kind::Unknown, "waits for changes of files, which anybody may make".to_owned())
            }
            (None, _) => {
                // A datagram's sender is not known, nor is a socket's other end that is new.
                let open = ends.iter().any(|end| matches!(end, End::Other(_)));
                Condition { open, ..at(Kind::Idle, "waits for events".to_owned()) }
            }
        }
    }

    /// What another thread of a process waits for that accepts connections, or waits for events:
    /// it may be the one that serves who waits.
    fn beside_idle(&self, process: &'a Process, visited: &mut Visited) -> Option<Condition> {
        let fresh = process.threads.iter().filter(|one| !visited.contains(&one.tid));
        let mut fresh = fresh.filter(|one| !one.frames.is_empty() && !calls::has_no_task(one));
        let thread = fresh.next()?;
        Some(self.thread(process, thread, visited))
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
                    let tcp = connection.remote != "unix";
                    if connection.peer.is_none() && tcp {
                        far.outside.insert(connection.remote.clone());
                        far.open = true;
                    }
                    // Both ends may be its own: of a server in a thread, say.
                    let own = |peer: &&Holder| peer.pid == process.pid;
                    if connection.peer.as_ref().filter(own).is_some() {
                        if tcp {
                            let text = format!("{}, which is its own", connection.remote);
                            far.outside.insert(text);
                        }
                        continue;
                    }
                    connection.peer.as_slice()
                }
                End::File { path, .. } => {
                    // A device, or a named pipe that somebody may open.
                    far.outside.insert(path.clone());
                    far.open = true;
                    &[]
                }
                End::Process { pid } => {
                    let known = self.evidence.process(*pid).filter(|it| it.rank == self.rank);
                    far.own.extend(known.map(|it| it.pid));
                    &[]
                }
                End::Changes
                | End::Terminal { .. }
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
                        far.open = true;
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

/// Bytes that were sent before this wait, and that the other end's machine has not acknowledged, in
/// words. The process has written nothing meanwhile, so they are not on their way.
fn unacknowledged(process: &Process, thread: &Thread, end: &End) -> Option<String> {
    let End::Connection(number) = end else { return None };
    let one = process.connections.get(*number)?;
    let silent = process.moved_bytes == 0 && is_long(thread.asleep_for_ms);
    // Who has it unread is no network's fault.
    let reverse = |other: &&Connection| other.local == one.remote && other.remote == one.local;
    let unread = process.connections.iter().find(reverse).is_some_and(|it| it.unread_bytes > 0);
    let other = one.peer.as_ref().is_some_and(|peer| peer.pid != process.pid);
    let lost = silent && one.unsent_bytes > 0 && one.remote != "unix" && !unread && !other;
    lost.then(|| {
        let Connection { remote, unsent_bytes, .. } = one;
        format!(
            "has no answer from {remote}, whose machine has not acknowledged {unsent_bytes} bytes"
        )
    })
}
