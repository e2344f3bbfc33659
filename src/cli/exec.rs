//! `exec`: binds this process as the worker of its local rank, or of the GPU that it has, then
//! executes a program; or says how, for a process that binds itself (Python's `bind`).
//!
//! *Invariant:* which GPUs a process sees is left to who has started it, where that has been said.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, parent_id};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::flags::{Asked, whole};
use super::run::{program_of, requested};
use super::{output, up};
use crate::cluster::{Prepared, command};
use crate::os::argument::decoded;
use crate::os::binding;
use crate::plan::{Binding, EnginePlan, ORDER, VISIBLE, WorkerGpu, WorkerPlan, worker_of_gpu};
use crate::spec::Request;
use crate::topology::{Note, Topology};

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
    /// in CUDA_VISIBLE_DEVICES, of several the one of the local rank, or the machine's only one
    #[arg(long, value_name = "GPU", conflicts_with_all = ["gpus", "n-workers"])]
    gpu: Option<String>,
    /// Print what would be done, for a process that does it itself; no program is executed
    #[arg(short, long, value_enum, conflicts_with = "command")]
    output: Option<Form>,
    /// The program and its arguments [default: command.argv of the spec]
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// How it is printed what would be done.
#[derive(ValueEnum, Clone, Copy, Debug)]
enum Form {
    /// JSON with a stable schema
    Json,
}

/// The JSON form.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    version: u32,
    /// The worker of the plan that the process becomes.
    worker: &'a str,
    gpu: &'a Option<WorkerGpu>,
    #[serde(flatten)]
    binding: &'a Binding,
    nics: Vec<String>,
    /// Variables to set.
    env: BTreeMap<String, String>,
    /// Whether it is a failure that something could not be done.
    strict: bool,
    notes: Vec<String>,
}

/// As which worker of a plan this process is bound.
enum Place {
    /// As that of its local rank, which this variable or flag tells.
    Rank { rank: u32, source: &'static str },
    /// As that of a GPU, as `CUDA_VISIBLE_DEVICES` names it.
    Gpu(String),
    /// As that of the only GPU, because this does not tell it.
    Only(command::LocalRankError),
}

impl Place {
    /// Its source if it was given on the command line.
    const GIVEN: &str = "--rank";

    fn of(arguments: &Arguments) -> Result<Self, Failure> {
        let launcher = match arguments.rank {
            Some(rank) => Ok((Self::GIVEN, rank)),
            None => command::local_rank(variable),
        };
        match arguments.gpu.as_deref() {
            Some("auto") => match variable(VISIBLE) {
                Some(mask) => Ok(Place::Gpu(one_of(&mask, launcher.ok())?)),
                // All are visible, so this is the one of its number.
                None => match launcher {
                    Err(error @ command::LocalRankError::Unknown) => Ok(Place::Only(error)),
                    // Of all GPUs, whichever of them the plan would leave out.
                    Ok((Self::GIVEN, rank)) => Ok(Place::Gpu(rank.to_string())),
                    launcher => Self::of_rank(launcher),
                },
            },
            Some(_) if arguments.rank.is_some() => {
                let error = anyhow::anyhow!("--rank is given, and --gpu names a GPU");
                Err(Failure::new(Exit::Usage, error).hint("--gpu auto takes the one of the rank"))
            }
            Some(gpu) => Ok(Place::Gpu(gpu.to_owned())),
            None => Self::of_rank(launcher),
        }
    }

    fn of_rank(
        launcher: Result<(&'static str, u32), command::LocalRankError>,
    ) -> Result<Self, Failure> {
        match launcher {
            Ok((source, rank)) => Ok(Place::Rank { rank, source }),
            Err(error) => Err(unknown(error)),
        }
    }

    /// The plan: for a GPU that was named, of the whole machine, so that its NIC is the one that it
    /// has among all.
    fn prepare(&self, request: &Request) -> Result<Prepared, Failure> {
        match self {
            Place::Rank { .. } => up::prepare(request),
            Place::Gpu(_) | Place::Only(_) => up::prepare_whole(request),
        }
    }

    fn worker<'a>(&self, prepared: &'a Prepared) -> Result<&'a WorkerPlan, Failure> {
        let workers = &prepared.launched.workers;
        let (found, what) = match self {
            Place::Only(error) => match workers.as_slice() {
                [only] => return Ok(only),
                _ => return Err(unknown(error.clone())),
            },
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
            Place::Gpu(_) | Place::Only(_) => command::local_rank(variable)
                .map_or_else(|_| BTreeMap::new(), |it| told(it.1, false)),
        }
    }
}

