//! Prepares a plan of the Dask engine for its launch: Python, package, arguments.
//!
//! Starts no process except the Python that it asks for its packages.
//!
//! *Invariant:* whatever a plan asks for that this Python or machine cannot do is an error or a
//! note.

use std::collections::BTreeMap;

use super::settings::{self, Means};
use super::{DaskError, find, inspect, package, packages};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::probe::own_environment;
use cuda_cluster_model::plan::{DaskPlan, Plan};
use cuda_cluster_model::topology::Note;

/// Variables for a process's settings, which may have passwords in them: every user of the machine
/// can read arguments. Crash bundles mask what is called a secret.
const SETTINGS: &str = "CUDA_CLUSTER_SECRET_SETTINGS_";

/// Most bytes in one of them: Linux takes no string beyond 128 KiB.
const LONGEST: usize = 96 << 10;

/// One process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its variables in addition to those of the plan.
    pub env: BTreeMap<String, String>,
}

/// Everything that a launch needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// `None` if the workers join an existing scheduler.
    pub scheduler: Option<Process>,
    /// In rank order.
    pub workers: Vec<Process>,
    /// The socket of the fork server that creates the workers, if they are forked.
    pub fork_socket: Option<std::path::PathBuf>,
    /// What the plan asked for and could not be provided.
    pub notes: Vec<Note>,
}

/// Prepares a plan in a run directory.
///
/// # Errors
/// If no Python has the packages that the plan needs, or the run directory cannot be written.
pub async fn prepare(plan: &Plan, dask: &DaskPlan, paths: &Paths) -> Result<Prepared, DaskError> {
    let own = own_environment();
    let python = find(dask.python.as_deref(), own.as_deref(), |name| std::env::var_os(name))?;
    let inspection = inspect(&python.path).await?;
    packages::check(&python.path, &inspection, &packages::needs(plan, dask))?;

    let client = serde_json::json!(settings::client_env(plan, dask, paths)).to_string();
    let path = settings::client_file(paths);
    std::fs::write(&path, client).map_err(|source| DaskError::Write { path, source })?;

    let joins = dask.join.is_some();
    let means = Means {
        dask_cuda: packages::version(&inspection, "dask-cuda").is_some(),
        // The fork server runs beside the scheduler, or beside the first worker that joins an
        // existing one. That worker starts alone, so if it verified its links it would wait for the
        // others forever.
        fork: dask.fork && !(joins && plan.requirements.verify),
    };
    let program = package::write(paths.root())?;
    let process = |role: &str, settings: serde_json::Value| {
        let argv = [python.path.display().to_string(), program.display().to_string(), role.into()];
        Process { argv: argv.into(), env: variables(&settings.to_string()) }
    };
    let worker = |worker| {
        let settings = settings::worker(plan, dask, worker, means, paths);
        process("worker", serde_json::json!(settings))
    };
    let scheduler = settings::scheduler(plan, dask, means, paths);
    Ok(Prepared {
        scheduler: (!joins).then(|| process("scheduler", serde_json::json!(scheduler))),
        workers: plan.workers.iter().map(worker).collect(),
        fork_socket: means.fork.then(|| settings::fork_socket(paths)),
        notes: notes(plan, dask, means),
    })
}

/// Settings as variables, which `process.py` puts together again.
fn variables(settings: &str) -> BTreeMap<String, String> {
    let (mut parts, mut rest) = (BTreeMap::new(), settings);
    while !rest.is_empty() {
        let end = (0..=LONGEST.min(rest.len())).rfind(|at| rest.is_char_boundary(*at));
        let (part, others) = rest.split_at(end.unwrap_or(rest.len()));
        parts.insert(format!("{SETTINGS}{}", parts.len()), part.to_owned());
        rest = others;
    }
    parts
}

fn notes(plan: &Plan, dask: &DaskPlan, means: Means) -> Vec<Note> {
    let mut notes = Vec::new();
    let limited = plan.workers.iter().any(|worker| worker.device_memory_limit_bytes.is_some());
    if limited && !means.dask_cuda {
        let text = "device memory is not spilled: this Python has no dask-cuda";
        notes.push(Note::new("device.memory_limit", text));
    }
    if plan.machine.simulated && plan.workers.iter().any(|worker| worker.rmm.is_some()) {
        notes.push(Note::new("rmm", "left out: there is no GPU here to have a pool on"));
    }
    if plan.machine.simulated && dask.cudf_spill.is_some() {
        notes.push(Note::new("dask.enable_cudf_spill", "left out: there is no GPU here"));
    }
    if dask.protocol.starts_with("ucx") {
        let text =
            "UCX listens on every address of this machine, unencrypted, whatever the host is";
        notes.push(Note::new("dask.protocol", text));
    }
    notes
}
