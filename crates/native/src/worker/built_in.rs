//! The functions built into the stock program: those of the benchmarks, and CUDA C++.
//!
//! Does not know the graphs that use them; `cluster::workloads` builds those.
//!
//! *Invariant:* the same arguments and inputs give the same bytes on every worker.

use std::time::{Duration, Instant};

use super::registry::{Context, FunctionError, Input, Outputs, Registry};
use cuda_cluster_data::cuda::{Kernel, Parameter, Scalar};
use cuda_cluster_data::ucx::Buffer;

/// How often a sleeping function looks whether it is cancelled.
const NAP: Duration = Duration::from_millis(20);

impl Registry {
    /// The functions that workers of the stock program can run.
    pub fn built_in() -> Self {
        let mut registry = Registry::new();
        registry
            .add("noop", |_, _| Ok(()))
            .add("sum", sum)
            .add("matrix.chunk", matrix_chunk)
            .add("matrix.add_transposed_sum", add_transposed_sum)
            .add("table.make", table_make)
            .add("table.split", table_split)
            .add("table.join", table_join)
            .add(CudaTask::FUNCTION, cuda)
            .add("sleep", sleep);
        registry
    }
}

/// A well-mixed number (the last steps of SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The element of the benchmark's matrix at a row and a column.
pub fn matrix_element(seed: u64, row: u64, column: u64) -> u64 {
    mix(seed ^ mix(row << 32 | column)) >> 40
}

/// The key and the value of a row of the benchmark's tables. Half of the keys of one table occur
/// in the other.
pub fn table_row(seed: u64, side: u8, row: u64, rows: u64) -> (u64, u64) {
    let key = mix(row ^ seed) % rows.max(1) + u64::from(side) * (rows / 2);
    (key, mix(row ^ seed ^ (u64::from(side) + 7)) >> 32)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
}

/// A buffer with this many 64-bit words.
fn fill(
    context: &Context<'_>,
    count: usize,
    words: impl Iterator<Item = u64>,
) -> Result<Buffer, FunctionError> {
    let bytes = count.checked_mul(8).ok_or("more bytes than there are addresses")?;
    context.fill(bytes, |room| {
        for (eight, word) in room.as_chunks_mut().0.iter_mut().zip(words) {
            *eight = word.to_le_bytes();
        }
    })
}

/// Sleeps until its time is over, or its task is cancelled. Arguments: microseconds.
fn sleep(context: &Context<'_>, _: &[Input]) -> Result<(), FunctionError> {
    let end = Instant::now() + Duration::from_micros(context.arguments()?);
    loop {
        context.end_if_cancelled()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(NAP));
    }
}

/// The sum of values.
fn sum(_: &Context<'_>, inputs: &[Input]) -> Result<Outputs, FunctionError> {
    let mut total = 0u64;
    for input in inputs {
        total = total.wrapping_add(input.value::<u64>()?);
    }
    Outputs::value(&total)
}

/// Arguments: seed, first row, first column, size of the square chunk.
fn matrix_chunk(context: &Context<'_>, _: &[Input]) -> Result<Outputs, FunctionError> {
    let (seed, row, column, size): (u64, u64, u64, u64) = context.arguments()?;
    let places = (row..row + size).flat_map(|r| (column..column + size).map(move |c| (r, c)));
    let words = places.map(|(row, column)| matrix_element(seed, row, column));
    Ok(fill(context, usize::try_from(size * size)?, words)?.into())
}