fn unknown(error: command::LocalRankError) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Usage, error).maybe_hint(hint)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The GPU of this process in a mask: the only one, or the one of its local rank.
fn one_of(mask: &str, launcher: Option<(&'static str, u32)>) -> Result<String, Failure> {
    let entries: Vec<&str> = mask.split(',').map(str::trim).collect();
    let at = match (entries.len(), launcher) {
        // What was given is meant, whoever has started this.
        (_, Some((Place::GIVEN, rank))) => usize::try_from(rank).ok(),
        (1, _) => Some(0),
        (_, Some((_, rank))) => usize::try_from(rank).ok(),
        (_, None) => None,
    };
    let entry = at.and_then(|at| entries.get(at)).filter(|entry| !entry.is_empty());
    entry.map(|entry| (*entry).to_owned()).ok_or_else(|| {
        let which = launcher.map_or_else(
            || "no launcher says a rank".to_owned(),
            |(_, rank)| format!("the local rank is {rank}"),
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

/// The note that a number may mean another GPU to CUDA.
fn order_note(place: &Place, machine: Option<&Topology>) -> Option<String> {
    let Place::Gpu(entry) = place else { return None };
    let is_number = entry.bytes().all(|byte| byte.is_ascii_digit());
    let models = machine.iter().flat_map(|machine| machine.gpus.iter().map(|gpu| &gpu.name));
    let alike = models.collect::<std::collections::BTreeSet<_>>().len() < 2;
    let unclear = is_number && !alike && variable(ORDER).as_deref() != Some("PCI_BUS_ID");
    unclear.then(|| {
        format!(
            "GPU {entry} is taken for NVML's; CUDA counts the fastest first unless \
             {ORDER}=PCI_BUS_ID"
        )
    })
}

/// The variables that the process gets.
fn variables(place: &Place, prepared: &Prepared, worker: &WorkerPlan) -> BTreeMap<String, String> {
    let mut env = worker.env.clone();
    if let Place::Gpu(_) = place {
        if variable(VISIBLE).is_some() {
            env.remove(VISIBLE);
            env.remove(ORDER);
        } else if let Some(mask) = env.get_mut(VISIBLE) {
            *mask = rotated(mask, |one| {
                worker_of_gpu(&prepared.launched, one).is_some_and(|it| it.name == worker.name)
            });
        }
    }
    env
}

/// Binds this process and executes the program, which returns only on failure; or prints how.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let request = requested(&arguments.asked, &arguments.command, |_| ())?;
    if !request.spec.programs().is_empty() {
        let error =
            anyhow::anyhow!("the launcher says what each rank runs, not 'command.programs'");
        let hint = "write each program's command after 'cuda-cluster exec --' for the launcher";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    if arguments.output.is_none() {
        program_of(&request)?;
    }
    if request.spec.verify == Some(true) {
        let error = anyhow::anyhow!("each process starts alone here, so no pair can be verified");
        let hint = "before the job: cuda-cluster up --verify --detach, then cuda-cluster down";
        return Err(Failure::new(Exit::Usage, error).hint(hint));
    }
    let place = Place::of(arguments)?;
    let prepared = place.prepare(&request)?;
    let order = order_note(&place, prepared.machine.as_ref());
    let worker = place.worker(&prepared)?;
    let mut env = variables(&place, &prepared, worker);
    if arguments.output.is_some() {
        let planned = prepared.plan.notes.iter().chain(&prepared.notes).map(Note::to_string);
        output::print_json(&Shown {
            version: 1,
            worker: &worker.name,
            gpu: &worker.gpu,
            binding: &worker.binding,
            nics: worker.nics.iter().map(ToString::to_string).collect(),
            env,
            strict: prepared.plan.requirements.strict,
            notes: planned.chain(order).collect(),
        })?;
        return Ok(Exit::Done);
    }
    if let Some(note) = order {
        output::note(&note);
    }
    // A process of a pool that a launcher has started is not the launcher's rank.
    if arguments.gpu.is_none() || arguments.rank.is_none() {
        env.extend(place.told(&prepared));
    }
    bind(&worker.binding, prepared.plan.requirements.strict)?;
    Err(become_program(&request, &env))
}

fn bind(binding: &Binding, strict: bool) -> Result<(), Failure> {
    let bound = binding::apply(binding);
    if !bound.notes.is_empty() && strict {
        let error = anyhow::anyhow!("under --strict: {}", bound.notes.join("; "));
        return Err(Failure::new(Exit::Failed, error));
    }
    for note in &bound.notes {
        output::note(note);
    }
    Ok(())
}

/// Executes the program; the failure, if it can't be.
fn become_program(request: &Request, env: &BTreeMap<String, String>) -> Failure {
    let mut words = request.spec.command.argv.iter().flatten().map(|text| decoded(text));
    let Some(program) = words.next() else {
        return Failure::new(Exit::Usage, anyhow::anyhow!("there is no program to become"));
    };
    // Otherwise the program would inherit that they are ignored.
    crate::os::default_ignored_signals();
    let error = std::process::Command::new(&program).args(words).envs(env).exec();
    let exit = match error.kind() {
        std::io::ErrorKind::NotFound => Exit::Program(127),
        _ => Exit::Program(126),
    };
    let what = format!("cannot execute {}", program.display());
    Failure::new(exit, anyhow::Error::new(error).context(what))
}
