//! Notes limits and threads for which the machine is too small once all workers have them.
//!
//! Does not refuse what no single worker can have; `decide` does.
//!
//! *Invariant:* a spec that sets no size and no threads gets none of these notes.

use super::context::{Chosen, Context, Slot};
use super::form::WorkerPlan;
use super::{cpus, memory};
use crate::cpuset::CpuSet;
use crate::spec::{EngineKind, Limit};
use crate::topology::Note;
use crate::units::HumanBytes;

/// Threads per CPU beyond which they are noted. Tasks that wait for a GPU, a disk or the network
/// justify some more threads than CPUs.
const MOST_THREADS_PER_CPU: u64 = 4;

/// Everything that the workers can't have all at once.
pub(super) fn notes(context: &Context<'_>, workers: &[WorkerPlan]) -> Vec<Note> {
    let mut notes: Vec<Note> = host_memory(context, workers).into_iter().collect();
    // The command engine's programs allocate and start threads by themselves.
    if context.engine != EngineKind::Command {
        let limit = |worker: &WorkerPlan| worker.device_memory_limit_bytes;
        notes.extend(device_memory(context, workers, "device.memory_limit", limit));
    }
    if context.engine == EngineKind::Dask {
        // Managed memory may be larger than the device. Native workers spill at this size, so that
        // it is their limit.
        let pool = |worker: &WorkerPlan| {
            worker.rmm.as_ref().filter(|rmm| !rmm.managed)?.maximum_pool_bytes
        };
        notes.extend(device_memory(context, workers, "rmm.maximum_pool_size", pool));
    }
    if context.engine != EngineKind::Command {
        notes.extend(threads(context, workers));
    }
    notes
}

fn host_memory(context: &Context<'_>, workers: &[WorkerPlan]) -> Option<Note> {
    let whole = memory::machine_bytes(context.topology)?;
    let is_asked = |slot: &Slot<'_>| {
        let limit = slot.overridden(|one| one.memory_limit).or(context.spec.memory.limit);
        matches!(limit, Some(Limit::Size(_)))
    };
    let asked = context.slots.iter().zip(workers).filter(|(slot, _)| is_asked(slot));
    let limits: Vec<u64> = asked.filter_map(|(_, worker)| worker.memory_limit_bytes).collect();
    let sum = limits.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    if !exceeds(sum, whole) {
        return None;
    }
    let (sum, whole) = (HumanBytes(sum), HumanBytes(whole));
    let text = match limits.len() {
        1 => format!(
            "the limit of 1 worker is {sum}, and the machine has {whole}: it is full before the \
             limit is reached"
        ),
        count => format!(
            "the limits of {count} workers are {sum} together, and the machine has {whole}: it is \
             full before they are reached"
        ),
    };
    Some(Note::new("memory.limit", text))
}

/// Whether a sum is larger than the whole by so much that people see it: a GPU "of 24 GB" may have
/// some megabytes less.
fn exceeds(sum: u64, whole: u64) -> bool {
    sum > whole && HumanBytes(sum).to_string() != HumanBytes(whole).to_string()
}

/// Sizes of a GPU's workers that exceed it together. GPUs with the same sizes share a note.
fn device_memory(
    context: &Context<'_>,
    workers: &[WorkerPlan],
    key: &str,
    size: impl Fn(&WorkerPlan) -> Option<u64>,
) -> Vec<Note> {
    let mut gpus: Vec<(Chosen<'_>, Sizes)> = Vec::new();
    for (slot, worker) in context.slots.iter().zip(workers) {
        let Some((chosen, bytes)) = slot.chosen.zip(size(worker)) else { continue };
        let Some(memory) = chosen.memory_bytes() else { continue };
        let at = gpus.iter().position(|(gpu, _)| gpu.is_same(&chosen)).unwrap_or(gpus.len());
        if at == gpus.len() {
            gpus.push((chosen, Sizes { workers: 0, sum: 0, memory }));
        }
        let (_, sizes) = &mut gpus[at];
        sizes.workers += 1;
        sizes.sum = sizes.sum.saturating_add(bytes);
    }
    let mut alike: Vec<(Sizes, Vec<String>)> = Vec::new();
    for (gpu, sizes) in gpus.into_iter().filter(|(_, sizes)| exceeds(sizes.sum, sizes.memory)) {
        match alike.iter_mut().find(|(other, _)| *other == sizes) {
            Some((_, names)) => names.push(label(&gpu)),
            None => alike.push((sizes, vec![label(&gpu)])),
        }
    }
    let note = |(sizes, names): (Sizes, Vec<String>)| {
        let names = names.join(", ");
        let (sum, memory) = (HumanBytes(sizes.sum), HumanBytes(sizes.memory));
        let text = match sizes.workers {
            1 => format!("on {names} it is {sum}, and the GPU has {memory}: it is never reached"),
            count => format!(
                "on {names} those of {count} workers are {sum} together, and the GPU has {memory}: \
                 it is full before they are reached; a fraction, like 0.8, is shared by its workers"
            ),
        };
        Note::new(key, text)
    };
    alike.into_iter().map(note).collect()
}

/// The sizes of a GPU's workers, in bytes.
#[derive(Clone, Copy, PartialEq)]
struct Sizes {
    workers: usize,
    sum: u64,
    memory: u64,
}

fn label(chosen: &Chosen<'_>) -> String {
    match chosen.mig {
        Some((at, _)) => format!("GPU {}:{at}", chosen.gpu.index),
        None => format!("GPU {}", chosen.gpu.index),
    }
}

/// Threads of the workers that share a set of CPUs, if they are far more than the CPUs.
fn threads(context: &Context<'_>, workers: &[WorkerPlan]) -> Vec<Note> {
    let allowed = cpus::allowed(context.topology);
    let mut groups: Vec<(&CpuSet, Vec<&WorkerPlan>)> = Vec::new();
    for worker in workers.iter().filter(|worker| worker.threads > 1) {
        let Some(own) = worker.binding.cpus.as_ref().or(allowed.as_ref()) else { continue };
        match groups.iter_mut().find(|(cpus, _)| *cpus == own) {
            Some((_, sharers)) => sharers.push(worker),
            None => groups.push((own, vec![worker])),
        }
    }
    let note = |(cpus, sharers): (&CpuSet, Vec<&WorkerPlan>)| {
        let threads: u64 = sharers.iter().map(|worker| u64::from(worker.threads)).sum();
        let count = cpus.len() as u64;
        if threads <= count.saturating_mul(MOST_THREADS_PER_CPU) {
            return None;
        }
        let names: Vec<&str> = sharers.iter().map(|worker| worker.name.as_str()).collect();
        let verb = if names.len() == 1 { "has" } else { "have" };
        let noun = if count == 1 { "CPU" } else { "CPUs" };
        let text = format!("{} {verb} {threads} for {count} {noun}", names.join(", "));
        Some(Note::new("threads", format!("{text}: tasks wait for each other")))
    };
    groups.into_iter().filter_map(note).collect()
}
