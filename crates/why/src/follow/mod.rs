//! Follows what a rank waits for: from its main thread to the thread that has it, and to the
//! processes that it has started.
//!
//! *Invariant:* no thread is followed twice, so that a circle of waits ends.

mod ends;
mod libraries;
mod locks;
mod wakers;

use std::collections::{BTreeMap, BTreeSet};

use crate::calls::{self, Native};
use crate::condition::{Condition, Kind, short};
use crate::evidence::{
    Connection, CpuLimit, End, Evidence, Frame, Holder, NAMED_PIPE, Process, Rank, State, Thread,
    Waits, is_remote,
};

/// The percentage of a CPU from which a thread works.
const WORK: u64 = 20;

/// Pages that come back from swap in a second, from which a process waits for them.
const SWAPPING: u64 = 100;

/// What a rank is doing.
pub(crate) fn of(evidence: &Evidence, rank: &Rank) -> Condition {
    let gone = |text: String| Condition {
        kind: Kind::Gone,
        ..Condition::plain(rank.pid.unwrap_or(0), text)
    };
    let Some(root) = rank.pid.and_then(|pid| evidence.process(pid)) else {
        return match (&rank.ended, rank.pid) {
            (Some(how), _) => gone(format!("has ended: {how}")),
            (None, Some(pid)) => Condition::plain(pid, "could not be seen".to_owned()),
            (None, None) => gone("is not running".to_owned()),
        };
    };
    if root.state == State::Zombie {
        return gone("has ended".to_owned());
    }
    let walk = Walk { evidence, children: evidence.children(), rank: &rank.name };
    let mut visited = BTreeSet::new();
    let condition = walk.process(root, &mut visited);
    let condition = walk.with_waker(root.pid, condition, &visited);
    let own = root.threads.first().filter(|_| condition.pid != root.pid).and_then(calls::place);
    match (&condition.place, &condition.own_place) {
        (None, _) => Condition { place: own, ..condition },
        (Some(_), None) => Condition { own_place: own, ..condition },
        _ => condition,
    }
}

/// A wait is followed within a rank.
struct Walk<'a> {
    evidence: &'a Evidence,
    children: BTreeMap<u32, Vec<&'a Process>>,
    rank: &'a str,
}

type Visited = BTreeSet<u32>;

impl<'a> Walk<'a> {
    /// What keeps a process from running at all.
    fn held(&self, process: &Process) -> Option<Condition> {
        let (kind, text) = match (process.state, &process.tracer, &process.group) {
            (State::Traced, Some(by), _) => {
                (Kind::Traced, format!("is held by a debugger ({}, process {})", by.name, by.pid))
            }
            (State::Stopped, ..) => (Kind::Stopped, "is stopped by a signal".to_owned()),
            (_, _, Some(group)) if group.frozen == Some(true) => {
                (Kind::Frozen, format!("is in a frozen control group, {}", group.path))
            }
            _ => return None,
        };
        Some(self.at(process, process.threads.first(), kind, text))
    }

    fn at(
        &self,
        process: &Process,
        thread: Option<&Thread>,
        kind: Kind,
        text: String,
    ) -> Condition {
        let frame = thread.and_then(|thread| calls::program(&thread.frames));
        let root = self.evidence.ranks.iter().any(|rank| rank.pid == Some(process.pid));
        let who = format!("process {} ({})", process.pid, process.name);
        Condition {
            kind,
            text: if root { text } else { format!("waits for its {who}, which {text}") },
            place: thread.and_then(calls::place),
            code: frame.and_then(|frame| frame.code.clone()),
            for_ms: thread.and_then(|thread| thread.asleep_for_ms),
            timed: thread.is_some_and(|thread| calls::limit(thread).is_some()),
            left_ms: thread.and_then(|thread| calls::limit(thread)?),
            ..Condition::plain(process.pid, String::new())
        }
    }

    fn process(&self, process: &'a Process, visited: &mut Visited) -> Condition {
        if let Some(held) = self.held(process) {
            return held;
        }
        match process.threads.first() {
            Some(main) => self.thread(process, main, visited),
            None => Condition::plain(process.pid, "shows no threads".to_owned()),
        }
    }

