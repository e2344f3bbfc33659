//! Turns what is planned for one worker into a process.
//!
//! Knows neither how an engine names its program nor how many workers there are.
//!
//! *Invariant:* a process has the binding, the GPU and the limits that the plan has for it.

use std::path::Path;

use cuda_cluster_model::plan::{CommandPlan, Program, WorkerPlan};
use cuda_cluster_supervise::{ProcessGpu, ProcessSpec, ReadyWhen};

/// Variable for UCX's directory of shared memory files; all versions since 1.12 read it.
const UCX_FILES: &str = "UCX_POSIX_DIR";

/// A rank that has not been told its number, and runs this one of several programs. It does not
/// use the status pipe.
pub(crate) fn rank(
    planned: &WorkerPlan,
    told: &CommandPlan,
    program: Option<String>,
) -> ProcessSpec {
    let argv = told.argv_of(program.as_deref()).to_vec();
    let mut spec = ProcessSpec { ready: ReadyWhen::Executed, ..worker(planned, argv) };
    spec.program.role = program;
    spec
}

/// Names the directory for shared memory files, if there is one, to UCX and in these variables.
pub(crate) fn with_shared_memory(program: &mut Program, place: Option<&Path>, more: &[&str]) {
    let Some(place) = place else { return };
    // A value chosen by the caller is part of the plan, or inherited.
    let unset = more.iter().filter(|name| std::env::var_os(name).is_none());
    for name in [UCX_FILES].iter().chain(unset) {
        let place = || place.display().to_string();
        program.env.entry((*name).to_owned()).or_insert_with(place);
    }
}

/// A worker that runs this.
pub(crate) fn worker(planned: &WorkerPlan, argv: Vec<String>) -> ProcessSpec {
    let WorkerPlan { name, binding, env, memory_limit_bytes, gpu, .. } = planned.clone();
    ProcessSpec {
        name,
        program: Program { argv, env, binding, ..Program::default() },
        ready: ReadyWhen::Said,
        memory_limit_bytes,
        gpu: gpu.map(|gpu| ProcessGpu { index: gpu.index.0, uuid: gpu.uuid, pci: gpu.pci }),
        host: None,
        fork_server: None,
    }
}
