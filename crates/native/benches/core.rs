//! The cost of the task scheduler's decisions: nanoseconds and bytes a task, without sockets.
//!
//! Workers are simulated: they answer each order at once. Each line is measured in a process of its
//! own, so that its memory is what this process has grown by. The last column is the time a task
//! at ten times the size; it is near 1 where the cost is flat. Asserts nothing.
//!
//!     cargo bench -p cuda-cluster-native --bench core [-- SCENARIO ...]
//!
//! `BENCH_SIZE` (default 100000) and `BENCH_WORKERS` (default "8 72 1000") change what is measured.
//!
//! *Invariant:* only [`scheduler::Core`] is timed together with the queue of simulated answers.
#![allow(clippy::print_stdout, missing_docs, unreachable_pub)]

// Private to the crate. Cargo compiles benches with `cfg(test)`, so its tests come along, unused.
#[path = "../src/random.rs"]
mod random;
#[allow(dead_code, unused_imports)]
#[path = "../src/tasks/core/mod.rs"]
mod scheduler;

use std::collections::VecDeque;
use std::error::Error;
use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use cuda_cluster_wire::tasks::{ObjectId, Product, Ran, TaskSpec, Wishes};
use scheduler::{Action, Core, Event, Settings};

type Fallible<T> = Result<T, Box<dyn Error>>;

const CLIENT: u64 = 1;

/// Most inputs of the tasks of a fan-in.
const ARITY: u64 = 4096;

/// Tasks that are explained.
const EXPLAINED: u64 = 1000;

const SCENARIOS: [&str; 7] =
    ["flat", "chain", "fan-in", "fan-in, stored", "objects", "cancel", "explain"];

/// The core, and workers that answer at once.
struct World {
    core: Core,
    now: u64,
    answers: VecDeque<Event>,
    /// Outputs live on the workers, not in the scheduler.
    stored: bool,
}

impl World {
    fn new(workers: u64, stored: bool) -> Self {
        let core = Core::new(Settings::default());
        let mut world = Self { core, now: 0, answers: VecDeque::new(), stored };
        for worker in 0..workers {
            let name = format!("gpu{worker}");
            let resources = Default::default();
            world.handle(Event::WorkerJoined { worker, name, threads: 1, resources });
        }
        world
    }

    fn handle(&mut self, event: Event) {
        self.now += 1;
        for action in self.core.handle(event, self.now) {
            match action {
                Action::Run { worker, task, .. } => {
                    let product =
                        if self.stored { Product::Stored(5000) } else { Product::Inline(vec![0]) };
                    let products = vec![product];
                    self.answers.push_back(Event::Done {
                        worker,
                        task,
                        products,
                        ran: lasting(100),
                    });
                }
                Action::PutAt { object, worker, .. } => {
                    self.answers.push_back(Event::Stored { worker, object, bytes: 5000 });
                }
                other => drop(black_box(other)),
            }
        }
    }

    fn submit(&mut self, number: u64, inputs: Vec<ObjectId>) {
        let task = TaskSpec {
            id: id(number),
            outputs: 1,
            function: "f".to_owned(),
            arguments: vec![0; 8],
            inputs,
            wishes: Wishes::default(),
        };
        self.handle(Event::Submit { client: CLIENT, task });
    }

    fn settle(&mut self) {
        while let Some(answer) = self.answers.pop_front() {
            self.handle(answer);
        }
    }

    fn release(&mut self, number: u64) {
        self.handle(Event::Release { client: CLIENT, object: id(number) });
    }
}

fn lasting(micros: u64) -> Ran {
    Ran { micros, ..Ran::default() }
}

fn id(number: u64) -> ObjectId {
    ObjectId::new(1, number)
}

/// Resident bytes of this process.
fn resident() -> Fallible<u64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// Does something to `count` tasks, and prints nanoseconds and bytes a task.
fn measure(phase: &str, count: u64, act: impl FnOnce()) -> Fallible<()> {
    let (before, began) = (resident()?, Instant::now());
    act();
    let nanos = began.elapsed().as_nanos() as f64 / count as f64;
    let bytes = resident()?.saturating_sub(before) / count;
    println!("{phase}\t{nanos}\t{bytes}");
    Ok(())
}