    fn thread(&self, process: &'a Process, thread: &'a Thread, visited: &mut Visited) -> Condition {
        visited.insert(thread.tid);
        let at = |kind, text| self.at(process, Some(thread), kind, text);
        if let Some((kind, text)) = self.starved(process, thread) {
            let open = kind == Kind::File && !is_hung(thread);
            return Condition { open, ..at(kind, text) };
        }
        if let Some((operation, frame)) = calls::collective(thread) {
            let condition = at(Kind::Collective, format!("is in {operation}"));
            return Condition {
                operation: Some(operation),
                place: frame.map(Frame::place).or(condition.place.clone()),
                code: frame.and_then(|frame| frame.code.clone()),
                on: self.peers(process),
                open: elsewhere(process),
                ..condition
            };
        }
        if let Some(name) = calls::torch_message(thread) {
            let on = self.peers(process);
            let open = elsewhere(process);
            return Condition { on, open, ..at(Kind::Peer, format!("is in {name}")) };
        }
        match calls::native(thread) {
            Some(Native::Collective(operation)) => {
                let condition = at(Kind::Collective, format!("is in {operation}"));
                let (on, open) = (self.peers(process), elsewhere(process));
                return Condition { operation: Some(operation), on, open, ..condition };
            }
            Some(Native::Message(name)) => {
                let on = self.peers(process);
                return Condition { on, ..at(Kind::Peer, format!("is in {name}")) };
            }
            None => {}
        }
        if calls::waits_for_events(thread) {
            return self.event_loop(process, thread, visited);
        }
        let known = self.asks_again(process, thread).or_else(|| self.lost_task(process, thread));
        if let Some(found) = known.or_else(|| self.asked_dask(process, thread)) {
            return found;
        }
        // It may have been seen in the moment in which it asks again.
        let kept = || process.threads.iter().any(|one| one.has_gil && one.same_frames);
        if thread.call.is_none() && self.asks_for_the_interpreter(thread) && kept() {
            return self.lock(process, thread, None, true, visited);
        }
        if self.runs(thread) {
            // MPI's ranks do not sleep while they wait.
            if let Some(name) = calls::message(thread).filter(|_| thread.same_frames) {
                let on = self.peers(process);
                return Condition { on, ..at(Kind::Peer, format!("is in {name}")) };
            }
            return at(Kind::Works, self.working(thread));
        }
        self.waits(process, thread, visited)
    }

    /// What a thread that runs is doing, in words.
    fn working(&self, thread: &Thread) -> String {
        let how = if thread.same_frames { "computes" } else { "works" };
        match self.share(thread) {
            0 => "is ready to run, and has no CPU".to_owned(),
            share => format!("{how}, {share} % of a CPU"),
        }
    }

    fn share(&self, thread: &Thread) -> u64 {
        (thread.cpu_ms * 100 / self.evidence.interval_ms.max(1)).min(100)
    }

    fn runs(&self, thread: &Thread) -> bool {
        thread.state == State::Running || self.share(thread) >= WORK
    }

    /// Has not what it needs to run: processor time, memory, an answer of a disk.
    fn starved(&self, process: &Process, thread: &Thread) -> Option<(Kind, String)> {
        let group = process.group.as_ref();
        let throttled = group.map_or(0, |group| group.throttled_us / 1000);
        let kernel = thread.kernel.as_deref().unwrap_or_default();
        let full = group.and_then(|group| group.memory_pressure).unwrap_or(0.0);
        let slowed = ["mem_cgroup_handle_over_high", "mem_cgroup_oom", "swap"];
        let slowed = slowed.iter().any(|word| kernel.contains(word));
        // Pages that it needs come back from a disk all the time, as many as a slow one can give.
        let faults = process.major_faults * 1000 / self.evidence.interval_ms.max(1);
        let swaps = process.swapped_bytes > 0 && faults >= SWAPPING;
        if slowed || swaps || process.major_faults > 20 && full > 20.0 {
            let limit = group.and_then(|group| group.memory_limit_bytes);
            let limit = limit.map_or(String::new(), |it| format!(" (limit {} MiB)", it >> 20));
            let what = match process.swapped_bytes >> 20 {
                0 => "some".to_owned(),
                swapped => format!("pages of it from swap ({swapped} MiB are there)"),
            };
            return Some((
                Kind::Memory,
                format!("has too little memory{limit}, and waits for {what}"),
            ));
        }
        let limit = group.and_then(|group| group.cpu_limit);
        let held = limit.filter(|limit| self.is_held(thread, *limit));
        if let Some(CpuLimit { quota_us, period_us, .. }) = held {
            let text = format!(
                "has used up its control group's CPU time, {} ms in each {} ms",
                quota_us / 1000,
                period_us / 1000
            );
            return Some((Kind::Throttled, text));
        }
        if throttled * 2 > self.evidence.interval_ms {
            return Some((Kind::Throttled, "has used up its control group's CPU time".to_owned()));
        }
        let waits = thread.state == State::Uninterruptible && thread.waits_begun == 0;
        if !waits && !is_remote(Some(kernel)) {
            return None;
        }
        let (name, file) = file_of(thread);
        // Who changes a file system waits there until it is thawed, `sb_start_write`.
        let frozen = kernel.contains("percpu_rwsem_wait") && !file.is_empty();
        let perhaps = if frozen { ": the file system may be frozen (fsfreeze)" } else { "" };
        Some((Kind::File, format!("is in {name}{file}, which does not return{perhaps}")))
    }

