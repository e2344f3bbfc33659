//! A plain data job: pieces of `f32` go to two workers, a map, a reduction in a tree, and everything
//! comes back to the client, in turns with rayon on two threads of this process.
//!
//! rayon maps twice: into new vectors, which is what a program would write, and into vectors that
//! exist, which is faster, because no memory is new. The faster one counts.
//!
//! `scripts/bench-job.sh` runs it on two CPUs. Prints each turn, then medians and their ratios; ends
//! with 1 if one misses its bound.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cuda_cluster::cluster::{self, Client, Cluster, Context, Input, Registry, Remote};
use cuda_cluster::topology;
use rayon::prelude::*;

/// Workers of the cluster, and threads of rayon.
const WORKERS: u32 = 2;

/// Least speed of the map, relative to rayon.
const MAP_BOUND: f64 = 0.8;

/// Least bytes per second of the gather.
const GATHER_BOUND: f64 = 2e9;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn made(piece: usize, at: usize) -> f32 {
    ((piece + at) % 1000) as f32
}

fn mapped(x: f32) -> f32 {
    2.0 * x + 1.0
}

/// The functions of the workers: this binary is also the worker.
fn functions() -> Registry {
    let mut registry = Registry::new();
    registry.add("make", |context: &Context, _: &[Input]| {
        let (piece, count): (usize, usize) = context.arguments()?;
        context.fill(4 * count, |bytes| {
            for (at, x) in bytes.as_chunks_mut().0.iter_mut().enumerate() {
                *x = made(piece, at).to_le_bytes();
            }
        })
    });
    registry.add("map", |context: &Context, inputs: &[Input]| {
        let [x] = inputs else { return Err("map needs one input".into()) };
        let x = x.bytes()?;
        context.fill(x.len(), |bytes| {
            for (y, x) in bytes.as_chunks_mut().0.iter_mut().zip(x.as_chunks().0) {
                *y = mapped(f32::from_le_bytes(*x)).to_le_bytes();
            }
        })
    });
    registry.add("add", |context: &Context, inputs: &[Input]| {
        let [a, b] = inputs else { return Err("add needs two inputs".into()) };
        let (a, b) = (a.bytes()?, b.bytes()?);
        context.fill(a.len(), |bytes| {
            let pairs = a.as_chunks().0.iter().zip(b.as_chunks().0);
            for (y, (a, b)) in bytes.as_chunks_mut().0.iter_mut().zip(pairs) {
                *y = (f32::from_le_bytes(*a) + f32::from_le_bytes(*b)).to_le_bytes();
            }
        })
    });
    registry
}

/// The times of one turn.
#[derive(Clone, Copy, Default)]
struct Turn {
    put: Duration,
    map: Duration,
    map_in_place: Duration,
    reduce: Duration,
    gather: Duration,
}

fn timed<T>(into: &mut Duration, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    *into = start.elapsed();
    result
}

fn ours(client: &Client, pieces: &[Remote]) -> Fallible<(Turn, Vec<Vec<u8>>, Vec<u8>)> {
    let mut turn = Turn::default();
    let results = timed(&mut turn.map, || -> Fallible<_> {
        let results: Result<Vec<Remote>, _> =
            pieces.iter().map(|piece| client.submit("map", &(), &[piece])).collect();
        let results = results?;
        client.wait(&results)?;
        Ok(results)
    })?;
    let sum = timed(&mut turn.reduce, || -> Fallible<_> {
        let mut level: Vec<Remote> = Vec::new();
        for pair in results.chunks(2) {
            level.push(client.submit("add", &(), &pair.iter().collect::<Vec<_>>())?);
        }
        while level.len() > 1 {
            let mut next = Vec::new();
            for pair in level.chunks(2) {
                next.push(client.submit("add", &(), &pair.iter().collect::<Vec<_>>())?);
            }
            level = next;
        }
        let sum = level.pop().ok_or("no pieces")?;
        sum.wait()?;
        Ok(sum)
    })?;
    let all = timed(&mut turn.gather, || client.gather(&results))?;
    timed(&mut turn.put, || {
        all.iter().map(|piece| client.put(piece)).collect::<Result<Vec<Remote>, _>>()
    })?;
    Ok((turn, all, sum.bytes()?))
}

