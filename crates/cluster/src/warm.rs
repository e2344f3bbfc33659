//! A process that imports once what the ranks of a program of Python need, and of which they are
//! forked.
//!
//! What it does is `python/cuda_cluster_fork`'s; here is only found out how the program is named.
//!
//! *Invariant:* a rank that can't be forked is executed with the same words.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::{CommandPlan, Program, WorkerPlan};
use cuda_cluster_model::spec::{Named, NotPython, PythonCommand};
use cuda_cluster_supervise::{ProcessSpec, ReadyWhen};

use crate::python::FORK;

/// The process's name.
const NAME: &str = "warm";

/// Why the ranks of a plan can't be forked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum WarmError {
    /// They don't run a program of Python's.
    #[error(transparent)]
    NotPython(#[from] NotPython),
    /// The run directory can't be written.
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, Serialize)]
struct Settings<'a> {
    socket: &'a Path,
    modules: &'a [String],
    kind: Named,
    at: usize,
    program: &'a str,
}

/// The process of which the ranks are forked, and the socket where it is asked to; `None` if none
/// was asked for. Its environment is what the ranks' have in common.
///
/// # Errors
/// If the ranks can't be forked, or the run directory can't be written.
pub(crate) fn prepare(
    told: &CommandPlan,
    workers: &[WorkerPlan],
    paths: &Paths,
) -> Result<Option<(ProcessSpec, PathBuf)>, WarmError> {
    if told.warm.is_empty() {
        return Ok(None);
    }
    // Of several programs, all have the same command.
    let argv = told.argv_of(told.programs.first().map(|program| program.name.as_str()));
    let command = PythonCommand::of(argv)?;
    let failed = |(path, source)| WarmError::Write { path, source };
    let socket = paths.socket(NAME);
    let settings = Settings {
        socket: &socket,
        modules: &told.warm,
        kind: command.kind,
        at: command.at,
        program: &argv[command.at],
    };
    let file = paths.root().join("warm.json");
    let text = serde_json::to_vec(&settings).map_err(io::Error::from);
    let written = text.and_then(|text| std::fs::write(&file, text));
    written.map_err(|error| failed((file.clone(), error)))?;
    let package = FORK.write(paths.root()).map_err(failed)?;
    let mut argv = vec![command.python.to_owned()];
    argv.extend(command.options.iter().cloned());
    argv.extend([package, file].map(|path| path.display().to_string()));
    let env = common(workers);
    let process = ProcessSpec {
        name: NAME.to_owned(),
        program: Program { argv, env, ..Program::default() },
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: None,
        host: None,
        fork_server: None,
    };
    Ok(Some((process, socket)))
}

/// The variables that all workers have with the same value: libraries read some while they are
/// imported.
fn common(workers: &[WorkerPlan]) -> BTreeMap<String, String> {
    let mut common = workers.first().map(|one| one.env.clone()).unwrap_or_default();
    common.retain(|name, value| workers.iter().all(|other| other.env.get(name) == Some(value)));
    common
}
