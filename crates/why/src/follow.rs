//! Follows what a rank waits for: from its main thread to the thread that has it, and to the
//! processes that it has started.
//!
//! *Invariant:* no thread is followed twice, so that a circle of waits ends.

use std::collections::{BTreeMap, BTreeSet};

use crate::calls::{self, Native};
use crate::condition::{Condition, Kind, short};
use crate::evidence::{
    Connection, End, Evidence, Frame, Holder, Process, Rank, State, Thread, Waits, is_a_device,
};

/// The percentage of a CPU from which a thread works.
const WORK: u64 = 20;

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
    walk.process(root, &mut BTreeSet::new())
}

/// A wait is followed within a rank.
struct Walk<'a> {
    evidence: &'a Evidence,
    children: BTreeMap<u32, Vec<&'a Process>>,
    rank: &'a str,
}

type Visited = BTreeSet<u32>;

/// Who has the other ends of descriptors: other ranks, processes of the rank itself, and what is
/// not of the job.
#[derive(Default)]
struct Far {
    on: BTreeSet<String>,
    own: Vec<u32>,
    outside: BTreeSet<String>,
}

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
            return at(kind, text);
        }
        if let Some((operation, frame)) = calls::collective(thread) {
            let condition = at(Kind::Collective, format!("is in {operation}"));
            return Condition {
                operation: Some(operation),
                place: frame.map(Frame::place).or(condition.place.clone()),
                code: frame.and_then(|frame| frame.code.clone()),
                on: self.peers(process),
                ..condition
            };
        }
        match calls::native(thread) {
            Some(Native::Collective(operation)) => {
                let condition = at(Kind::Collective, format!("is in {operation}"));
                let on = self.peers(process);
                return Condition { operation: Some(operation), on, ..condition };
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
        // It may have been seen in the moment in which it asks again.
        let kept = || process.threads.iter().any(|one| one.has_gil && one.same_frames);
        if thread.call.is_none() && self.asks_for_the_interpreter(thread) && kept() {
            return self.lock(process, thread, None, true, visited);
        }
        if self.runs(thread) {
            let how = if thread.same_frames { "computes" } else { "works" };
            return at(Kind::Works, format!("{how}, {} % of a CPU", self.share(thread)));
        }
        self.waits(process, thread, visited)
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
        let slowed = kernel.contains("mem_cgroup_handle_over_high") || kernel.contains("swap");
        if slowed || process.major_faults > 20 && full > 20.0 {
            let limit = group.and_then(|group| group.memory_limit_bytes);
            let limit = limit.map_or(String::new(), |it| format!(" (limit {} MiB)", it >> 20));
            return Some((Kind::Memory, format!("has too little memory{limit} and swaps")));
        }
        if throttled * 2 > self.evidence.interval_ms {
            return Some((Kind::Throttled, "has used up its control group's CPU time".to_owned()));
        }
        let remote = ["request_wait_answer", "fuse_", "nfs", "rpc_wait", "cifs", "ceph", "lustre"];
        let waits = thread.state == State::Uninterruptible && thread.waits_begun == 0;
        if !waits && !remote.iter().any(|word| kernel.contains(word)) {
            return None;
        }
        let (name, file) = file_of(thread);
        Some((Kind::File, format!("is in {name}{file}, which does not return")))
    }

    fn waits(&self, process: &'a Process, thread: &'a Thread, visited: &mut Visited) -> Condition {
        let at = |kind, text| self.at(process, Some(thread), kind, text);
        let Some(call) = &thread.call else {
            return at(Kind::Unknown, "waits, and the kernel does not say for what".to_owned());
        };
        match &call.waits {
            Waits::Lock { shared: false, holder, timed, .. } => {
                self.lock(process, thread, *holder, *timed, visited)
            }
            Waits::Lock { .. } => self.shared_lock(process, thread, visited),
            Waits::Descriptor { end, writes } => {
                self.ends(process, thread, std::slice::from_ref(end), *writes, visited)
            }
            Waits::Any { ends, timed } if ends.is_empty() && *timed => {
                at(Kind::Sleeps, "sleeps".to_owned())
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
                Condition { left_ms: *left_ms, ..at(Kind::Sleeps, format!("sleeps{left}")) }
            }
            Waits::Child { pid } => self.child(process, thread, *pid, visited),
            Waits::FileLock { path, holder } => {
                let process = holder.and_then(|pid| self.evidence.process(pid));
                let who = match (process, holder) {
                    (Some(process), _) => format!(", which {} has", process.rank),
                    (None, Some(pid)) => format!(", which process {pid} has"),
                    _ => String::new(),
                };
                let text = format!("waits for the lock on {path}{who}");
                let on = process.map(|process| process.rank.clone());
                let on: Vec<String> = on.into_iter().filter(|rank| rank != self.rank).collect();
                let kind = if on.is_empty() { Kind::FileLock } else { Kind::Peer };
                Condition { on, ..at(kind, text) }
            }
            Waits::File { .. } => {
                let (name, file) = file_of(thread);
                at(Kind::File, format!("is in {name}{file}"))
            }
            Waits::Unknown => at(Kind::Unknown, format!("waits in {}", call.name)),
        }
    }

    /// A lock of this process: who could release it?
    fn lock(
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
            let text =
                format!("waits for its thread {}, which keeps the interpreter{place}", owner.name);
            return self.at(process, Some(owner), Kind::Interpreter, text);
        }
        let fresh = |one: &&Thread| !visited.contains(&one.tid);
        let held = holder.and_then(|tid| threads().find(|one| one.tid == tid)).filter(fresh);
        let python = |one: &&Thread| !one.frames.is_empty() && fresh(one);
        let free = |one: &&Thread| python(one) && !waits_for_a_lock(one);
        if let Some(next) = held.or_else(|| threads().find(free)) {
            let then = self.thread(process, next, visited);
            let text =
                format!("waits for its thread {} ({}), which {}", next.name, next.tid, then.text);
            return Condition { text, ..then };
        }
        if let Some(busy) = threads().find(|one| fresh(one) && self.runs(one)) {
            let (name, tid, share) = (&busy.name, busy.tid, self.share(busy));
            let text =
                format!("waits for its thread {name} ({tid}), which uses {share} % of a CPU");
            return self.at(process, Some(thread), Kind::Works, text);
        }
        let (kind, text) = no_holder(process, timed);
        self.at(process, Some(thread), kind, text)
    }

    /// Whether a thread waits for Python's interpreter: it asks for it every five milliseconds
    /// (`sys.getswitchinterval`), for as long as another one has it.
    fn asks_for_the_interpreter(&self, thread: &Thread) -> bool {
        let waits = thread.call.as_ref().map(|call| &call.waits);
        matches!(waits, None | Some(Waits::Lock { timed: true, .. }))
            && !thread.frames.is_empty()
            && self.share(thread) < WORK
            && thread.waits_begun > 1
    }

    /// A lock that processes share: a child that does not wait for it may have it.
    fn shared_lock(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        visited: &mut Visited,
    ) -> Condition {
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
            Some(child) if visited.insert(child.pid) => self.process(child, visited),
            _ => {
                let text = "waits for a process that it has started".to_owned();
                self.at(process, Some(thread), Kind::Child, text)
            }
        }
    }

    /// Descriptors: who is at their other ends?
    fn ends(
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
        let Far { on, own, outside } = self.far(process, ends, writes);
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
        match outside.first() {
            Some(who) if writes => at(Kind::Unread, format!("{doing} {who}")),
            Some(who) => at(Kind::Outside, format!("{doing} {who}")),
            None => at(Kind::Idle, "waits for events".to_owned()),
        }
    }

    /// Who has the other ends.
    fn far(&self, process: &Process, ends: &[End], writes: bool) -> Far {
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
                End::Terminal { .. } | End::Listener { .. } | End::Event | End::Other(_) => &[],
            };
            for other in others {
                match &other.rank {
                    Some(rank) if rank == self.rank => far.own.push(other.pid),
                    Some(rank) => drop(far.on.insert(rank.clone())),
                    None => drop(far.outside.insert(format!("process {}", other.pid))),
                }
            }
        }
        far
    }

    /// A thread that waits for events: others may be in tasks meanwhile, or work.
    fn event_loop(
        &self,
        process: &'a Process,
        thread: &'a Thread,
        visited: &mut Visited,
    ) -> Condition {
        let tasks = process.threads.iter().filter(|one| calls::runs_a_task(one));
        let fresh: Vec<&Thread> = tasks.filter(|one| !visited.contains(&one.tid)).collect();
        let tasks = fresh.into_iter().map(|one| self.thread(process, one, visited));
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
            None => self.at(process, Some(thread), Kind::Idle, "waits for events".to_owned()),
        }
    }

    /// The other ranks to which a process has connections.
    fn peers(&self, process: &Process) -> Vec<String> {
        let peers = process.connections.iter().filter_map(|one| one.peer.as_ref()?.rank.clone());
        let peers: BTreeSet<String> = peers.filter(|rank| rank != self.rank).collect();
        peers.into_iter().collect()
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

/// A wait for a lock of which nothing says who has it: what it is, in words.
fn no_holder(process: &Process, timed: bool) -> (Kind, String) {
    let locked = process.threads.iter().filter(|one| waits_for_a_lock(one)).count();
    let for_ever = !timed && process.threads.iter().all(waits_for_ever);
    let what =
        if process.threads.iter().any(calls::imports) { "an import's lock" } else { "a lock" };
    match (for_ever, process.threads.len(), process.devices.first()) {
        (true, 1, _) => (
            Kind::Deadlock,
            format!("waits for {what}, and has no other thread that could release it"),
        ),
        (true, all, _) => (
            Kind::Deadlock,
            format!("waits for {what}, as all of its {all} threads do: none can release one"),
        ),
        // Its driver wakes it.
        (false, _, Some(device)) => {
            (Kind::Unknown, format!("waits for {what}, perhaps for what it does on {device}"))
        }
        (false, all, None) => {
            (Kind::Lock, format!("waits for {what}; {locked} of its {all} threads do"))
        }
    }
}

fn waits_for_a_lock(thread: &Thread) -> bool {
    matches!(thread.call.as_ref().map(|call| &call.waits), Some(Waits::Lock { shared: false, .. }))
}

/// Nothing but another thread of its process ends this wait.
fn waits_for_ever(thread: &Thread) -> bool {
    matches!(
        thread.call.as_ref().map(|call| &call.waits),
        Some(Waits::Lock { shared: false, timed: false, .. })
    ) && thread.waits_begun == 0
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
    let filesystem = filesystem.as_ref().map_or(String::new(), |kind| format!(" (on {kind})"));
    (&call.name, path.map_or(String::new(), |path| format!(" of {path}{filesystem}")))
}
