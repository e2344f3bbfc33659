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
use cuda_cluster_model::spec::{Named, PythonCommand};
use cuda_cluster_supervise::{ProcessSpec, ReadyWhen};

use crate::python::FORK;

/// The process's name.
const NAME: &str = "warm";

/// Checks that the ranks of a plan can be forked.
///
/// # Errors
/// With a reason.
pub(crate) fn check(told: &CommandPlan) -> Result<(), String> {
    if told.warm.is_empty() || told.argv.is_empty() || PythonCommand::of(&told.argv).is_some() {
        return Ok(());
    }
    Err(format!("{} is not a Python with a program, a module or a text of its own", told.argv[0]))
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
/// If the run directory can't be written.
pub(crate) fn prepare(
    told: &CommandPlan,
    workers: &[WorkerPlan],
    paths: &Paths,
) -> io::Result<Option<(ProcessSpec, PathBuf)>> {
    let Some(command) = PythonCommand::of(&told.argv).filter(|_| !told.warm.is_empty()) else {
        return Ok(None);
    };
    let socket = paths.socket(NAME);
    let settings = Settings {
        socket: &socket,
        modules: &told.warm,
        kind: command.kind,
        at: command.at,
        program: &told.argv[command.at],
    };
    let file = paths.root().join("warm.json");
    std::fs::write(&file, serde_json::to_vec(&settings)?)?;
    let package = FORK.write(paths.root()).map_err(|(path, error)| {
        io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
    })?;
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
