//! From a plan to the processes that carry it out. The only place that knows the engines' programs
//! and the supervisor's terms.

use std::path::Path;

use crate::plan::{Binding, EngineKind, Plan, WorkerPlan};
use crate::supervise::{Launch, ProcessGpu, ProcessSpec, ReadyWhen};

/// Name of the scheduler's process.
pub const SCHEDULER: &str = "scheduler";

/// Why a plan cannot be launched.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The engine is not there yet.
    #[error("the {engine} engine is not built into this version")]
    Engine {
        /// The engine.
        engine: EngineKind,
    },
}

/// The processes of a plan. `program` is a `cuda-cluster` binary, or one that embeds this crate.
///
/// # Errors
/// If the engine cannot be launched.
pub fn launch(plan: &Plan, program: &Path) -> Result<Launch, LaunchError> {
    if plan.engine != EngineKind::Native {
        return Err(LaunchError::Engine { engine: plan.engine });
    }
    let scheduler = plan.scheduler.as_ref().map(|scheduler| ProcessSpec {
        env: scheduler.env.clone(),
        ..native(program, SCHEDULER, "__scheduler", &scheduler.binding)
    });
    let worker = |worker: &WorkerPlan| ProcessSpec {
        env: worker.env.clone(),
        memory_limit_bytes: worker.memory_limit_bytes,
        gpu: worker.gpu.as_ref().map(|gpu| ProcessGpu {
            index: gpu.index.0,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci,
        }),
        ..native(program, &worker.name, "__worker", &worker.binding)
    };
    Ok(Launch {
        name: plan.name.clone(),
        engine: plan.engine,
        simulated: plan.machine.simulated,
        supervision: plan.supervision.clone(),
        strict: plan.requirements.strict,
        scheduler,
        workers: plan.workers.iter().map(worker).collect(),
        run_to_completion: false,
    })
}

fn native(program: &Path, name: &str, subcommand: &str, binding: &Binding) -> ProcessSpec {
    ProcessSpec {
        name: name.to_owned(),
        argv: vec![program.display().to_string(), subcommand.to_owned()],
        env: Default::default(),
        env_remove: Vec::new(),
        directory: None,
        binding: binding.clone(),
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
    }
}
