//! Workloads for benchmarks: many small tasks, a matrix with its transpose, a join.
//!
//! Does not measure time or print; `bench` does. Each workload has a counterpart that computes the
//! same result in this process, with plain loops.
//!
//! *Invariant:* the same seed and sizes give the same numbers on any number of workers.

use std::collections::BTreeMap;

use super::{Client, ClientError, Remote};
use cuda_cluster_native::worker::built_in::{matrix_element, table_row};

/// How small tasks depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// They are independent.
    Flat,
    /// Sixteen chains, each task depending on the one before.
    Chains,
    /// Fans of a hundred tasks: all depend on one, and one depends on all.
    Fans,
}

/// Number of concurrent chains.
const CHAINS: usize = 16;

/// Number of tasks between the two ends of a fan.
const FAN: usize = 100;

/// Runs `count` tasks that do nothing, and waits for all of them.
///
/// # Errors
/// If a task fails, or the scheduler is gone.
pub fn small_tasks(client: &Client, shape: Shape, count: usize) -> Result<(), ClientError> {
    let noop = |inputs: &[&Remote]| client.submit("noop", &(), inputs);
    let mut tasks: Vec<Remote> = Vec::with_capacity(count);
    match shape {
        Shape::Flat => {
            for _ in 0..count {
                tasks.push(noop(&[])?);
            }
        }
        Shape::Chains => {
            for at in 0..count {
                let before = at.checked_sub(CHAINS).map(|before| &tasks[before]);
                tasks.push(noop(before.as_slice())?);
            }
        }
        Shape::Fans => {
            let mut root = noop(&[])?;
            while tasks.len() + FAN + 1 < count {
                let first = tasks.len();
                for _ in 0..FAN {
                    tasks.push(noop(&[&root])?);
                }
                let all: Vec<&Remote> = tasks[first..].iter().collect();
                let next = noop(&all)?;
                tasks.push(std::mem::replace(&mut root, next));
            }
            tasks.push(root);
        }
    }
    client.wait(&tasks)
}

/// The scheduler's memory per waiting task, in bytes, measured with `count` tasks behind one that
/// takes a few seconds. If the cluster has worked before, memory is reused, and the result is too
/// low.
///
/// # Errors
/// If a task fails, or the scheduler is gone.
pub fn queued_task_bytes(client: &Client, count: usize) -> Result<f64, ClientError> {
    let before = client.overview()?.resident_bytes;
    let micros = 1_000_000 + 20 * count as u64;
    let first = client.submit("sleep", &micros, &[])?;
    let waiting: Vec<Remote> =
        (0..count).map(|_| client.submit("noop", &(), &[&first])).collect::<Result<_, _>>()?;
    // Answered after all earlier requests.
    let after = client.overview()?.resident_bytes;
    client.wait(&waiting)?;
    Ok(after.saturating_sub(before) as f64 / count.max(1) as f64)
}

/// A square matrix in square chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Chunks in each direction.
    pub chunks: u64,
    /// Elements per chunk in each direction; eight bytes each.
    pub size: u64,
    /// Seed of the elements.
    pub seed: u64,
}

impl Matrix {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.chunks * self.chunks * self.size * self.size * 8
    }

    /// Computes `(x + x.T).sum()` in this process.
    pub fn sum_with_transpose_here(&self) -> u64 {
        let side = self.chunks * self.size;
        let mut total = 0u64;
        for row in 0..side {
            for column in 0..side {
                let pair = matrix_element(self.seed, row, column)
                    .wrapping_add(matrix_element(self.seed, column, row));
                total = total.wrapping_add(pair);
            }
        }
        total
    }

    /// Starts the computation of the matrix's chunks.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn make(&self, client: &Client) -> Result<Vec<Remote>, ClientError> {
        let mut chunks = Vec::new();
        for row in 0..self.chunks {
            for column in 0..self.chunks {
                let arguments = (self.seed, row * self.size, column * self.size, self.size);
                chunks.push(client.submit("matrix.chunk", &arguments, &[])?);
            }
        }
        Ok(chunks)
    }

    /// Computes `(x + x.T).sum()` from chunks of [`Self::make`].
    ///
    /// # Errors
    /// If a task fails, or the scheduler is gone.
    pub fn sum_with_transpose(
        &self,
        client: &Client,
        chunks: &[Remote],
    ) -> Result<u64, ClientError> {
        let side = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        let mut sums = Vec::new();
        for row in 0..side {
            for column in 0..side {
                let pair = [&chunks[row * side + column], &chunks[column * side + row]];
                sums.push(client.submit("matrix.add_transposed_sum", &self.size, &pair)?);
            }
        }
        let sums: Vec<&Remote> = sums.iter().collect();
        client.submit("sum", &(), &sums)?.value()
    }
}

/// Two tables of key-value pairs, and their join by hash partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Parts of each table, and of the result.
    pub parts: u32,
    /// Rows of each part; sixteen bytes each.
    pub rows: u64,
    /// Seed of the keys and values.
    pub seed: u64,
}

/// The result of a join: the number of pairs, and the sum over the products of their values.
pub type Joined = (u64, u64);

impl Merge {
    /// The size of both tables in bytes.
    pub fn bytes(&self) -> u64 {
        2 * u64::from(self.parts) * self.rows * 16
    }

    /// Computes the join in this process.
    pub fn join_here(&self) -> Joined {
        let all = u64::from(self.parts) * self.rows;
        let mut left: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for row in 0..all {
            let (key, value) = table_row(self.seed, 0, row, all);
            left.entry(key).or_default().push(value);
        }
        let (mut pairs, mut total) = (0u64, 0u64);
        for row in 0..all {
            let (key, value) = table_row(self.seed, 1, row, all);
            for other in left.get(&key).into_iter().flatten() {
                pairs += 1;
                total = total.wrapping_add(other.wrapping_mul(value));
            }
        }
        (pairs, total)
    }

    /// Starts the computation of both tables' parts, the left ones first.
    ///
    /// # Errors
    /// If the scheduler is gone.
    pub fn make(&self, client: &Client) -> Result<Vec<Remote>, ClientError> {
        let all = u64::from(self.parts) * self.rows;
        let mut tables = Vec::new();
        for side in 0..2u8 {
            for part in 0..u64::from(self.parts) {
                let arguments = (self.seed, side, part * self.rows, self.rows, all);
                tables.push(client.submit("table.make", &arguments, &[])?);
            }
        }
        Ok(tables)
    }

    /// Computes the join of tables from [`Self::make`].
    ///
    /// # Errors
    /// If a task fails, or the scheduler is gone.
    pub fn join(&self, client: &Client, tables: &[Remote]) -> Result<Joined, ClientError> {
        let split = |table: &Remote| {
            let task = client.task("table.split").arguments(&self.parts).inputs(&[table]);
            task.outputs(self.parts).submit_all()
        };
        let split = tables.iter().map(split).collect::<Result<Vec<Vec<Remote>>, ClientError>>()?;
        let mut joined = Vec::new();
        for part in 0..self.parts as usize {
            let inputs: Vec<&Remote> = split.iter().map(|table| &table[part]).collect();
            joined.push(client.submit("table.join", &(), &inputs)?);
        }
        drop(split);
        let mut sum = (0u64, 0u64);
        for one in joined {
            let (pairs, total): Joined = one.value()?;
            sum = (sum.0 + pairs, sum.1.wrapping_add(total));
        }
        Ok(sum)
    }
}
