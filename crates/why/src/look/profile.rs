//! What the threads of a process do over some seconds: their stacks, read again and again, merged
//! by their functions.
//!
//! *Invariant:* as in a look, nothing is stopped and nothing is asked for its help.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::native::{Images, Native};
use super::procfs::{Sample, Task};
use super::python::{Python, Stack};
use super::{NATIVE, PROFILED, Sampled};
use crate::evidence::{Frame, Function, State};

/// Parts of a tree that were seen more rarely than once in so many samples of it are left out.
const RARE: u32 = 200;

/// The stacks of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// How often the process was looked at.
    pub samples: u32,
    /// In how many milliseconds.
    pub ms: u64,
    /// The version of its Python, if it has one: then native threads are not seen.
    pub python: Option<String>,
    /// Stacks that could not be read.
    pub unseen: u32,
    /// The threads, by their names.
    pub threads: Vec<Node>,
}

/// A function on a stack, with those that it has called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The function with its place; the thread's name for a thread.
    pub name: String,
    /// Stacks that it was on.
    pub samples: u32,
    /// Those among them whose thread ran, or waited for a CPU.
    pub running: u32,
    /// What it has called, that with the most samples first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Node>,
}

#[derive(Default)]
struct Tree {
    samples: u32,
    running: u32,
    calls: BTreeMap<String, Tree>,
}

impl Tree {
    /// Adds a stack, the outermost function first.
    fn add(&mut self, stack: impl Iterator<Item = String>, running: bool) {
        let mut at = self;
        at.count(running);
        for name in stack {
            at = at.calls.entry(name).or_default();
            at.count(running);
        }
    }

    fn count(&mut self, running: bool) {
        self.samples += 1;
        self.running += u32::from(running);
    }

    /// The functions below, without those of fewer samples.
    fn nodes(self, least: u32) -> Vec<Node> {
        let often = self.calls.into_iter().filter(|(_, tree)| tree.samples >= least);
        let node = |(name, tree): (String, Tree)| {
            let (samples, running) = (tree.samples, tree.running);
            Node { name, samples, running, calls: tree.nodes(least) }
        };
        let mut nodes: Vec<Node> = often.map(node).collect();
        nodes.sort_by_key(|node| std::cmp::Reverse(node.samples));
        nodes
    }
}

/// Reads the stacks of a process so often, with this time between two looks.
///
/// # Errors
/// If nothing can be read of it.
pub fn profile(pid: u32, samples: u32, every: Duration) -> Result<Profile, String> {
    let began = Instant::now();
    let mut python = Python::find(pid)?;
    let images = Images::default();
    let mut native = Native::of(pid, &images);
    let mut tree = Tree::default();
    let mut seen = Profile::default();
    for number in 0..samples {
        if number > 0 {
            std::thread::sleep(every);
        }
        let Some(now) = Sample::take(pid).filter(|now| now.state != State::Zombie) else { break };
        seen.samples += 1;
        match &mut python {
            Some(python) => match python.stacks(pid) {
                Ok(stacks) => add_python(&mut tree, &now.threads, &stacks),
                Err(_) => seen.unseen += 1,
            },
            None => seen.unseen += add_native(&mut tree, &now.threads, pid, &mut native),
        }
    }
    if seen.samples == 0 {
        return Err(format!("process {pid} has ended"));
    }
    seen.ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    seen.python = python.map(|python| python.version());
    seen.threads = tree.calls.into_iter().map(thread).collect();
    seen.threads.sort_by_key(|thread| std::cmp::Reverse((thread.running, thread.samples)));
    Ok(seen)
}

/// A thread's stacks; rare ones are left out.
fn thread((name, tree): (String, Tree)) -> Node {
    let (samples, running) = (tree.samples, tree.running);
    let least = samples.div_ceil(RARE);
    Node { name, samples, running, calls: tree.nodes(least) }
}

fn add_python(tree: &mut Tree, threads: &[Task], stacks: &BTreeMap<u32, Stack>) {
    for (tid, stack) in stacks {
        let task = threads.iter().find(|task| task.tid == *tid);
        let name = task.map_or("thread", |task| &task.name);
        let running = task.is_some_and(|task| task.state == State::Running);
        let place = |frame: &Frame| {
            let file = frame.file.rsplit('/').next().unwrap_or_default();
            format!("{} ({file}:{})", frame.function, frame.line)
        };
        let frames = stack.frames.iter().rev().map(place);
        tree.add(std::iter::once(name.to_owned()).chain(frames), running);
    }
}

/// Adds the stacks of native threads, and returns how many could not be read.
fn add_native(tree: &mut Tree, threads: &[Task], pid: u32, native: &mut Native<'_>) -> u32 {
    let (mut unseen, mut profiled) = (0, 0);
    for task in threads.iter().take(NATIVE) {
        let running = task.state == State::Running;
        let sample = match running {
            // Each is waited for until it has a CPU.
            true if profiled < PROFILED => {
                profiled += 1;
                Sampled::running(task.tid)
            }
            true => None,
            false => Sampled::asleep(pid, task.tid),
        };
        let functions = sample.map_or_else(Vec::new, |sample| native.functions(&sample));
        unseen += u32::from(functions.is_empty());
        let place = |function: &Function| format!("{} ({})", function.name, function.module);
        let frames = functions.iter().rev().map(place);
        tree.add(std::iter::once(task.name.clone()).chain(frames), running);
    }
    unseen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_merged_by_their_beginnings_and_rare_ones_left_out() {
        let mut tree = Tree::default();
        let mut add = |times: u32, stack: &str, running: bool| {
            for _ in 0..times {
                tree.add(stack.split(' ').map(str::to_owned), running);
            }
        };
        add(300, "task0 main load read", false);
        add(100, "task0 main compute", true);
        add(1, "task0 main rare", true);
        add(10, "io poll", false);
        let threads: Vec<Node> = tree.calls.into_iter().map(thread).collect();
        assert_eq!(threads.len(), 2);
        let main = &threads[1].calls[0];
        assert_eq!((main.samples, main.running), (401, 101));
        let names: Vec<&str> = main.calls.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["load", "compute"]);
        assert_eq!(main.calls[0].calls[0].samples, 300);
    }
}
