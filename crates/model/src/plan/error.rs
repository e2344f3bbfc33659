//! Errors of planning, and of reading a plan's text.
//!
//! A problem that has a way round is a note instead; see `Plan::notes`.
//!
//! *Invariant:* each error says what is missing, and its hint what to try.

use crate::spec::{EngineKind, SpecError};
use crate::text::ReadError;
use crate::text::did_you_mean;
use crate::topology::Note;
use crate::units::HumanBytes;

/// Why no plan can be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum PlanError {
    /// The machine has no NVIDIA GPU, or none that its source could see.
    #[error("{machine} has no NVIDIA GPU that could be seen{}", because(.notes))]
    NoGpus {
        /// The machine's name.
        machine: String,
        /// What the topology says about it.
        notes: Vec<Note>,
    },
    /// There are GPUs, but each was left out.
    #[error("none of the {present} GPUs may be used: {}", list(.rejected))]
    NoGpuLeft {
        /// How many GPUs the machine has.
        present: usize,
        /// Each GPU with the reason.
        rejected: Vec<String>,
    },
    /// A requested GPU does not exist.
    #[error("there is no GPU {name}; there are {}", list(.present))]
    NoSuchGpu {
        /// As it was asked for.
        name: String,
        /// What there is.
        present: Vec<String>,
    },
    /// A prefix of a UUID fits several GPUs.
    #[error("GPU {name} could be each of {}", list(.candidates))]
    AmbiguousGpu {
        /// As it was asked for.
        name: String,
        /// The UUIDs it fits.
        candidates: Vec<String>,
    },
    /// A GPU is named twice, by different names.
    #[error("GPU {name} is the same as {same}, which is named before")]
    GpuTwice {
        /// The second name.
        name: String,
        /// The first name.
        same: String,
    },
    /// More GPUs were requested than there are.
    #[error("{wanted} GPUs are asked for, and {usable} can be used")]
    TooFewGpus {
        /// Asked for.
        wanted: u32,
        usable: usize,
    },
    /// A requested NIC does not exist.
    #[error("there is no NIC {name}; there are {}", list(.present))]
    NoSuchNic {
        /// As it was asked for.
        name: String,
        /// What there is.
        present: Vec<String>,
        /// The most similar.
        nearest: Option<String>,
    },
    /// A requested NIC cannot carry traffic.
    #[error("NIC {name} cannot be used: {why}")]
    UnusableNic {
        /// As it was asked for.
        name: String,
        /// Why not.
        why: String,
    },
    /// Pinning was requested, but no NIC is usable.
    #[error("'ucx.net_devices: {mode}' needs a usable NIC, and {machine} has none{}", in_brackets(.rejected))]
    NoNic {
        /// `pin` or `stripe`.
        mode: String,
        /// The machine's name.
        machine: String,
        /// NICs with the reason why not.
        rejected: Vec<String>,
    },
    /// A device template cannot be filled in.
    #[error("worker {worker}: {problem}")]
    Template {
        worker: String,
        /// The template's error.
        problem: crate::spec::TemplateError,
    },
    /// There are fewer cores than processes that need cores of their own.
    #[error("{workers} processes are to have whole cores of their own, and there {} ({cpus})",
        if *cores == 1 { "is 1".to_owned() } else { format!("are {cores}") })]
    TooFewCores {
        workers: usize,
        cores: usize,
        /// The cores' CPUs.
        cpus: String,
    },
    /// A memory limit so low that the worker's process itself would exceed it.
    #[error(
        "worker {worker}: a memory limit of {} does not hold the worker itself; the least is {}",
        HumanBytes(*limit_bytes), HumanBytes(*least_bytes)
    )]
    MemoryLimit {
        worker: String,
        limit_bytes: u64,
        /// The least that is accepted.
        least_bytes: u64,
    },
    /// A port range is too small, or one address was given to several workers.
    #[error(transparent)]
    Spec(Box<SpecError>),
    /// The plan has notes, which `strict` refuses.
    #[error("{} {} under 'strict': {}", .notes.len(), if .notes.len() == 1 { "objection" } else { "objections" }, list(.notes))]
    Strict { notes: Vec<Note> },
}

fn list<T: ToString>(items: &[T]) -> String {
    let texts: Vec<String> = items.iter().map(T::to_string).collect();
    texts.join("; ")
}

fn in_brackets(items: &[String]) -> String {
    if items.is_empty() { String::new() } else { format!(" ({})", list(items)) }
}

fn because(notes: &[Note]) -> String {
    if notes.is_empty() { String::new() } else { format!(" ({})", list(notes)) }
}

impl From<SpecError> for PlanError {
    fn from(error: SpecError) -> Self {
        PlanError::Spec(Box::new(error))
    }
}

