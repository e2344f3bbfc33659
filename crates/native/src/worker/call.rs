//! Runs one task: opens its inputs, calls its function, and keeps what that returns.
//!
//! *Invariant:* whatever the function does, there is one report.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::context::WorkerContext;
use super::objects::{Consumer, StoreError};
use super::registry::{Context, FunctionError, Input, InputKind};
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::tasks::{INLINE_LIMIT, ObjectId, Product, Ran, Report, TaskError};

/// A task whose inputs are here.
pub(super) struct Job {
    pub(super) task: ObjectId,
    pub(super) outputs: u32,
    pub(super) function: String,
    pub(super) arguments: Vec<u8>,
    pub(super) inputs: Vec<(ObjectId, Option<Vec<u8>>)>,
    /// Bytes of inputs that came from peers.
    pub(super) fetched_bytes: u64,
}

pub(super) fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

/// A run that begins now, with inputs of so many bytes that came from peers.
pub(super) fn began_now(fetched_bytes: u64) -> Ran {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ran { at: micros(at), micros: 0, fetched_bytes }
}

/// Runs a task. If it finds no room beside other tasks and fetches, it runs again alone; if there
/// is no room even then, there is none at all.
pub(super) fn run(shared: &WorkerContext, job: &Job, cancelled: &AtomicBool) -> Report {
    let beside = shared.store.enter();
    let report = try_run(shared, &beside, job, cancelled);
    if !matches!(&report, Report::Failed { error: TaskError::NoRoom { .. }, .. }) {
        return report;
    }
    drop(beside);
    try_run(shared, &shared.store.enter_alone(), job, cancelled)
}

fn try_run(
    shared: &WorkerContext,
    consumer: &Consumer,
    job: &Job,
    cancelled: &AtomicBool,
) -> Report {
    let task = job.task;
    let mut ran = began_now(job.fetched_bytes);
    let worker = || shared.me.name.clone();
    let Some(function) = shared.registry.find(&job.function) else {
        let function = job.function.clone();
        let error = TaskError::UnknownFunction { task, worker: worker(), function };
        return Report::Failed { task, error, ran };
    };
    let mut inputs = Vec::with_capacity(job.inputs.len());
    for (object, inline) in &job.inputs {
        let object = *object;
        inputs.push(Input(match inline {
            Some(bytes) => InputKind::Inline(bytes.clone().into()),
            None => match shared.store.open(consumer, object) {
                Ok(pinned) => InputKind::Stored(pinned),
                Err(error) if error.is_lost() => {
                    tracing::warn!(%task, %object, %error, "an input is not available");
                    let source = shared.me.clone();
                    return Report::Unreachable { task, object, source, missing: true };
                }
                Err(error) => {
                    let error = task_error(task, worker(), &error);
                    return Report::Failed { task, error, ran };
                }
            },
        }));
    }
    let (store, arguments) = (&*shared.store, &*job.arguments);
    let worker_name = &shared.me.name;
    let context = Context { task, worker: worker_name, arguments, store, consumer, cancelled };
    ran.at = began_now(0).at;
    let start = Instant::now();
    let returned = catch_unwind(AssertUnwindSafe(|| function(&context, &inputs)));
    ran.micros = micros(start.elapsed());
    drop(inputs);
    let result = match returned {
        Err(panic) => {
            let error = TaskError::Panicked { task, worker: worker(), message: words(&*panic) };
            return Report::Failed { task, error, ran };
        }
        Ok(result) => result,
    };
    let products = result.and_then(|outputs| {
        if outputs.0.len() != job.outputs as usize {
            let (got, promised) = (outputs.0.len(), job.outputs);
            return Err(format!("it returned {got} outputs instead of {promised}").into());
        }
        let named =
            (0..).zip(outputs.0).map(|(at, buffer)| keep(shared, consumer, task.plus(at), buffer));
        named.collect::<Result<Vec<Product>, FunctionError>>()
    });
    match products {
        Ok(products) => Report::Done { task, products, ran },
        Err(error) => Report::Failed { task, error: task_error(task, worker(), &*error), ran },
    }
}

/// Sends small outputs to the scheduler, and puts others into the store.
fn keep(
    shared: &WorkerContext,
    consumer: &Consumer,
    object: ObjectId,
    buffer: Buffer,
) -> Result<Product, FunctionError> {
    if buffer.len() <= INLINE_LIMIT {
        return Ok(Product::Inline(match buffer {
            Buffer::Host(bytes) => bytes.into_vec(),
            Buffer::Device(memory) => {
                let mut bytes = vec![0; memory.len()];
                memory.read(0, &mut bytes)?;
                bytes
            }
        }));
    }
    Ok(Product::Stored(shared.store.insert(consumer, object, buffer)?))
}

fn task_error(
    task: ObjectId,
    worker: String,
    error: &(dyn std::error::Error + 'static),
) -> TaskError {
    let message = in_full(error);
    match error.downcast_ref::<StoreError>() {
        Some(StoreError::NoRoom(_)) => TaskError::NoRoom { task, worker, message },
        _ => TaskError::Failed { task, worker, message },
    }
}

/// The message of a panic.
fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}
