//! Looks at the processes of a job, twice, and writes down what it sees.
//!
//! Judges nothing. No process is stopped or traced.
//!
//! *Invariant:* the look is over in time, whatever hangs: each process is read by a thread that is
//! left behind if it does not return, as a read of `/proc` may not while a page is being fetched.

mod counters;
mod ends;
pub mod flows;
mod kernel;
mod memory;
mod native;
mod netlink;
mod outside;
mod procfs;
pub mod profile;
mod python;
pub mod ras;
mod shared;
mod sockets;
mod waits;

use std::cell::OnceCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::evidence::{
    ALL, CALLS, Evidence, Function, Process, Rank, State, Thread, Unseen, VERSION, Waits, is_remote,
};
use ends::{Ends, Holders};
use native::{Images, Native, Sample as Sampled};
use procfs::{Sample, Task};
use python::{Files, Python, Stack};
use shared::Shared;
use sockets::Sockets;

/// How long a look may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Between the two looks.
    pub interval: Duration,
    /// For each of the two looks; what has not answered then is unseen.
    pub each: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { interval: Duration::from_millis(400), each: Duration::from_secs(4) }
    }
}

/// The most threads of a process whose native code is looked at.
const NATIVE: usize = 16;

/// The most that run of them: each is waited for until it has a CPU.
const PROFILED: usize = 4;

/// The most processes that are looked at side by side: they are waited for, not computed.
const THREADS: usize = 16;

/// Looks at these ranks and at all that they have started.
pub fn look(ranks: Vec<Rank>, serves: bool, limits: Limits) -> Evidence {
    let members = members(&ranks);
    let pids: Vec<(u32, ())> = members.keys().map(|pid| (*pid, ())).collect();
    let (first, late) = side_by_side(pids, limits.each, |pid, ()| First::look(pid));
    let mut unseen: Vec<Unseen> = late.into_iter().map(does_not_answer).collect();
    std::thread::sleep(limits.interval);
    let again = Instant::now();
    let scene = Arc::new(Scene { engine: serves, ..Scene::look(members) });
    let first = first.into_iter().filter_map(|(pid, first)| Some((pid, first?))).collect();
    let each = move |pid, first: First| first.again(pid, &scene);
    let (second, late) = side_by_side(first, limits.each, each);
    unseen.extend(late.into_iter().map(does_not_answer));
    let mut processes = Vec::new();
    for (process, missing) in second.into_iter().filter_map(|(_, seen)| seen) {
        unseen.extend(missing);
        processes.push(process);
    }
    processes.sort_by_key(|process| process.pid);
    let (kernel, silent) = kernel::look(ranks.iter().filter_map(|rank| rank.pid));
    unseen.extend(silent);
    unseen.sort();
    unseen.dedup();
    let pressure = std::fs::read_to_string("/proc/pressure/memory").ok();
    let interval = limits.interval + again.elapsed();
    let outside = outside::look(&processes);
    Evidence {
        outside,
        version: VERSION,
        at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        interval_ms: u64::try_from(interval.as_millis()).unwrap_or(u64::MAX),
        serves,
        ranks,
        processes,
        tasks: None,
        kernel,
        memory_pressure: pressure.and_then(|text| procfs::pressure(&text, "some")),
        unseen,
    }
}

fn does_not_answer(pid: u32) -> Unseen {
    let why = "the kernel did not answer in time when it was read".to_owned();
    Unseen { what: format!("{ALL}{pid}"), why }
}

/// The processes of the ranks and those that they have started, each with its rank.
fn members(ranks: &[Rank]) -> BTreeMap<u32, String> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (pid, parent) in procfs::parents() {
        children.entry(parent).or_default().push(pid);
    }
    let mut members = BTreeMap::new();
    let roots = ranks.iter().filter_map(|rank| Some((rank.pid?, &rank.name)));
    let mut left: VecDeque<(u32, &String)> = roots.collect();
    let mut roots: Vec<u32> = left.iter().map(|(pid, _)| *pid).collect();
    roots.sort_unstable();
    while let Some((pid, name)) = left.pop_front() {
        members.insert(pid, name.clone());
        let children = children.get(&pid).into_iter().flatten();
        // A rank may be another one's child: Dask's workers are the scheduler's.
        let others = children.filter(|child| roots.binary_search(child).is_err());
        left.extend(others.map(|child| (*child, name)));
    }
    members
}

