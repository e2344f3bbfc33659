//! What a process of the native engine is given at its start: environment, run directory, status
//! pipe.
//!
//! Does not change any of it.
//!
//! *Invariant:* READY is written at most once, and a failed start writes its reason.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use tokio::net::UnixStream;

use super::error::Error;
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::{EnginePlan, NativePlan, Plan, WorkerPlan};
use cuda_cluster_wire::secret::Secret;
use cuda_cluster_wire::status::{
    self, Condition, FD_VARIABLE, PROCESS_VARIABLE, PeerLanes, RUN_DIRECTORY_VARIABLE, Status,
};

/// What this process was given at its start.
pub(super) struct LaunchEnvironment {
    /// This process's name.
    pub(super) name: String,
    /// The plan that it belongs to; for a worker, what workers read of it.
    pub(super) plan: Plan,
    /// The part of the plan that is for this engine.
    pub(super) native: NativePlan,
    /// What all processes of the cluster know.
    pub(super) secret: Secret,
    /// The files of the cluster's run directory.
    pub(super) paths: Paths,
}

impl LaunchEnvironment {
    /// Reads the environment and the run directory, of which `plan` names the file.
    pub(super) fn read(plan: impl FnOnce(&Paths) -> PathBuf) -> Result<Self, Error> {
        let directory = PathBuf::from(
            std::env::var_os(RUN_DIRECTORY_VARIABLE)
                .ok_or(Error::Variable { variable: RUN_DIRECTORY_VARIABLE })?,
        );
        let name = std::env::var(PROCESS_VARIABLE)
            .map_err(|_| Error::Variable { variable: PROCESS_VARIABLE })?;
        let paths = Paths::at(&directory);
        let path = plan(&paths);
        let text = fs::read_to_string(&path)
            .map_err(|source| Error::Read { path: path.clone(), source })?;
        let plan = Plan::parse(&text).map_err(|source| Error::Plan { path, source })?;
        let native = match &plan.engine {
            EnginePlan::Native(native) => native.clone(),
            other => return Err(Error::Engine { engine: other.kind() }),
        };
        Ok(Self { name, plan, native, secret: paths.read_secret()?, paths })
    }
}

/// The connection to the supervisor. Without a supervisor it writes nothing.
pub(super) struct StatusPipe {
    /// The pipe, until READY.
    file: Option<File>,
    /// After READY: the socket over which the supervisor asks and is answered.
    questions: Option<UnixStream>,
    /// Whether the supervisor knows that the process has begun a task.
    works: bool,
}

impl StatusPipe {
    /// Opens the pipe that the environment names.
    pub(super) fn open() -> Result<Self, Error> {
        let variable = FD_VARIABLE;
        let Some(number) = std::env::var_os(variable) else {
            return Ok(Self { file: None, questions: None, works: false });
        };
        let number: i32 = number
            .to_str()
            .and_then(|number| number.parse().ok())
            .ok_or(Error::Variable { variable })?;
        let own = process::inherited(number).map_err(|_| Error::Variable { variable })?;
        Ok(Self { file: Some(File::from(own)), questions: None, works: false })
    }

    /// Reports what the process is doing.
    pub(super) fn step(&mut self, step: impl Into<String>) {
        let step = step.into();
        tracing::debug!(step, "starting");
        self.write(&Status::Step { step });
    }

    /// Reports something that the user should know.
    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.write(&Status::Note { text: text.into() });
    }

    /// Reports that the process is ready. Must be called inside a tokio runtime.
    pub(super) fn ready(
        &mut self,
        address: Option<String>,
        peers: Vec<PeerLanes>,
        ucx: Option<String>,
        condition: Condition,
    ) {
        self.write(&Status::Ready { address, peers, ucx, condition });
        let Some(file) = self.file.take() else { return };
        let socket = std::os::unix::net::UnixStream::from(OwnedFd::from(file));
        // If a person started this process by hand, it is no socket, and nobody asks.
        if socket.local_addr().is_ok() && socket.set_nonblocking(true).is_ok() {
            self.questions = UnixStream::from_std(socket).ok();
        }
    }

    /// Waits until the supervisor asks whether this process answers; without a supervisor, forever.
    pub(super) async fn asked(&mut self) {
        let mut bytes = [0; 64];
        while let Some(questions) = &self.questions {
            let read = match questions.readable().await {
                Ok(()) => questions.try_read(&mut bytes),
                Err(error) => Err(error),
            };
            match read {
                Ok(1..) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => self.questions = None,
            }
        }
        std::future::pending().await
    }

    /// Reports, once, that the process begins to run tasks.
    pub(super) fn works(&mut self) {
        if let Some(questions) = self.questions.as_ref().filter(|_| !self.works) {
            self.works = true;
            // As above: one line, for which there is room.
            let _ = questions.try_write(status::encode(&Status::Working).as_bytes());
        }
    }

    /// Answers the supervisor.
    pub(super) fn answer(&self, condition: Condition) {
        if let Some(questions) = &self.questions {
            // There is room for one answer to each question. If the supervisor is gone, this
            // process ends too.
            let _ = questions.try_write(status::encode(&Status::Alive { condition }).as_bytes());
        }
    }

    /// Reports why the process cannot start, or cannot continue.
    pub(super) fn failed(&mut self, reason: String) {
        let failed = Status::Failed { reason };
        if let Some(questions) = self.questions.take() {
            // The event loop may be gone already. The socket has room for this, unless the
            // supervisor stopped reading.
            let _ = nix::unistd::write(&questions, status::encode(&failed).as_bytes());
        }
        self.write(&failed);
        self.file = None;
    }

    fn write(&mut self, status: &Status) {
        if let Some(file) = &mut self.file {
            // If the supervisor is gone, this process ends too, and there is nobody to tell.
            let _ = file.write_all(status::encode(status).as_bytes());
        }
    }
}

/// Sends log lines to standard error, which the supervisor records.
pub(super) fn log_to_standard_error() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CUDA_CLUSTER_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // This fails only if called twice in one process; then the first call stays in effect.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .try_init();
}

/// What a planned worker promises to tasks: what the spec says, and one `GPU` if it has one.
pub(super) fn resources(native: &NativePlan, worker: Option<&WorkerPlan>) -> BTreeMap<String, u64> {
    let gpus = worker.filter(|worker| worker.gpu.is_some()).map(|_| ("GPU".to_owned(), 1));
    let mut resources = native.resources.clone();
    resources.extend(gpus.filter(|_| !resources.contains_key("GPU")));
    resources
}

/// Random bytes from the system.
pub(super) fn random<const LENGTH: usize>() -> Result<[u8; LENGTH], getrandom::Error> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}