/// The second vectors are overwritten.
fn rayons(pieces: &[Vec<f32>], place: &mut [Vec<f32>]) -> (Turn, Vec<Vec<f32>>, Vec<f32>) {
    let mut turn = Turn::default();
    let results: Vec<Vec<f32>> = timed(&mut turn.map, || {
        pieces.par_iter().map(|piece| piece.iter().map(|x| mapped(*x)).collect()).collect()
    });
    timed(&mut turn.map_in_place, || {
        place.par_iter_mut().zip(pieces).for_each(|(place, piece)| {
            place.iter_mut().zip(piece).for_each(|(y, x)| *y = mapped(*x));
        });
    });
    let sum = timed(&mut turn.reduce, || tree(&results));
    (turn, results, sum)
}

/// The sum of all pieces, in the same order as on the workers.
fn tree(pieces: &[Vec<f32>]) -> Vec<f32> {
    match pieces {
        [] => Vec::new(),
        [one] => one.clone(),
        [a, b] => a.iter().zip(b).map(|(a, b)| a + b).collect(),
        more => {
            let (left, right) = more.split_at(more.len() / 2);
            let (mut left, right) = rayon::join(|| tree(left), || tree(right));
            left.iter_mut().zip(&right).for_each(|(a, b)| *a += b);
            left
        }
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four))
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn work() -> Fallible<ExitCode> {
    let (count, mebibytes) = (setting("PIECES", 64), setting("MEBIBYTES", 16));
    let (turns, length) = (setting("TURNS", 7), mebibytes << 18);
    let bytes = (4 * count * length) as f64;

    let machine = topology::parse(topology::builtin("dgx-1-v100").ok_or("a built-in machine")?)?;
    let cluster = Cluster::builder().simulate(machine).workers(WORKERS).launch_blocking()?;
    let client = cluster.client()?;
    rayon::ThreadPoolBuilder::new().num_threads(WORKERS as usize).build_global()?;

    let arguments = (0..count).map(|piece| (piece, length));
    let pieces = client.map("make", arguments)?;
    client.wait(&pieces)?;
    let vectors: Vec<Vec<f32>> =
        (0..count).map(|piece| (0..length).map(|at| made(piece, at)).collect()).collect();
    let mut place = vectors.clone();

    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for turn in 0..=turns {
        let (our, all, sum) = ours(&client, &pieces)?;
        let (their, results, total) = rayons(black_box(&vectors), &mut place);
        let same = all.iter().zip(&results).all(|(a, b)| numbers(a).eq(b.iter().copied()));
        if !same || !numbers(&sum).eq(total.iter().copied()) {
            return Err("the results are not the same".into());
        }
        // The first turn touches memory that nobody has used before.
        let label = if turn == 0 { "first" } else { "again" };
        let millis = |time: Duration| 1e3 * time.as_secs_f64();
        let rate = |time: Duration| bytes / time.as_secs_f64() / 1e9;
        println!(
            "{label}  map {:4.0} ms (rayon {:4.0}, into existing vectors {:4.0})   reduction {:4.0} \
             ms (rayon {:4.0})   gather {:4.2} GB/s   put {:4.2} GB/s",
            millis(our.map),
            millis(their.map),
            millis(their.map_in_place),
            millis(our.reduce),
            millis(their.reduce),
            rate(our.gather),
            rate(our.put),
        );
        if turn > 0 {
            mine.push(our);
            theirs.push(their);
        }
    }
    cluster.stop();

    let of = |turns: &[Turn], part: fn(&Turn) -> Duration| {
        median(turns.iter().map(|turn| part(turn).as_secs_f64()).collect())
    };
    let (map, reduce) = (of(&mine, |turn| turn.map), of(&mine, |turn| turn.reduce));
    let (new, old) = (of(&theirs, |turn| turn.map), of(&theirs, |turn| turn.map_in_place));
    let gather = bytes / of(&mine, |turn| turn.gather);
    let ratio = new.min(old) / map;
    let verdict = |good: bool| if good { "ok" } else { "MISSED" };
    println!(
        "map        {ratio:.2} of rayon, bound {MAP_BOUND}: {} ({:.2} of rayon into new vectors, \
         {:.2} into existing ones)",
        verdict(ratio >= MAP_BOUND),
        new / map,
        old / map
    );
    println!("reduction  {:.2} of rayon", of(&theirs, |turn| turn.reduce) / reduce);
    println!(
        "gather     {:.2} GB/s, bound {:.0}: {}",
        gather / 1e9,
        GATHER_BOUND / 1e9,
        verdict(gather >= GATHER_BOUND)
    );
    println!("put        {:.2} GB/s", bytes / of(&mine, |turn| turn.put) / 1e9);
    let good = ratio >= MAP_BOUND && gather >= GATHER_BOUND;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> Fallible<ExitCode> {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch_with(functions) {
        return Ok(code);
    }
    work()
}