impl PlanError {
    /// What the user can try.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            PlanError::NoGpus { .. } => {
                "try another machine's plan with 'topology: dgx-h100' (run it with 'simulate: true'), \
                 'cuda-cluster doctor' for what is missing here, or 'gpus: none' with 'cpu_workers: 4'"
            }
            PlanError::NoGpuLeft { .. } => {
                "check CUDA_VISIBLE_DEVICES, or name GPUs with 'gpus' to use them all the same"
            }
            PlanError::NoSuchGpu { .. } | PlanError::AmbiguousGpu { .. } => {
                "'cuda-cluster topo' shows every GPU with its index, UUID and PCI address"
            }
            PlanError::GpuTwice { .. } => {
                "name it once; 'workers_per_gpu' gives several workers to one GPU"
            }
            PlanError::TooFewGpus { .. } => {
                "ask for fewer, or use 'workers_per_gpu' for several workers on one GPU"
            }
            PlanError::NoSuchNic { nearest: Some(name), .. } => {
                return Some(did_you_mean(name));
            }
            PlanError::NoSuchNic { .. } | PlanError::UnusableNic { .. } => {
                "'cuda-cluster topo' shows every NIC; 'ucx.net_devices: auto' takes the nearest usable"
            }
            PlanError::NoNic { .. } => {
                "use 'ucx.net_devices: auto', which leaves the choice to UCX then"
            }
            PlanError::Template { .. } => {
                "a template's numbers are 'gpu', 'rank' and 'numa': mlx5_{gpu//2}:1"
            }
            PlanError::TooFewCores { .. } => "use 'cpus: local', which lets workers share cores",
            PlanError::MemoryLimit { .. } => {
                "raise 'memory.limit', or leave it out: 'auto' is the worker's share of the memory"
            }
            PlanError::Spec(error) => return error.hint(),
            PlanError::Strict { .. } => "without 'strict' these are notes on a usable plan",
        };
        Some(hint.to_owned())
    }
}

/// Longest name of a process, in bytes; files and sockets are called by it.
pub(super) const LONGEST: usize = 64;

/// Why a plan can't be run by anybody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum Unsound {
    /// It has no worker.
    #[error("workers: a plan has at least one")]
    NoWorker,
    /// A worker's name is not one that files can have.
    #[error(
        "workers[{at}].name: {name:?} is not a name of at most {LONGEST} letters, digits, '.', '-' \
         and '_' that begins with a letter or digit"
    )]
    Name { at: usize, name: String },
    /// A worker has the name of another of the cluster's processes, or of its socket.
    #[error(
        "workers[{at}].name: {name} is not free: a cluster's own process or socket is called so"
    )]
    Reserved { at: usize, name: String },
    /// A worker has the name of another one.
    #[error("workers[{at}].name: another worker is called {name}, too")]
    Taken { at: usize, name: String },
    /// A worker runs a program that is none of the job's.
    #[error("workers[{at}].program: the job has no program {program:?}")]
    Program { at: usize, program: String },
    /// The workers are not in rank order.
    #[error("workers[{at}].rank: {rank} is not the worker's place, {at}")]
    Rank { at: usize, rank: u32 },
    /// A worker has no thread for tasks, or more than a machine can have.
    #[error(
        "workers[{at}].threads: {threads} is not meant; from 1 to {} are",
        crate::spec::MOST_THREADS
    )]
    Threads { at: usize, threads: u32 },
    /// Each rotation would rename so many files.
    #[error(
        "supervision.log_keep: more than {} are not meant, and {keep} are",
        crate::spec::MOST_LOGS
    )]
    Logs { keep: u32 },
    /// The engine needs a scheduler.
    #[error("scheduler: the {engine} engine needs one")]
    NoScheduler { engine: EngineKind },
    /// A text has a NUL byte, which no path, argument or variable can have.
    #[error("{key}: {text:?} has a NUL byte in it")]
    Nul { key: String, text: String },
}

/// Why a text is not a plan that can be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanTextError {
    /// It has another version.
    #[error("version {} is not {readable}, which this program reads", shown(*.found))]
    Version {
        /// Its version; `None` where it says none.
        found: Option<u64>,
        /// The version that this program reads.
        readable: u32,
    },
    /// A key or its value is wrong, or the text is neither JSON nor YAML.
    #[error(transparent)]
    Text(#[from] ReadError),
    /// It lacks what every plan has.
    #[error(transparent)]
    Unsound(#[from] Unsound),
}

fn shown(version: Option<u64>) -> String {
    version.map_or_else(|| "none".to_owned(), |version| version.to_string())
}

impl PlanTextError {
    /// What the user can do.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::Version { found: Some(_), .. } => "plan again with this version",
            Self::Version { found: None, .. } => "'cuda-cluster plan -o yaml > FILE' writes a plan",
            Self::Text(error) => match error.problem.hint() {
                Some(hint) => return hint,
                None => "'cuda-cluster plan -o yaml > FILE' writes a plan",
            },
            Self::Unsound(_) => "mend the plan, or 'cuda-cluster plan -o yaml > FILE' writes one",
        };
        hint.to_owned()
    }
}