/// Applies a function to each entry on several threads; what has not returned in time is late.
fn side_by_side<I, O, F>(
    entries: Vec<(u32, I)>,
    within: Duration,
    each: F,
) -> (Vec<(u32, O)>, Vec<u32>)
where
    I: Send + 'static,
    O: Send + 'static,
    F: Fn(u32, I) -> O + Send + Sync + 'static,
{
    let mut missing: Vec<u32> = entries.iter().map(|(pid, _)| *pid).collect();
    let threads = entries.len().min(THREADS);
    let queue = Arc::new(Mutex::new(VecDeque::from(entries)));
    let each = Arc::new(each);
    let (sender, receiver) = channel();
    for _ in 0..threads {
        let (queue, each, sender) = (Arc::clone(&queue), Arc::clone(&each), sender.clone());
        let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        std::thread::spawn(move || {
            while let Some((pid, entry)) = next() {
                if sender.send((pid, each(pid, entry))).is_err() {
                    return;
                }
            }
        });
    }
    drop(sender);
    let end = Instant::now() + within;
    let mut done = Vec::new();
    while let Ok((pid, one)) = receiver.recv_timeout(end.saturating_duration_since(Instant::now()))
    {
        missing.retain(|other| *other != pid);
        done.push((pid, one));
    }
    (done, missing)
}

/// The first look at a process.
struct First {
    sample: Sample,
    python: Result<Option<Python>, String>,
    stacks: BTreeMap<u32, Stack>,
}

/// What all processes of a job have in common.
struct Scene {
    members: BTreeMap<u32, String>,
    holders: Holders,
    sockets: Sockets,
    shared: OnceLock<Shared>,
    clocks: BTreeMap<usize, u64>,
    images: Images,
    /// Whether its processes are those of an engine, whose own code tells nobody anything.
    engine: bool,
}

impl Scene {
    fn look(members: BTreeMap<u32, String>) -> Self {
        Self {
            holders: Holders::look(),
            sockets: Sockets::look(members.keys().copied()),
            shared: OnceLock::new(),
            clocks: procfs::clocks(),
            images: Images::default(),
            engine: false,
            members,
        }
    }
}

impl First {
    fn look(pid: u32) -> Option<Self> {
        let sample = Sample::take(pid)?;
        let mut python = match sample.state {
            // It has no memory any more.
            State::Zombie => Ok(None),
            _ => Python::find(pid),
        };
        let stacks = python.as_mut().ok().and_then(Option::as_mut);
        let stacks = stacks.and_then(|python| python.stacks(pid).ok()).unwrap_or_default();
        Some(Self { sample, python, stacks })
    }

