//! `exec`: binds this process as the worker of its local rank, or of the GPU that it has, then
//! executes a program.
//!
//! *Invariant:* which GPUs a process sees is left to who has started it, where that has been said.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, parent_id};

use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::{Asked, whole};
use super::run::requested;
use super::{output, up};
use crate::cluster::{Prepared, command};
use crate::os::argument::decoded;
use crate::os::binding;
use crate::plan::{EnginePlan, ORDER, VISIBLE, WorkerPlan, worker_of_gpu};
use crate::spec::Request;
use crate::topology::Topology;

/// Arguments of `exec`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  srun --ntasks-per-node=8 cuda-cluster exec -- ./solver
  CUDA_VISIBLE_DEVICES=3 cuda-cluster exec --gpu auto -- python serve.py")]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Local rank [default: from the launcher's environment]
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    rank: Option<u32>,
    /// GPU of this process, among all of the machine: a number, a UUID, or auto, which is the one
    /// in CUDA_VISIBLE_DEVICES, of several the one of the local rank
    #[arg(long, value_name = "GPU", conflicts_with_all = ["rank", "gpus", "n-workers"])]
    gpu: Option<String>,
    /// The program and its arguments [default: command.argv of the spec]
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// As which worker of a plan this process is bound.
enum Place {
    /// As that of its local rank, which this variable or flag tells.
    Rank { rank: u32, source: &'static str },
    /// As that of a GPU, as `CUDA_VISIBLE_DEVICES` names it.
    Gpu(String),
}

impl Place {
    /// Its source if it was given on the command line.
    const GIVEN: &str = "--rank";

    fn of(arguments: &Arguments) -> Result<Self, Failure> {
        if let Some(rank) = arguments.rank {
            return Ok(Place::Rank { rank, source: Self::GIVEN });
        }
        let launcher = command::local_rank(variable);
        match arguments.gpu.as_deref() {
            Some("auto") => match variable(VISIBLE) {
                Some(mask) => Ok(Place::Gpu(one_of(&mask, launcher.ok().map(|(_, rank)| rank))?)),
                // All are visible, so this is the one of its number.
                None => Self::of_rank(launcher),
            },
            Some(gpu) => Ok(Place::Gpu(gpu.to_owned())),
            None => Self::of_rank(launcher),
        }
    }

    fn of_rank(
        launcher: Result<(&'static str, u32), command::LocalRankError>,
    ) -> Result<Self, Failure> {
        match launcher {
            Ok((source, rank)) => Ok(Place::Rank { rank, source }),
            Err(error) => {
                let hint = error.hint();
                Err(Failure::new(Exit::Usage, error).maybe_hint(hint))
            }
        }
    }

    /// The plan: for a GPU that was named, of the whole machine, so that its NIC is the one that it
    /// has among all.
    fn prepare(&self, request: &Request) -> Result<Prepared, Failure> {
        match self {
            Place::Rank { .. } => up::prepare(request),
            Place::Gpu(_) => up::prepare_whole(request),
        }
    }

    fn worker<'a>(&self, prepared: &'a Prepared) -> Result<&'a WorkerPlan, Failure> {
        let workers = &prepared.launched.workers;
        let (found, what) = match self {
            Place::Rank { rank, source } => (
                workers.iter().find(|worker| worker.rank == *rank),
                format!("rank {rank} (from {source})"),
            ),
            Place::Gpu(entry) => {
                (worker_of_gpu(&prepared.launched, entry), format!("the GPU {entry:?}"))
            }
        };
        found.ok_or_else(|| {
            let error =
                anyhow::anyhow!("there is no worker for {what}: the plan has {}", workers.len());
            Failure::new(Exit::Usage, error).hint("cuda-cluster plan shows them")
        })
    }

