//! Waits for locks of a process's own: who could release them.
//!
//! *Invariant:* a deadlock is one only if no thread of the process can wake another.

use super::{Visited, WORK, Walk};
use crate::calls;
use crate::condition::{Condition, Kind, is_long};
use crate::evidence::{Frame, Holder, Process, Thread, Waits};

impl<'a> Walk<'a> {
    /// A lock of this process: who could release it?
    pub(super) fn lock(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        holder: Option<u32>,
        timed: bool,
        visited: &mut Visited,
    ) -> Condition {
        let threads = || process.threads.iter().filter(|one| one.tid != thread.tid);
        let owner = threads().find(|one| one.has_gil && one.same_frames);
        if let Some(owner) = owner.filter(|_| self.asks_for_the_interpreter(thread)) {
            let place = calls::program(&owner.frames).map(Frame::place);
            let place = place.map_or(String::new(), |place| format!(" at {place}"));
            let text = format!(
                "waits for its {}, which keeps the interpreter{place}",
                named(process, owner)
            );
            return self.at(process, Some(owner), Kind::Interpreter, text);
        }
        let fresh = |one: &&Thread| !visited.contains(&one.tid);
        let held = holder.and_then(|tid| threads().find(|one| one.tid == tid)).filter(fresh);
        let python = |one: &&Thread| !one.frames.is_empty() && fresh(one);
        // A timer, for example, wakes the one that waits for it.
        let later = |one: &&Thread| calls::limit(one).is_some() && is_long(one.asleep_for_ms);
        let free = |one: &&Thread| python(one) && (!waits_for_a_lock(one) || later(one));
        if let Some(next) = held.or_else(|| threads().find(free)) {
            let then = self.thread(process, next, visited);
            let text = format!("waits for its {}, which {}", named(process, next), then.text);
            return Condition { text, ..then };
        }
        // Those with which a worker of an engine watches itself wake up for a moment now and then.
        let busy = |one: &&Thread| {
            let works = self.share(one) >= WORK;
            fresh(one) && (works || self.runs(one) && !self.evidence.serves)
        };
        if let Some(busy) = threads().find(busy) {
            let (name, share) = (named(process, busy), self.share(busy));
            let text = format!("waits for its {name}, which uses {share} % of a CPU");
            return self.at(process, Some(thread), Kind::Works, text);
        }
        let (kind, text) = no_holder(process, thread, timed);
        self.at(process, Some(thread), kind, text)
    }

    /// Whether a thread waits for Python's interpreter: it asks for it every five milliseconds
    /// (`sys.getswitchinterval`), for as long as another one has it.
    pub(super) fn asks_for_the_interpreter(&self, thread: &Thread) -> bool {
        let waits = thread.call.as_ref().map(|call| &call.waits);
        matches!(waits, None | Some(Waits::Lock { timed: true, .. }))
            && !thread.frames.is_empty()
            && self.share(thread) < WORK
            && thread.waits_begun > 1
    }

    /// A lock that processes share: a child that does not wait for it may have it.
    pub(super) fn shared_lock(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        sharers: Option<&[Holder]>,
        visited: &mut Visited,
    ) -> Condition {
        let ever =
            |process: &Process| process.threads.iter().all(|one| lock_for_ever(one).is_some());
        let own = |holder: &Holder| holder.rank.as_deref() == Some(self.rank);
        let all = |holders: &[Holder]| {
            let process = |holder: &Holder| self.evidence.process(holder.pid);
            holders.iter().all(|one| own(one) && process(one).is_some_and(ever))
        };
        if ever(process) && sharers.is_some_and(all) {
            let text = "waits for a lock of several processes, and none of those that share it can \
                        release it: who had it may have ended";
            return self.at(process, Some(thread), Kind::Deadlock, text.to_owned());
        }
        let children = self.children.get(&process.pid).into_iter().flatten();
        for child in children {
            let waits = child.threads.iter().all(waits_for_a_lock);
            if !waits && visited.insert(child.pid) {
                return self.process(child, visited);
            }
        }
        let text = "waits for a lock that it shares with other processes".to_owned();
        self.at(process, Some(thread), Kind::Unknown, text)
    }
}

/// A wait for a lock of which nothing says who has it: what it is, in words.
fn no_holder(process: &Process, thread: &Thread, timed: bool) -> (Kind, String) {
    let locked = process.threads.iter().filter(|one| waits_for_a_lock(one)).count();
    let for_ever = !timed && process.threads.iter().all(waits_for_ever);
    let what = calls::wanted(thread);
    match (for_ever, process.threads.len(), process.devices.first()) {
        (true, 1, _) => (
            Kind::Deadlock,
            format!("waits for {what}, and has no other thread that could release it"),
        ),
        (true, all, _) => {
            let others = process.threads.iter().map(calls::wanted).find(|other| *other != what);
            let how = match others {
                None => format!("as all of its {all} threads do: none can release one"),
                Some(other) => format!(
                    "another of its {all} threads for {other}: each waits, and none can wake one"
                ),
            };
            (Kind::Deadlock, format!("waits for {what}, {how}"))
        }
        // Its driver wakes it.
        (false, _, Some(device)) => {
            (Kind::Unknown, format!("waits for {what}, perhaps for what it does on {device}"))
        }
        (false, 1, None) => (Kind::Lock, format!("waits for {what}")),
        (false, all, None) => {
            (Kind::Lock, format!("waits for {what}; {locked} of its {all} threads do"))
        }
    }
}

/// A thread in words; its name only where it has one of its own.
fn named(process: &Process, thread: &Thread) -> String {
    match thread.name == process.name {
        true => format!("thread {}", thread.tid),
        false => format!("thread {} ({})", thread.tid, thread.name),
    }
}

fn waits_for_a_lock(thread: &Thread) -> bool {
    matches!(thread.call.as_ref().map(|call| &call.waits), Some(Waits::Lock { shared: false, .. }))
}

/// Nothing but another thread of its process ends this wait.
fn waits_for_ever(thread: &Thread) -> bool {
    lock_for_ever(thread) == Some(false)
}

/// Whether the lock for which a thread waits without a limit is one of several processes.
fn lock_for_ever(thread: &Thread) -> Option<bool> {
    match thread.call.as_ref()?.waits {
        Waits::Lock { shared, timed: false, .. } if thread.waits_begun == 0 => Some(shared),
        _ => None,
    }
}