    /// Whether a thread that could run has had no more than its control group may, which has waited
    /// for the end of a period before. The kernel counts such a wait when it is over.
    fn is_held(&self, thread: &Thread, limit: CpuLimit) -> bool {
        let CpuLimit { quota_us, period_us, throttled } = limit;
        let counted = period_us / 1000 <= self.evidence.interval_ms;
        // The kernel looks at the clock at its ticks, of up to 10 ms.
        let used_up = thread.cpu_ms <= (quota_us / 1000).saturating_add(10);
        let runs = thread.state == State::Running;
        runs && throttled > 0 && quota_us < period_us && used_up && !counted
    }

    fn waits(&self, process: &'a Process, thread: &'a Thread, visited: &mut Visited) -> Condition {
        let at = |kind, text| self.at(process, Some(thread), kind, text);
        let Some(call) = &thread.call else {
            if thread.kernel.as_deref().is_some_and(|kernel| kernel.contains("userfault")) {
                return self.page(process, thread, visited);
            }
            return at(Kind::Unknown, "waits, and the kernel does not say for what".to_owned());
        };
        match &call.waits {
            Waits::Lock { shared: false, holder, timed, .. } => {
                self.lock(process, thread, *holder, *timed, visited)
            }
            Waits::Lock { sharers, .. } => {
                self.shared_lock(process, thread, sharers.as_deref(), visited)
            }
            Waits::Descriptor { end, writes } => {
                self.ends(process, thread, std::slice::from_ref(end), *writes, visited)
            }
            Waits::Any { ends, timed } if ends.is_empty() && *timed => {
                at(Kind::Sleeps, format!("sleeps{}", self.forgotten(process)))
            }
            Waits::Any { ends, .. } => {
                let found = self.ends(process, thread, ends, false, visited);
                let loops = call.name == "epoll_wait";
                match found.kind {
                    // An event loop has its connections open whether it waits for one or not.
                    Kind::Peer | Kind::Outside if loops => {
                        self.event_loop(process, thread, visited)
                    }
                    Kind::Idle => self.event_loop(process, thread, visited),
                    _ => found,
                }
            }
            Waits::Time { left_ms } => {
                let left =
                    left_ms.map_or(String::new(), |left| format!(" for another {}", short(left)));
                let text = format!("sleeps{left}{}", self.forgotten(process));
                Condition { left_ms: *left_ms, ..at(Kind::Sleeps, text) }
            }
            Waits::Child { pid } => self.child(process, thread, *pid, visited),
            Waits::FileLock { path, holder } => {
                let has_it = holder.and_then(|pid| self.evidence.process(pid));
                let who = match (has_it, holder) {
                    (Some(process), _) => format!(", which {} has", process.rank),
                    (None, Some(pid)) => format!(", which process {pid} has"),
                    _ => String::new(),
                };
                let text = format!("waits for the lock on {path}{who}");
                let on = has_it.map(|process| process.rank.clone());
                let on: Vec<String> = on.into_iter().filter(|rank| rank != self.rank).collect();
                let kind = if on.is_empty() { Kind::FileLock } else { Kind::Peer };
                // Who is not of the job may give it away, as who does something may.
                let does = |it: &Process| it.threads.iter().any(|one| self.does(one).is_some());
                Condition { on, open: has_it.is_none_or(does), ..at(kind, text) }
            }
            Waits::File { .. } => {
                let (name, file) = file_of(thread);
                let open = !is_hung(thread);
                Condition { open, ..at(Kind::File, format!("is in {name}{file}")) }
            }
            Waits::Unknown => at(Kind::Unknown, format!("waits in {}", call.name)),
        }
    }

    /// A page of memory that its own threads or a child provide, userfaultfd(2).
    fn page(&self, process: &'a Process, thread: &'a Thread, visited: &mut Visited) -> Condition {
        let text = "waits for a page of its memory that another has to provide (userfaultfd)";
        let children = self.children.get(&process.pid).into_iter().flatten();
        let mut alive = children.filter(|child| child.state != State::Zombie);
        match alive.find(|child| visited.insert(child.pid)) {
            Some(child) => {
                let found = self.process(child, visited);
                let found = Condition { text: format!("{text}: it {}", found.text), ..found };
                self.through(process, thread, found)
            }
            None => self.at(process, Some(thread), Kind::Unknown, text.to_owned()),
        }
    }

    fn child(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        pid: Option<u32>,
        visited: &mut Visited,
    ) -> Condition {
        let children = self.children.get(&process.pid).into_iter().flatten();
        let alive = |child: &&&Process| child.state != State::Zombie;
        let wanted = |child: &&&Process| pid.is_none_or(|pid| pid == child.pid);
        match children.filter(alive).find(wanted) {
            Some(child) if visited.insert(child.pid) => {
                let found = self.process(child, visited);
                self.through(process, thread, found)
            }
            _ => {
                let text = "waits for a process that it has started".to_owned();
                self.at(process, Some(thread), Kind::Child, text)
            }
        }
    }

