//! A data job: pieces of data are made and mapped where they lie, a tree of tasks reduces them, and
//! what fails is handled.
//!
//! `cargo run --example data_job` runs on a simulated DGX-1, so that it needs no GPU.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use cuda_cluster::cluster::{
    self, Client, ClientError, Cluster, Context, Input, Outputs, Registry, Remote, TaskError,
};
use cuda_cluster::topology;

/// The functions of the workers: this binary is also the worker.
fn functions() -> Registry {
    let mut registry = Registry::new();
    registry
        .add("range", |context: &Context, _: &[Input]| {
            let (first, count): (u32, usize) = context.arguments()?;
            context.fill_numbers(count, |numbers: &mut [f32]| {
                for (number, place) in (first..).zip(numbers) {
                    *place = number as f32;
                }
            })
        })
        .add("scale", |context: &Context, inputs: &[Input]| {
            let factor: f32 = context.arguments()?;
            let [piece] = inputs else { return Err("scale needs one piece".into()) };
            let piece = piece.numbers::<f32>()?;
            context.fill_numbers(piece.len(), |scaled: &mut [f32]| {
                for (scaled, number) in scaled.iter_mut().zip(&*piece) {
                    *scaled = number * factor;
                }
            })
        })
        .add("sum", |_: &Context, inputs: &[Input]| {
            let [piece] = inputs else { return Err("sum needs one piece".into()) };
            Outputs::value(&piece.numbers::<f32>()?.iter().map(|n| f64::from(*n)).sum::<f64>())
        })
        .add("add", |_: &Context, inputs: &[Input]| {
            let values: Result<Vec<f64>, _> = inputs.iter().map(Input::value::<f64>).collect();
            Outputs::value(&values?.iter().sum::<f64>())
        })
        // A function that takes long asks now and then whether anybody still wants its result.
        .add("search", |context: &Context, _: &[Input]| {
            loop {
                std::thread::sleep(Duration::from_millis(5));
                if let Err(cancelled) = context.end_if_cancelled() {
                    return Err::<(), _>(cancelled.into());
                }
            }
        });
    registry
}

/// Adds values in pairs until one is left, so that no worker gathers all of them.
fn reduce(client: &Client, mut values: Vec<Remote>) -> Result<Option<Remote>, ClientError> {
    while values.len() > 1 {
        let pairs = values.chunks(2).map(|pair| {
            let pair: Vec<&Remote> = pair.iter().collect();
            client.submit("add", &(), &pair)
        });
        values = pairs.collect::<Result<_, _>>()?;
    }
    Ok(values.pop())
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // Must come first: this process may have been started as one of the cluster's.
    if let Some(code) = cluster::dispatch_with(functions) {
        return Ok(code);
    }
    let machine = topology::parse(topology::builtin("dgx-1-v100").ok_or("a built-in machine")?)?;
    let cluster = Cluster::builder().simulate(machine).workers(2).launch_blocking()?;
    let client = cluster.client()?;

    // The pieces stay with the workers: tasks go to the data, and only the sum comes here.
    let (pieces, length) = (8u32, 25_000);
    let mut sums = Vec::new();
    for piece in 0..pieces {
        let numbers = client.submit("range", &(piece * length, length), &[])?;
        let doubled = client.submit("scale", &2.0f32, &[&numbers])?;
        sums.push(client.submit("sum", &(), &[&doubled])?);
    }
    let total: f64 = reduce(&client, sums)?.ok_or("there are pieces")?.value()?;
    println!("the sum is {total}");

    // Numbers of this process, without taking them apart into bytes.
    let mine = client.put_numbers(&[1.0f32, 2.0, 3.0])?;
    let scaled = client.submit("scale", &10.0f32, &[&mine])?;
    println!("scaled here: {:?}", scaled.numbers::<f32>()?);

    // A failure names the task and the worker, and reaches what depends on the task.
    let bad = client.submit("scale", &"ten", &[&mine])?;
    match client.submit("sum", &(), &[&bad])?.wait() {
        Err(ClientError::Task(TaskError::Failed { message, .. })) => println!("failed: {message}"),
        other => println!("unexpected: {other:?}"),
    }

    // What takes too long is cancelled, and its worker is free again.
    let search = client.task("search").on("gpu0").submit()?;
    if let Err(ClientError::TimedOut { within }) = search.wait_within(Duration::from_millis(200)) {
        println!("no result within {within:?}");
        search.cancel()?;
    }
    let next = client.task("sum").inputs(&[&mine]).on("gpu0").submit()?;
    println!("gpu0 goes on: {}", next.value::<f64>()?);
    cluster.stop();
    Ok(ExitCode::SUCCESS)
}
