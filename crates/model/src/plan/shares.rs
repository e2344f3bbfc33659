//! Shares of the machine's CPUs for workers and scheduler.
//!
//! Chooses how to bind; `cpus` computes the sets.
//!
//! *Invariant:* one share for each worker, in rank order.

use super::context::Context;
use super::cpus;
use super::error::PlanError;
use crate::cpuset::CpuSet;
use crate::spec::CpuBinding;
use crate::topology::Note;

/// CPUs (`None` for no binding) with the reason.
pub(super) type Share = (Option<CpuSet>, String);

/// The CPUs of every process.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    /// In rank order.
    pub(super) workers: Vec<Share>,
    pub(super) scheduler: Share,
}

/// Shares the CPUs out among workers and scheduler.
pub(super) fn share(context: &Context<'_>, notes: &mut Vec<Note>) -> Result<Shares, PlanError> {
    let binding = |at: usize| {
        let overridden = context.slots[at].overridden(|one| one.cpus);
        overridden.or(context.spec.cpus).unwrap_or_default()
    };
    let mut workers: Vec<Share> = Vec::new();
    for (at, slot) in context.slots.iter().enumerate() {
        workers.push(match (binding(at), slot.chosen) {
            (CpuBinding::None, _) => (None, "no binding is asked for".to_owned()),
            (_, None) => {
                (cpus::allowed(context.topology), "it has no GPU, so every allowed CPU".to_owned())
            }
            (_, Some(chosen)) => match cpus::near(context.topology, chosen.gpu, notes) {
                Some(near) => (Some(near.cpus), near.reason),
                None => {
                    let text = "the source tells nothing about CPUs, so none are bound";
                    notes.push(Note::new("cpus", text));
                    (None, text.to_owned())
                }
            },
        });
    }
    if context.spec.cpus != Some(CpuBinding::Split) {
        let scheduler = (None, "any of the allowed CPUs".to_owned());
        return Ok(Shares { workers, scheduler });
    }
    let mut shares = split(context, workers, &|at| binding(at) == CpuBinding::Split, notes)?;
    keep_for_scheduler(context, &mut shares, notes)?;
    Ok(shares)
}

/// Divides the CPUs among the workers for which `takes_part` holds.
fn split(
    context: &Context<'_>,
    mut workers: Vec<Share>,
    takes_part: &dyn Fn(usize) -> bool,
    notes: &mut Vec<Note>,
) -> Result<Shares, PlanError> {
    let scheduler = (None, "every core is some worker's, so any of the allowed CPUs".to_owned());
    let part: Vec<usize> =
        (0..workers.len()).filter(|at| takes_part(*at) && workers[*at].0.is_some()).collect();
    let near: Vec<CpuSet> = part.iter().filter_map(|at| workers[*at].0.clone()).collect();
    let all = near.iter().fold(CpuSet::new(), |all, more| all.union(more));
    if !all.is_empty() && context.topology.cores.is_empty() {
        let text = "the source tells no cores: each CPU is taken for one, and hyperthreads of one \
                    core may fall to different workers";
        notes.push(Note::new("cpus", text));
    }
    let cores = cpus::cores(context.topology, &all);
    for (at, mine) in part.iter().zip(cpus::share_cores(&cores, &near)?) {
        let rivals = near.iter().filter(|other| !other.intersection(&mine).is_empty()).count();
        let count = cpus::cores(context.topology, &mine).len();
        let word = if count == 1 { "core" } else { "cores" };
        let (share, reason) = &mut workers[*at];
        *reason = match rivals {
            1 => format!("{count} whole {word}, shared with nobody: {reason}"),
            _ => format!("{count} whole {word}, its share among {rivals} workers: {reason}"),
        };
        *share = Some(mine);
    }
    Ok(Shares { workers, scheduler })
}

/// Gives the scheduler cores of its own: cores that no worker uses, or the requested number, taken
/// from the workers with the most.
fn keep_for_scheduler(
    context: &Context<'_>,
    shares: &mut Shares,
    notes: &mut Vec<Note>,
) -> Result<(), PlanError> {
    let Some(allowed) = cpus::allowed(context.topology) else { return Ok(()) };
    let taken = shares.workers.iter().filter_map(|(cpus, _)| cpus.as_ref());
    let free = taken.fold(allowed.clone(), |free, mine| free.difference(mine));
    let mut spare = cpus::cores(context.topology, &free);
    let Some(wanted) = context.spec.scheduler_cores.map(|count| count as usize) else {
        if !free.is_empty() {
            shares.scheduler = (Some(free), "the cores that no worker claims".to_owned());
        }
        return Ok(());
    };
    spare.truncate(wanted);
    while spare.len() < wanted {
        let count = |share: &Share| {
            share.0.as_ref().map_or(0, |cpus| cpus::cores(context.topology, cpus).len())
        };
        // The last of the richest, so that remainders go first.
        let richest = (0..shares.workers.len()).max_by_key(|at| (count(&shares.workers[*at]), *at));
        let Some(rich) = richest.filter(|at| count(&shares.workers[*at]) > 1) else {
            return Err(PlanError::TooFewCores {
                workers: shares.workers.len() + wanted,
                cores: cpus::cores(context.topology, &allowed).len(),
                cpus: allowed.to_string(),
            });
        };
        let (mine, _) = &mut shares.workers[rich];
        let own = mine.clone().unwrap_or_default();
        let Some(last) = cpus::cores(context.topology, &own).pop() else { break };
        *mine = Some(own.difference(&last));
        spare.push(last);
    }
    let kept = spare.iter().fold(CpuSet::new(), |all, core| all.union(core));
    if kept.is_empty() {
        notes.push(Note::new("scheduler_cores", "no core is kept"));
        return Ok(());
    }
    shares.scheduler = (Some(kept), format!("{wanted} cores are kept for it"));
    Ok(())
}
