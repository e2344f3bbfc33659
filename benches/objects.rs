//! Objects from one worker to another: made by the first, looked at by the second, read by it.
//!
//! `scripts/bench-objects.sh` runs it beside Ray. Prints a line of JSON for each size and turn:
//! bytes, and the milliseconds of each step.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use cuda_cluster::cluster::{self, Client, Cluster, Context, Input, Outputs, Registry, Remote};
use cuda_cluster::topology;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The functions of the workers: this binary is also the worker.
fn functions() -> Registry {
    let mut registry = Registry::new();
    registry.add("make", |context: &Context, _: &[Input]| {
        let (bytes, seed): (usize, u64) = context.arguments()?;
        context.fill(bytes, |bytes| {
            for (word, at) in bytes.as_chunks_mut().0.iter_mut().zip(seed..) {
                *word = at.to_le_bytes();
            }
        })
    });
    registry.add("look", |_: &Context, inputs: &[Input]| {
        let [object] = inputs else { return Err("look needs one input".into()) };
        Outputs::value(&object.bytes()?.len())
    });
    registry.add("read", |_: &Context, inputs: &[Input]| {
        let [object] = inputs else { return Err("read needs one input".into()) };
        let bytes = object.bytes()?;
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        Outputs::value(&words.fold(0, u64::wrapping_add))
    });
    registry
}

fn expected(bytes: usize, seed: u64) -> u64 {
    (seed..).take(bytes / 8).fold(0, u64::wrapping_add)
}

/// Milliseconds until the task is done.
fn timed(submit: impl FnOnce() -> Result<Remote, cluster::ClientError>) -> Fallible<(f64, Remote)> {
    let start = Instant::now();
    let remote = submit()?;
    remote.wait()?;
    Ok((1e3 * start.elapsed().as_secs_f64(), remote))
}

fn turn(client: &Client, bytes: usize, seed: u64) -> Fallible<()> {
    let (make, object) =
        timed(|| client.task("make").arguments(&(bytes, seed)).on("cpu0").submit())?;
    let (look, length) = timed(|| client.task("look").inputs(&[&object]).on("cpu1").submit())?;
    let (read, sum) = timed(|| client.task("read").inputs(&[&object]).on("cpu1").submit())?;
    let (length, sum): (usize, u64) = (length.value()?, sum.value()?);
    if (length, sum) != (bytes, expected(bytes, seed)) {
        return Err(format!("{length} bytes with the sum {sum}, instead of what was made").into());
    }
    println!(r#"{{"bytes": {bytes}, "make": {make}, "look": {look}, "read": {read}}}"#);
    Ok(())
}

fn main() -> Fallible<ExitCode> {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch_with(functions) {
        return Ok(code);
    }
    let turns = std::env::var("TURNS").map_or(Ok(5), |text| text.parse())?;
    let machine = topology::parse(topology::builtin("dgx-h100").ok_or("a built-in machine")?)?;
    // The objects of workers without a GPU are in host memory.
    let builder = Cluster::builder().simulate(machine).set("gpus", "none").set("cpu_workers", 2);
    let cluster = builder.launch_blocking()?;
    let client = cluster.client()?;
    for bytes in [64 << 20, 1 << 30] {
        for seed in 0..turns {
            turn(&client, bytes, seed)?;
        }
    }
    cluster.stop();
    Ok(ExitCode::SUCCESS)
}