    /// The second look, and what has changed since.
    fn again(self, pid: u32, scene: &Scene) -> Option<(Process, Vec<Unseen>)> {
        let ends = Ends {
            pid,
            holders: &scene.holders,
            sockets: &scene.sockets,
            shared: &scene.shared,
            ranks: &scene.members,
            inodes: OnceCell::new(),
        };
        let now = Sample::take(pid)?;
        let mut unseen = Vec::new();
        let mut miss = |what: &str, why: String| {
            unseen.push(Unseen { what: format!("{what} of process {pid}"), why });
        };
        let mut python = self.python.unwrap_or_else(|why| {
            miss("Python's stacks", why);
            None
        });
        let stacks = python.as_mut().map(|python| python.stacks(pid));
        let stacks = stacks.unwrap_or_else(|| Ok(BTreeMap::new())).unwrap_or_else(|why| {
            miss("Python's stacks", why);
            BTreeMap::new()
        });
        let held = now.threads.iter().any(|task| is_remote(task.kernel.as_deref()));
        let mut files = Files::new(!held);
        let mut native = None;
        let mut threads: Vec<Thread> = Vec::new();
        for task in &now.threads {
            let before = self.sample.threads.iter().find(|before| before.tid == task.tid);
            let mut thread = thread(task, before, &scene.clocks);
            let asleep = thread.asleep_for_ms.unwrap_or(0);
            match waits::call((pid, task.tid), asleep, &ends) {
                _ if now.state == State::Zombie => {}
                Ok(call) => thread.call = call,
                Err(why) => miss(CALLS, why),
            }
            let stack = stacks.get(&task.tid).cloned().unwrap_or_default();
            let earlier = self.stacks.get(&task.tid);
            thread.same_frames = earlier.is_some_and(|earlier| earlier.frames == stack.frames);
            thread.has_gil = stack.has_gil && earlier.is_some_and(|earlier| earlier.has_gil);
            thread.frames = stack.frames;
            python::with_code(pid, &mut thread.frames, &mut files);
            let native_code = thread.frames.is_empty() && python.is_none() && !scene.engine;
            let running = threads.iter().filter(|one| one.state == State::Running).count();
            if native_code && threads.len() < NATIVE && running < PROFILED {
                let native = native.get_or_insert_with(|| Native::of(pid, &scene.images));
                thread.functions = functions(native, &thread, pid);
            }
            threads.push(thread);
        }
        let before = &self.sample;
        let locked = if threads.iter().any(tries_again) { ends.locked() } else { Vec::new() };
        let process = Process {
            pid,
            parent: procfs::parent(pid)?,
            rank: scene.members.get(&pid)?.clone(),
            name: now.name.clone(),
            state: now.state,
            tracer: now.tracer.clone(),
            python: python.map(|python| python.version()),
            threads,
            resident_bytes: now.resident_bytes,
            swapped_bytes: now.swapped_bytes,
            major_faults: now.major_faults.saturating_sub(before.major_faults),
            moved_bytes: now.moved_bytes.saturating_sub(before.moved_bytes),
            group: now.group.clone().map(|mut group| {
                let before = before.group.as_ref().map_or(0, |group| group.throttled_us);
                group.throttled_us = group.throttled_us.saturating_sub(before);
                group
            }),
            connections: ends.connections(),
            locked,
            devices: ends::devices(pid),
        };
        Some((process, unseen))
    }
}

/// Whether a thread sleeps again and again for a short time.
fn tries_again(thread: &Thread) -> bool {
    let sleeps = thread.call.as_ref().is_none_or(|call| matches!(call.waits, Waits::Time { .. }));
    thread.state == State::Sleeping && thread.waits_begun > 1 && sleeps
}

/// The functions that a thread is in, if it can be seen.
fn functions(native: &mut Native<'_>, thread: &Thread, pid: u32) -> Vec<Function> {
    let sample = match (thread.state, &thread.call) {
        (State::Running, None) => Sampled::running(thread.tid),
        _ => Sampled::asleep(pid, thread.tid),
    };
    sample.map_or_else(Vec::new, |sample| native.functions(&sample))
}

fn thread(task: &Task, before: Option<&Task>, clocks: &BTreeMap<usize, u64>) -> Thread {
    let sleeps = !matches!(task.state, State::Running);
    let now = task.cpu.and_then(|cpu| clocks.get(&cpu));
    let asleep = now.zip(task.ran_at_ms).map(|(now, ran)| now.saturating_sub(ran));
    Thread {
        tid: task.tid,
        name: task.name.clone(),
        state: task.state,
        cpu_ms: task.cpu_ms.saturating_sub(before.map_or(0, |before| before.cpu_ms)),
        asleep_for_ms: asleep.filter(|_| sleeps),
        waits_begun: task.waits_begun.saturating_sub(before.map_or(0, |it| it.waits_begun)),
        kernel: task.kernel.clone(),
        ..Thread::default()
    }
}