    /// A condition of another process for which this thread waits.
    fn through(&self, process: &Process, thread: &Thread, found: Condition) -> Condition {
        let own = calls::place(thread);
        let root = self.evidence.ranks.iter().any(|rank| rank.pid == Some(process.pid));
        match found.place {
            None => Condition { place: own, ..found },
            Some(_) if root => Condition { own_place: own, ..found },
            Some(_) => found,
        }
    }

    /// A thread that waits for events: others may be in tasks meanwhile, or work.
    fn event_loop(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        visited: &mut Visited,
    ) -> Condition {
        let known = |one: &Thread| self.evidence.task(self.rank, one.tid);
        let tasks =
            process.threads.iter().filter(|one| calls::runs_a_task(one) || known(one).is_some());
        let fresh: Vec<&Thread> = tasks.filter(|one| !visited.contains(&one.tid)).collect();
        let tasks = fresh.into_iter().map(|one| {
            let found = self.thread(process, one, visited);
            // Of native code the engine says which function it is.
            let place = found.place.clone().or_else(|| Some(known(one)?.function.clone()));
            Condition { place, ..found }
        });
        if let Some(task) = tasks.min_by_key(|task| task.kind) {
            let text = format!("has a task that {}", task.text);
            return Condition { text, in_task: true, ..task };
        }
        // Loops wake up for a moment now and then.
        match process.threads.iter().find(|other| self.share(other) >= WORK) {
            Some(other) => {
                let text = format!("works, {} % of a CPU", self.share(other));
                self.at(process, Some(other), Kind::Works, text)
            }
            None => {
                let open = hears_others(process, thread);
                let text = "waits for events".to_owned();
                Condition { open, ..self.at(process, Some(thread), Kind::Idle, text) }
            }
        }
    }

    /// The other ranks to which a process has connections.
    fn peers(&self, process: &Process) -> Vec<String> {
        let peers = process.connections.iter().filter_map(|one| one.peer.as_ref()?.rank.clone());
        let peers: BTreeSet<String> = peers.filter(|rank| rank != self.rank).collect();
        peers.into_iter().collect()
    }
}

/// Whether an event loop waits for somebody who is not of the job, or whom nobody can see.
fn hears_others(process: &Process, thread: &Thread) -> bool {
    let Some(Waits::Any { ends, .. }) = thread.call.as_ref().map(|call| &call.waits) else {
        return false;
    };
    let outside = |holder: &Holder| holder.rank.is_none();
    ends.iter().any(|end| match end {
        End::Connection(number) => process.connections.get(*number).is_some_and(|one| {
            let hidden = one.peer.is_none() && one.remote != "unix";
            !one.closed && (hidden || one.peer.as_ref().is_some_and(outside))
        }),
        End::Pipe { others, .. } => others.iter().any(outside),
        End::Changes | End::Other(_) => true,
        _ => false,
    })
}

/// Whether a process has connections to other machines, where there may be other ranks.
fn elsewhere(process: &Process) -> bool {
    let far = |one: &Connection| one.peer.is_none() && one.remote != "unix" && !one.closed;
    process.connections.iter().any(far)
}

/// Whether a wait for a file has lasted for as long as the kernel calls a task hung
/// (`kernel.hung_task_timeout_secs`), or is for somebody to open a named pipe.
fn is_hung(thread: &Thread) -> bool {
    const HUNG_MS: u64 = 120_000;
    let waits = thread.call.as_ref().map(|call| &call.waits);
    let pipe =
        matches!(waits, Some(Waits::File { filesystem: Some(kind), .. }) if kind == NAMED_PIPE);
    pipe || thread.asleep_for_ms.is_some_and(|millis| millis >= HUNG_MS)
}

/// The system call of a thread, and the file that it is about.
fn file_of(thread: &Thread) -> (&str, String) {
    let kernel = thread.kernel.as_deref().unwrap_or("the kernel");
    let Some(call) = &thread.call else { return (kernel, String::new()) };
    let (path, filesystem) = match &call.waits {
        Waits::File { path, filesystem } => (path.as_ref(), filesystem),
        Waits::Descriptor { end: End::File { path, filesystem }, .. } => (Some(path), filesystem),
        _ => return (&call.name, String::new()),
    };
    let filesystem = match filesystem.as_deref() {
        Some(NAMED_PIPE) => " (a named pipe)".to_owned(),
        Some(kind) => format!(" (on {kind})"),
        None => String::new(),
    };
    (&call.name, path.map_or(String::new(), |path| format!(" of {path}{filesystem}")))
}
