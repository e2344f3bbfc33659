//! Starts a plan: in this process, or in a supervisor process of its own.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

use super::launch::{LaunchError, Surroundings, launch};
use crate::engine::command;
use crate::os::run_directory::{RunDirectory, RunDirectoryError};
use crate::plan::{Here, Plan, adapt_to_here};
use crate::supervise::{Cause, ClusterState, Options, Outcome, StartError, Supervisor};
use crate::topology::Note;

/// Bytes of the cluster's secret, written as twice as many hexadecimal digits.
const SECRET_BYTES: usize = 32;

/// Why a cluster could not begin to start.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The run directory cannot be had.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The plan's engine cannot be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The supervisor could not begin.
    #[error(transparent)]
    Supervisor(#[from] StartError),
    /// The system has no randomness for the secret.
    #[error("cannot make a secret: {0}")]
    Secret(getrandom::Error),
    /// There is no port for rank 0 of the command engine.
    #[error("there is no free port for rank 0 to listen on")]
    Rendezvous(#[source] std::io::Error),
    /// The plan has no text form.
    #[error("cannot write the plan as JSON")]
    Plan(#[source] serde_json::Error),
    /// The supervisor process could not be started.
    #[error("cannot start a supervisor process from {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The supervisor process ended without a word.
    #[error("the supervisor process ended before it could report ({status})")]
    Silent {
        /// Its exit.
        status: String,
    },
    /// The supervisor process refused.
    #[error("{message}")]
    Refused {
        /// Its words.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
}

impl UpError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            UpError::RunDirectory(error) => error.hint(),
            UpError::Supervisor(error) => error.hint(),
            UpError::Launch(error) => error.hint(),
            UpError::Refused { hint, .. } => hint.clone(),
            _ => None,
        }
    }
}

/// A plan, and the version of it that this machine can run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// As decided, for the machine that it was decided for. What is shown.
    pub plan: Plan,
    /// What the processes get: the same, but for a simulated machine's plan.
    pub launched: Plan,
    /// How the two differ.
    pub notes: Vec<Note>,
    /// Whether the command engine's ranks are expected to end; their logs then stay for whoever
    /// asked for that, who removes the run directory.
    pub to_completion: bool,
}

impl Prepared {
    /// A plan for this machine.
    pub fn here(plan: Plan) -> Self {
        Self { launched: plan.clone(), plan, notes: Vec::new(), to_completion: false }
    }

    /// A plan for another machine, cut down to what this one has.
    pub fn simulated(plan: Plan, here: &Here) -> Self {
        let (launched, notes) = adapt_to_here(&plan, here);
        Self { plan, launched, notes, to_completion: false }
    }
}

/// Starts a plan in this process, which becomes the supervisor and must outlive the cluster.
///
/// The run directory holds `plan.json` and `secret` before the first process starts. Call it inside
/// a tokio runtime, in a process whose children are all its own: the supervisor reaps them.
///
/// # Errors
/// If the name is taken, or the supervisor cannot begin.
pub async fn start(prepared: &Prepared, program: &Path) -> Result<Supervisor, UpError> {
    let Prepared { plan, launched, to_completion, .. } = prepared;
    let rendezvous = command::rendezvous(None).map_err(UpError::Rendezvous)?;
    let directory = RunDirectory::acquire(&plan.name)?;
    let paths = directory.paths();
    let around = Surroundings { program, paths, rendezvous, to_completion: *to_completion };
    let launch = match launch(launched, around).await {
        Ok(launch) => launch,
        Err(error) => {
            directory.remove()?;
            return Err(error.into());
        }
    };
    let text = serde_json::to_vec_pretty(plan).map_err(UpError::Plan)?;
    directory.write_private(&directory.paths().plan(), &text)?;
    directory.write_private(&directory.paths().secret(), secret()?.as_bytes())?;
    let options =
        Options { helper: program.to_owned(), keep: *to_completion, ..Options::default() };
    Ok(Supervisor::start(launch, directory, options).await?)
}

fn secret() -> Result<String, UpError> {
    let mut bytes = [0u8; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(UpError::Secret)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What a detached supervisor tells whoever started it, a JSON line each, until READY or the end.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The state changed.
    State(Box<ClusterState>),
    /// It could not begin.
    Refused {
        /// The error with its causes.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
    /// It ended instead of becoming READY.
    Ended {
        /// Whether time ran out.
        late: bool,
        /// Why.
        cause: Option<Cause>,
    },
}

/// A supervisor process that is on its way to READY.
#[derive(Debug)]
pub struct Detached {
    child: Child,
    reports: BufReader<ChildStdout>,
}

impl Detached {
    /// Starts `program __supervise` in a session of its own, and hands it the prepared plan.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub async fn spawn(prepared: &Prepared, program: &Path) -> Result<Self, UpError> {
        let text = serde_json::to_vec(prepared).map_err(UpError::Plan)?;
        let failed = |source| UpError::Spawn { program: program.to_owned(), source };
        let mut child = Command::new(program)
            .arg("__supervise")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(&text).await.map_err(failed)?;
        }
        let reports =
            child.stdout.take().ok_or_else(|| failed(std::io::ErrorKind::Other.into()))?;
        Ok(Self { child, reports: BufReader::new(reports) })
    }

    /// Process id of the supervisor, while it lives.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The next report; `None` when there will be none: it is READY, or it has ended.
    ///
    /// # Errors
    /// If it could not begin, or died.
    pub async fn next(&mut self) -> Result<Option<Report>, UpError> {
        let mut line = String::new();
        let read = self.reports.read_line(&mut line).await;
        match read {
            Ok(length) if length > 0 => match serde_json::from_str(&line) {
                Ok(Report::Refused { message, hint }) => Err(UpError::Refused { message, hint }),
                Ok(report) => Ok(Some(report)),
                Err(error) => Err(UpError::Silent { status: error.to_string() }),
            },
            _ => match self.child.try_wait() {
                Ok(Some(status)) if !status.success() => {
                    Err(UpError::Silent { status: status.to_string() })
                }
                _ => Ok(None),
            },
        }
    }
}

impl From<Outcome> for Report {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::NotReady(cause) => Report::Ended { late: true, cause: Some(cause) },
            Outcome::Failed(cause) => Report::Ended { late: false, cause: Some(cause) },
            Outcome::Stopped { degraded } => Report::Ended { late: false, cause: degraded },
            Outcome::Finished => Report::Ended { late: false, cause: None },
        }
    }
}