/// Measures one scenario in this process.
fn one(scenario: &str, count: u64, workers: u64) -> Fallible<()> {
    let mut world = World::new(workers, matches!(scenario, "fan-in, stored" | "objects"));
    let world = &mut world;
    match scenario {
        "flat" => {
            measure("submit", count, || (0..count).for_each(|n| world.submit(n, vec![])))?;
            measure("run", count, || world.settle())?;
            measure("release", count, || (0..count).for_each(|n| world.release(n)))
        }
        "chain" => {
            let before = |n: u64| n.checked_sub(1).map(id).into_iter().collect();
            measure("submit", count, || (0..count).for_each(|n| world.submit(n, before(n))))?;
            measure("run", count, || world.settle())?;
            measure("release", count, || (0..count).for_each(|n| world.release(n)))
        }
        "fan-in" | "fan-in, stored" => {
            (0..count).for_each(|n| world.submit(n, vec![]));
            let sums = count.div_ceil(ARITY);
            measure("submit", count, || {
                for sum in 0..sums {
                    let inputs = (sum * ARITY..count.min((sum + 1) * ARITY)).map(id).collect();
                    world.submit(count + sum, inputs);
                }
                world.submit(count + sums, (count..count + sums).map(id).collect());
            })?;
            measure("run", count, || world.settle())?;
            measure("release", count, || (0..=count + sums).for_each(|n| world.release(n)))
        }
        "objects" => {
            let product = Product::Stored(5000);
            let put = |n| Event::Put {
                client: CLIENT,
                object: id(n),
                product: product.clone(),
                on: None,
            };
            measure("put", count, || {
                for n in 0..count {
                    world.handle(put(n));
                    world.settle();
                }
            })?;
            measure("release", count, || (0..count).for_each(|n| world.release(n)))
        }
        "cancel" => {
            (0..count).for_each(|n| world.submit(n, vec![]));
            measure("cancel", count, || {
                (0..count).for_each(|n| world.handle(Event::Cancel { client: CLIENT, task: id(n) }))
            })
        }
        "explain" => {
            (0..count).for_each(|n| world.submit(n, vec![]));
            let step = (count / EXPLAINED).max(1);
            measure("explain", EXPLAINED, || {
                for n in 0..EXPLAINED {
                    black_box(world.core.explain(id((n * step) % count)));
                }
            })
        }
        other => Err(format!("no scenario {other:?}; there are {SCENARIOS:?}").into()),
    }
}

/// Measures one scenario in a process of its own: phases, nanoseconds and bytes a task.
fn apart(scenario: &str, count: u64, workers: u64) -> Fallible<Vec<(String, f64, u64)>> {
    let [count, workers] = [count, workers].map(|number| number.to_string());
    let mut program = Command::new(std::env::current_exe()?);
    let output = program.args(["--one", scenario, &count, &workers]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let text = String::from_utf8(output.stdout)?;
    let lines = text.lines().map(|line| {
        let mut fields = line.split('\t');
        let mut next = || fields.next().ok_or("a field is missing");
        Ok((next()?.to_owned(), next()?.parse()?, next()?.parse()?))
    });
    lines.collect()
}

/// The numbers in a variable.
fn numbers(name: &str, default: &str) -> Fallible<Vec<u64>> {
    let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let all = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
    all.map_err(|error| format!("{name}={text:?}: {error}").into())
}

fn main() -> Fallible<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    // What cargo adds.
    arguments.retain(|argument| argument != "--bench");
    if let [flag, scenario, count, workers] = &arguments[..]
        && flag == "--one"
    {
        return one(scenario, count.parse()?, workers.parse()?);
    }
    let sizes = numbers("BENCH_SIZE", "100000")?;
    let [size] = sizes[..] else { return Err("BENCH_SIZE is one number".into()) };
    let workers = numbers("BENCH_WORKERS", "8 72 1000")?;
    if arguments.is_empty() {
        arguments = SCENARIOS.map(str::to_owned).into();
    }
    if let Some(other) = arguments.iter().find(|one| !SCENARIOS.contains(&one.as_str())) {
        return Err(format!("no scenario {other:?}; there are {SCENARIOS:?}").into());
    }
    println!(
        "{:15} {:8} {:>7} {:>9} {:>9} {:>8} {:>9} {:>8} {:>6}",
        "scenario", "phase", "workers", "tasks", "ns/task", "bytes", "10x: ns", "bytes", "ratio"
    );
    for scenario in &arguments {
        for &workers in &workers {
            let small = apart(scenario, size, workers)?;
            let large = apart(scenario, 10 * size, workers)?;
            for ((phase, ns, bytes), (_, more_ns, more_bytes)) in small.into_iter().zip(large) {
                let ratio = more_ns / ns;
                println!(
                    "{scenario:15} {phase:8} {workers:7} {size:9} {ns:9.0} {bytes:8} \
                     {more_ns:9.0} {more_bytes:8} {ratio:6.2}"
                );
            }
        }
    }
    Ok(())
}
