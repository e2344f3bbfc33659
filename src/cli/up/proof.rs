//! Proves the ways between a program's devices before its ranks start.
//!
//! A program connects as it likes, and says nothing about it. So the native engine is brought up on
//! the same devices with the same bindings, its pairs are verified, and it is taken down again.
//!
//! *Invariant:* ranks start only after every pair was as expected.

use super::{Audience, Owner, Purpose, Signals, attend, noted_quietly};
use crate::cli::failure::{Exit, Failure};
use crate::cli::{output, reach, source};
use crate::cluster::{self, Lifetime};
use crate::ids::ClusterName;
use crate::plan::Plan;
use crate::spec::{ClusterSpec, EngineKind, GpuName, GpuSelection, Request};
use crate::topology::{ComputeMode, Topology};

/// Takes `verify` out of the request for a program, and does it.
///
/// Returns an exit if a signal has ended it.
pub(in crate::cli) fn prove(request: &mut Request) -> Result<Option<Exit>, Failure> {
    let is_program = request.spec.engine == Some(EngineKind::Command);
    if !is_program || request.spec.verify.take() != Some(true) {
        return Ok(None);
    }
    let mut same = of_the_same_devices(&request.spec)?;
    if !request.spec.programs().is_empty() {
        // Which they are is decided for the groups.
        same.gpus = Some(GpuSelection::List(devices(&super::prepare(request)?.plan)));
        same.workers = None;
    }
    let stand_in = Request::of(same).map_err(|error| Failure::new(Exit::Usage, error))?;
    // What the program then uses is its own choice.
    request.spec.supervision.audit.get_or_insert(true);
    let machine = stand_in.spec.topology.as_deref().map(source::load).transpose()?;
    let mut prepared = noted_quietly(cluster::prepare(&stand_in, machine.as_ref()), request)?;
    refuse_exclusive(&prepared.plan, prepared.machine.as_ref())?;
    prepared.to_be_verified = true;
    output::status("verifying the ways between the devices, before the program starts");
    let plan = prepared.plan.clone();
    let runtime = reach::runtime()?;
    let signals = runtime.block_on(async { Signals::new() })?;
    let (mut owner, mut ready) = (Owner::watch(None)?, false);
    let purpose = Purpose { lifetime: Lifetime::Owned, proof: true };
    let ended = attend(prepared, purpose, Audience::Nobody, signals, &mut owner, &mut ready);
    let ended = runtime.block_on(ended);
    if !ready {
        cluster::forget_failed_start(&plan.name);
    }
    match ended {
        Ok(Exit::Done) => Ok(None),
        Err(failure) if failure.exit == Exit::Unverified => {
            let error = anyhow::anyhow!("the verification failed, so the program is not started");
            Err(Failure { error, ..failure })
        }
        ended => ended.map(Some),
    }
}

/// The GPUs and MIG instances of a plan.
fn devices(plan: &Plan) -> Vec<GpuName> {
    let mut names = Vec::new();
    for gpu in plan.workers.iter().filter_map(|worker| worker.gpu.as_ref()) {
        let name = match (&gpu.mig, &gpu.uuid) {
            (Some(_), Some(uuid)) => GpuName::Uuid(uuid.clone()),
            _ => GpuName::Index(gpu.index),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The spec of a native cluster on the devices of a program.
fn of_the_same_devices(spec: &ClusterSpec) -> Result<ClusterSpec, Failure> {
    let name = spec.name.as_ref().map_or("program", ClusterName::as_str);
    // Short, because paths of sockets are.
    let name = format!("{}-v", &name[..name.len().min(20)]);
    let name =
        name.parse().map_err(|error| Failure::new(Exit::Usage, anyhow::Error::new(error)))?;
    let mut proof = spec.clone();
    proof.engine = Some(EngineKind::Native);
    proof.name = Some(name);
    proof.verify = Some(true);
    proof.command = Default::default();
    // The program's own plan is held to it.
    proof.strict = None;
    proof.supervision.audit = None;
    Ok(proof)
}

/// On a GPU for one process at a time no second one can open the first one's memory.
fn refuse_exclusive(plan: &Plan, machine: Option<&Topology>) -> Result<(), Failure> {
    let gpus = machine.iter().flat_map(|machine| &machine.gpus);
    let exclusive = gpus.filter(|gpu| gpu.compute_mode == Some(ComputeMode::ExclusiveProcess));
    let planned = |index| {
        plan.workers.iter().any(|worker| worker.gpu.as_ref().is_some_and(|gpu| gpu.index == index))
    };
    match exclusive.map(|gpu| gpu.index).find(|index| planned(*index)) {
        None => Ok(()),
        Some(index) => Err(Failure::new(
            Exit::Usage,
            anyhow::anyhow!(
                "GPU {index} is for one process at a time (exclusive), so its ways can't be verified"
            ),
        )
        .hint("nvidia-smi -c DEFAULT, or start the program without verification")),
    }
}
