//! Registers a function, launches a cluster as itself, and computes `a * x + y` on it.
//!
//! `cargo run --example saxpy` runs on a simulated DGX-1, so that it needs no GPU.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::process::ExitCode;

use cuda_cluster::cluster::{self, Cluster, Context, FunctionError, Input, Registry, Remote};
use cuda_cluster::topology;

/// The functions of the workers: this binary is also the worker.
fn functions() -> Registry {
    let mut registry = Registry::built_in();
    registry.add("range", |context: &Context, _: &[Input]| {
        let (first, last): (u32, u32) = context.arguments()?;
        let numbers: Vec<f32> = (first..last).map(|n| n as f32).collect();
        context.place(&to_bytes(&numbers))
    });
    registry.add("saxpy", |context: &Context, inputs: &[Input]| {
        let a: f32 = context.arguments()?;
        let [x, y] = inputs else { return Err("saxpy needs x and y".into()) };
        let (x, y) = (from_bytes(&x.bytes()?), from_bytes(&y.bytes()?));
        let result: Vec<f32> = x.iter().zip(&y).map(|(x, y)| a * x + y).collect();
        context.place(&to_bytes(&result))
    });
    registry.add("panic", |_: &Context, _: &[Input]| -> Result<(), FunctionError> {
        panic!("this one always does")
    });
    registry
}

fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
        .collect()
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch_with(functions) {
        return Ok(code);
    }
    let machine = topology::parse(topology::builtin("dgx-1-v100").ok_or("a built-in machine")?)?;
    let cluster = Cluster::builder().simulate(machine).workers(2).launch_blocking()?;
    let client = cluster.client()?;

    // Eight pieces of x = 0, 1, 2, … and y = x; no data passes through this process.
    let mut pieces: Vec<Remote> = Vec::new();
    for piece in 0..8u32 {
        let range = (piece * 1000, (piece + 1) * 1000);
        let x = client.submit("range", &range, &[])?;
        pieces.push(client.submit("saxpy", &2.0f32, &[&x, &x])?);
    }
    let sum: f32 = client.gather(&pieces)?.iter().flat_map(|piece| from_bytes(piece)).sum();
    println!("the sum of 2x + x is {sum}");

    let error = client.submit("panic", &(), &[])?.wait().expect_err("it panics");
    println!("{error}");
    cluster.stop();
    Ok(ExitCode::SUCCESS)
}