/// The sum over `a + transposed(b)`. Arguments: size of the square chunks.
fn add_transposed_sum(context: &Context<'_>, inputs: &[Input]) -> Result<Outputs, FunctionError> {
    let size: usize = context.arguments()?;
    let [a, b] = inputs else { return Err("two chunks are needed".into()) };
    let (a, b) = (a.bytes()?, b.bytes()?);
    let (a, b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    if a.len() != size * size || b.len() != size * size {
        return Err(format!("the chunks are not of {size} by {size} numbers").into());
    }
    let mut total = 0u64;
    for row in 0..size {
        for column in 0..size {
            let one = u64::from_le_bytes(a[row * size + column]);
            let other = u64::from_le_bytes(b[column * size + row]);
            total = total.wrapping_add(one).wrapping_add(other);
        }
    }
    Outputs::value(&total)
}

/// A part of a table: pairs of key and value. Arguments: seed, side, first row, rows, all rows.
fn table_make(context: &Context<'_>, _: &[Input]) -> Result<Outputs, FunctionError> {
    let (seed, side, first, rows, all): (u64, u8, u64, u64, u64) = context.arguments()?;
    let words = (first..first + rows).flat_map(|row| {
        let (key, value) = table_row(seed, side, row, all);
        [key, value]
    });
    Ok(fill(context, usize::try_from(rows * 2)?, words)?.into())
}

/// Splits a table's rows by the hash of their keys, one output per part. Arguments: number of
/// parts.
fn table_split(context: &Context<'_>, inputs: &[Input]) -> Result<Outputs, FunctionError> {
    let parts: usize = context.arguments()?;
    let [table] = inputs else { return Err("one table is needed".into()) };
    let table = table.bytes()?;
    let mut split: Vec<Vec<u64>> = vec![Vec::new(); parts];
    let mut table = words(&table);
    while let (Some(key), Some(value)) = (table.next(), table.next()) {
        let part = usize::try_from(mix(key) % parts.max(1) as u64)?;
        split[part].extend([key, value]);
    }
    let placed = split.iter().map(|words| fill(context, words.len(), words.iter().copied()));
    Ok(placed.collect::<Result<Vec<Buffer>, FunctionError>>()?.into())
}

/// Joins the left inputs (the first half) with the right ones on their keys; returns the number of
/// pairs and the sum of the products of their values.
fn table_join(_: &Context<'_>, inputs: &[Input]) -> Result<Outputs, FunctionError> {
    let (left, right) = inputs.split_at(inputs.len() / 2);
    let mut rows: std::collections::HashMap<u64, Vec<u64>> = Default::default();
    for part in left {
        let part = part.bytes()?;
        let mut part = words(&part);
        while let (Some(key), Some(value)) = (part.next(), part.next()) {
            rows.entry(key).or_default().push(value);
        }
    }
    let (mut pairs, mut total) = (0u64, 0u64);
    for part in right {
        let part = part.bytes()?;
        let mut part = words(&part);
        while let (Some(key), Some(value)) = (part.next(), part.next()) {
            for other in rows.get(&key).into_iter().flatten() {
                pairs += 1;
                total = total.wrapping_add(other.wrapping_mul(value));
            }
        }
    }
    Outputs::value(&(pairs, total))
}

/// A parameter of a CUDA task's kernel.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum CudaParameter {
    /// A pointer to the task's input of this number, counted from 0; the kernel must only read it.
    Input(u32),
    /// A pointer to the task's next output, of this many bytes, with undefined content.
    Output(u64),
    Value(Scalar),
}

/// CUDA C++ as a task: the arguments of the built-in function [`CudaTask::FUNCTION`].
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CudaTask {
    /// The code to run, and its launch configuration.
    pub kernel: Kernel,
    /// Its parameters, in order. With a driver older than CUDA 12.4, which cannot tell how many the
    /// kernel takes, missing ones are zero; with others they are an error.
    pub parameters: Vec<CudaParameter>,
}

impl CudaTask {
    /// The name of the built-in function.
    pub const FUNCTION: &str = "cuda";
}

/// Runs a [`CudaTask`]. Inputs outside device memory are copied there first.
fn cuda(context: &Context<'_>, inputs: &[Input]) -> Result<Outputs, FunctionError> {
    let CudaTask { kernel, parameters } = context.arguments()?;
    let device = context.device().ok_or("this worker has no GPU: it cannot run CUDA C++")?;
    if device.is_simulated() {
        // Find errors in the code before taking memory for it.
        device.run(&kernel, &mut [])?;
    }
    let mut copies = Vec::new();
    for input in inputs {
        copies.push(match input.buffer() {
            Buffer::Device(_) => None,
            Buffer::Host(bytes) => Some(context.place(bytes)?),
        });
    }
    let sizes = parameters.iter().filter_map(|parameter| match parameter {
        CudaParameter::Output(bytes) => Some(*bytes),
        _ => None,
    });
    let mut outputs = Vec::new();
    for bytes in sizes {
        outputs.push(context.allocate(usize::try_from(bytes)?)?);
    }
    let mut places = outputs.iter_mut();
    let mut given = Vec::with_capacity(parameters.len());
    for parameter in &parameters {
        given.push(match parameter {
            CudaParameter::Value(scalar) => Parameter::Value(*scalar),
            CudaParameter::Input(at) => {
                let input = inputs.get(*at as usize).zip(copies.get(*at as usize));
                let (input, copy) = input.ok_or_else(|| format!("there is no input {at}"))?;
                match copy.as_ref().unwrap_or(input.buffer()) {
                    Buffer::Device(memory) => Parameter::In(memory),
                    Buffer::Host(_) => return Err("an input is not in device memory".into()),
                }
            }
            CudaParameter::Output(_) => match places.next() {
                Some(Buffer::Device(memory)) => Parameter::Out(memory),
                _ => return Err("an output is not in device memory".into()),
            },
        });
    }
    device.run(&kernel, &mut given)?;
    drop(given);
    Ok(outputs.into())
}