    /// What the program is told of the other ranks, if a launcher has said something.
    fn told(&self, prepared: &Prepared) -> BTreeMap<String, String> {
        let languages = match &prepared.plan.engine {
            EnginePlan::Command(told) => told.bootstrap.as_slice(),
            EnginePlan::Native(_) | EnginePlan::Dask(_) => &[],
        };
        let told =
            |rank, given| command::told_by_launcher(rank, given, parent_id(), languages, variable);
        match self {
            Place::Rank { rank, source } => told(*rank, *source == Self::GIVEN),
            Place::Gpu(_) => command::local_rank(variable)
                .map_or_else(|_| BTreeMap::new(), |it| told(it.1, false)),
        }
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The GPU of this process in a mask: the only one, or the one of its local rank.
fn one_of(mask: &str, rank: Option<u32>) -> Result<String, Failure> {
    let entries: Vec<&str> = mask.split(',').map(str::trim).collect();
    let at = match (entries.len(), rank) {
        (1, _) => Some(0),
        (_, Some(rank)) => usize::try_from(rank).ok(),
        (_, None) => None,
    };
    let entry = at.and_then(|at| entries.get(at)).filter(|entry| !entry.is_empty());
    entry.map(|entry| (*entry).to_owned()).ok_or_else(|| {
        let which = rank.map_or_else(
            || "no launcher says a rank".to_owned(),
            |rank| format!("the local rank is {rank}"),
        );
        let error =
            anyhow::anyhow!("{VISIBLE}={mask} does not tell the GPU of this process: {which}");
        Failure::new(Exit::Usage, error).hint("cuda-cluster exec --gpu 3, or its UUID")
    })
}

/// The mask with the process's own entry first, which is then the program's device 0.
fn rotated(mask: &str, is_own: impl Fn(&str) -> bool) -> String {
    let mut entries: Vec<&str> = mask.split(',').collect();
    let at = entries.iter().position(|one| is_own(one)).unwrap_or(0);
    entries.rotate_left(at);
    entries.join(",")
}

/// Notes that a number may mean another GPU to CUDA.
fn note_order(place: &Place, machine: Option<&Topology>) {
    let Place::Gpu(entry) = place else { return };
    let is_number = entry.bytes().all(|byte| byte.is_ascii_digit());
    let models = machine.iter().flat_map(|machine| machine.gpus.iter().map(|gpu| &gpu.name));
    let alike = models.collect::<std::collections::BTreeSet<_>>().len() < 2;
    if is_number && !alike && variable(ORDER).as_deref() != Some("PCI_BUS_ID") {
        output::note(&format!(
            "GPU {entry} is taken for NVML's; CUDA counts the fastest first unless \
             {ORDER}=PCI_BUS_ID"
        ));
    }
}

/// Binds this process and executes the program; returns only on failure.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let request = requested(&arguments.asked, &arguments.command, |_| ())?;
    if request.spec.verify == Some(true) {
        let error = anyhow::anyhow!("each process starts alone here, so no pair can be verified");
        let hint = "before the job: cuda-cluster up --verify --detach, then cuda-cluster down";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    let place = Place::of(arguments)?;
    let prepared = place.prepare(&request)?;
    note_order(&place, prepared.machine.as_ref());
    let worker = place.worker(&prepared)?;
    let bound = binding::apply(&worker.binding);
    if !bound.notes.is_empty() && prepared.plan.requirements.strict {
        let error = anyhow::anyhow!("under --strict: {}", bound.notes.join("; "));
        return Err(Failure::new(Exit::Failed, error));
    }
    for note in &bound.notes {
        output::note(note);
    }
    let mut words = request.spec.command.argv.iter().flatten().map(|text| decoded(text));
    let program = words.next().ok_or_else(|| {
        Failure::new(Exit::Usage, anyhow::anyhow!("there is no program to become"))
    })?;
    let mut env = worker.env.clone();
    if let Place::Gpu(_) = &place {
        if variable(VISIBLE).is_some() {
            env.remove(VISIBLE);
            env.remove(ORDER);
        } else if let Some(mask) = env.get_mut(VISIBLE) {
            *mask = rotated(mask, |one| {
                worker_of_gpu(&prepared.launched, one).is_some_and(|it| it.name == worker.name)
            });
        }
    }
    env.extend(place.told(&prepared));
    // Returns only if the program cannot be executed.
    // Otherwise the program would inherit that they are ignored.
    crate::os::default_ignored_signals();
    let error = std::process::Command::new(&program).args(words).envs(&env).exec();
    let exit = match error.kind() {
        std::io::ErrorKind::NotFound => Exit::Program(127),
        _ => Exit::Program(126),
    };
    Err(Failure::new(
        exit,
        anyhow::Error::new(error).context(format!("cannot execute {}", program.display())),
    ))
}
