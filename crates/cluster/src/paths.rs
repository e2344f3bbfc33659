//! Checks that the directories and files named in a plan are usable before anything is started;
//! otherwise a worker would notice only when it spills for the first time.
//!
//! *Invariant:* a check leaves nothing behind: it removes whatever it has created.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::{EngineKind, EnginePlan, Plan};
use cuda_cluster_model::spec::{self, ClusterSpec};

/// A path that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum PathError {
    /// A directory that can't be created, or written to.
    #[error("'{key}': nothing can be written into {}", path.display())]
    Directory {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A program that can't be run.
    #[error("'{key}': {} cannot be run", path.display())]
    Program {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file that can't be read.
    #[error("'{key}': {} cannot be read", path.display())]
    Unreadable {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file that can't be written.
    #[error("'{key}': {} cannot be written", path.display())]
    File {
        /// The key of the spec that names it.
        key: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl PathError {
    /// The key of the spec that names the path.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Directory { key, .. }
            | Self::Program { key, .. }
            | Self::Unreadable { key, .. }
            | Self::File { key, .. } => key,
        }
    }

    /// What the user can do, in one sentence.
    pub fn hint(&self) -> String {
        match self {
            Self::Directory { .. } => "name a directory that is yours, or one that can be made",
            Self::Program { .. } => "name a program that is there and that you may execute",
            Self::Unreadable { .. } => {
                "name a file that you may read; a relative path is below the spec file's directory, or \
                 with a flag below the current one"
            }
            Self::File { .. } => "name a file in a directory that is there and yours",
        }
        .to_owned()
    }
}

/// What a path is for.
#[derive(Clone, Copy)]
enum Use {
    Read,
    Write,
    WriteInto,
    Run,
}

/// A key of the spec, what its path is for, and the path.
type Named<'a> = (&'static str, Use, Option<&'a Path>);

/// Checks all paths that the plan's processes will use.
///
/// # Errors
/// If one of them can't be used.
pub(super) fn check(plan: &Plan) -> Result<(), PathError> {
    named(plan).into_iter().try_for_each(usable)
}

fn named(plan: &Plan) -> Vec<Named<'_>> {
    let mut named: Vec<Named<'_>> =
        vec![("worker.pid_file", Use::Write, plan.supervision.pid_file.as_deref())];
    match &plan.engine {
        EnginePlan::Command(command) => {
            named.push(("command.output_dir", Use::WriteInto, command.output_dir.as_deref()));
        }
        EnginePlan::Native(native) => named.extend([
            ("worker.local_directory", Use::WriteInto, native.local_directory.as_deref()),
            ("native.program", Use::Run, native.program.as_deref()),
        ]),
        EnginePlan::Dask(dask) => {
            let pools = plan.workers.iter().filter_map(|worker| worker.rmm.as_ref());
            let logs = pools.filter_map(|rmm| rmm.log_directory.as_deref()).next();
            // What another machine hands on is written when the cluster starts.
            let carried = Paths::of(&plan.name).carried();
            let tls = dask.tls.as_ref().filter(|tls| !Path::new(&tls.key).starts_with(&carried));
            named.extend([
                ("worker.local_directory", Use::WriteInto, dask.local_directory.as_deref()),
                ("scheduler.file", Use::Write, dask.scheduler_file.as_deref()),
                ("rmm.log_directory", Use::WriteInto, logs.map(Path::new)),
                ("tls.ca_file", Use::Read, tls.map(|tls| Path::new(&tls.ca_file))),
                ("tls.cert", Use::Read, tls.map(|tls| Path::new(&tls.cert))),
                ("tls.key", Use::Read, tls.map(|tls| Path::new(&tls.key))),
            ]);
        }
    }
    named
}

/// The paths of a spec that this machine's processes could not use. Paths of another engine's
/// sections are left out.
pub fn unusable_paths(spec: &ClusterSpec) -> Vec<PathError> {
    let native = &spec.native;
    let mut named: Vec<Named<'_>> = vec![
        ("worker.pid_file", Use::Write, path(&spec.worker.pid_file)),
        (
            "ucx.library",
            Use::Read,
            path(&spec.ucx.library).filter(|it| it.components().count() > 1),
        ),
    ];
    let engine = spec.engine.unwrap_or_default();
    if engine != EngineKind::Command {
        let local = path(&spec.worker.local_directory);
        named.push(("worker.local_directory", Use::WriteInto, local));
    }
    match engine {
        EngineKind::Native => named.push(("native.program", Use::Run, path(&native.program))),
        EngineKind::Command => {
            let program = spec.command.argv.as_deref().and_then(<[_]>::first).map(Path::new);
            named.push(("command.argv", Use::Run, program));
            let several = spec.programs().iter().filter_map(|one| one.argv.as_deref()?.first());
            named.extend(several.map(|one| ("command.programs", Use::Run, Some(Path::new(one)))));
            named.push(("command.output_dir", Use::WriteInto, path(&spec.command.output_dir)));
        }
        EngineKind::Dask => {
            named.extend([
                ("scheduler.file", Use::Write, path(&spec.scheduler.file)),
                ("rmm.log_directory", Use::WriteInto, path(&spec.rmm.log_directory)),
                ("tls.ca_file", Use::Read, path(&spec.tls.ca_file)),
                ("tls.cert", Use::Read, path(&spec.tls.cert)),
                ("tls.key", Use::Read, path(&spec.tls.key)),
                ("dask.python", Use::Run, path(&spec.dask.python)),
            ]);
            let files = spec.dask.preload.iter().flatten().filter(|one| spec::is_file(one));
            named.extend(files.map(|file| ("dask.preload", Use::Read, Some(Path::new(file)))));
        }
    }
    named.into_iter().filter_map(|one| usable(one).err()).collect()
}

fn path(text: &Option<String>) -> Option<&Path> {
    text.as_deref().map(Path::new)
}

fn usable((key, purpose, path): Named<'_>) -> Result<(), PathError> {
    let Some(path) = path else { return Ok(()) };
    match purpose {
        Use::Read => readable(key, path),
        Use::Write => file(key, path),
        Use::WriteInto => directory(key, path),
        Use::Run => program(key, path),
    }
}

/// Opens a file for reading. A pipe is not opened, because that waits for its writer.
fn readable(key: &'static str, path: &Path) -> Result<(), PathError> {
    let looked = fs::metadata(path).and_then(|there| match there.file_type() {
        kind if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        kind if kind.is_file() => fs::File::open(path).map(drop),
        _ => Ok(()),
    });
    looked.map_err(|source| PathError::Unreadable { key, path: path.to_owned(), source })
}

/// Creates a directory with its parents, writes into it, and removes everything again.
fn directory(key: &'static str, path: &Path) -> Result<(), PathError> {
    let above = path.ancestors().filter(|part| !part.as_os_str().is_empty());
    let missing: Vec<&Path> = above.take_while(|part| !part.exists()).collect();
    let written = fs::create_dir_all(path).and_then(|()| write_in(path));
    for made in missing {
        // Removal fails if it was not created, or if it contains files of others.
        let _ = fs::remove_dir(made);
    }
    written.map_err(|source| PathError::Directory { key, path: path.to_owned(), source })
}

/// Creates a file with a unique name, and removes it.
fn write_in(directory: &Path) -> io::Result<()> {
    let trial = directory.join(format!(".cuda-cluster-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&trial)?;
    fs::remove_file(&trial)
}

/// Checks that a file could be written, without changing an existing one.
fn file(key: &'static str, path: &Path) -> Result<(), PathError> {
    let looked = match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => OpenOptions::new().append(true).open(path).map(drop),
        Err(_) => {
            let above = path.parent().filter(|above| !above.as_os_str().is_empty());
            write_in(above.unwrap_or(Path::new(".")))
        }
    };
    looked.map_err(|source| PathError::File { key, path: path.to_owned(), source })
}

/// The place of a program: of a mere name, the first in `PATH` that is there.
fn find(program: &Path) -> io::Result<PathBuf> {
    if program.components().count() > 1 || program.is_absolute() {
        return Ok(program.to_owned());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|it| it.join(program)).find(|it| it.is_file());
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it is not in PATH"))
}

/// Checks that a program could be run. One without a slash is looked up in `PATH`.
fn program(key: &'static str, path: &Path) -> Result<(), PathError> {
    let runs = |there: fs::Metadata| there.is_file() && there.permissions().mode() & 0o111 != 0;
    let looked = match find(path).and_then(fs::metadata).map(runs) {
        Ok(true) => return Ok(()),
        Ok(false) => io::ErrorKind::PermissionDenied.into(),
        Err(error) => error,
    };
    Err(PathError::Program { key, path: path.to_owned(), source: looked })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a directory");
        directory("worker.local_directory", &folder.path().join("a/b/c")).expect("it can be made");
        file("scheduler.file", &folder.path().join("address.json")).expect("it can be written");
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 0);
    }

    #[test]
    fn a_plan_is_checked_for_the_paths_that_its_spec_is_checked_for() {
        let keys = "version: 1\nworker: {pid_file: /proc/x, local_directory: /proc/x}\n";
        let dask = "engine: dask\nscheduler: {file: /proc/x}\ntls: {ca_file: /x, cert: /x, key: /x}\n\
                    rmm: {pool_size: 1GB, log_directory: /proc/x}\n";
        let native = "native: {program: /proc/x}\n";
        for (more, count) in [(native, 3), (dask, 7), ("engine: command\n", 1)] {
            let spec = spec::parse(&format!("{keys}{more}"), "test").expect(more);
            let of_spec: Vec<&str> = unusable_paths(&spec).iter().map(PathError::key).collect();
            assert_eq!(of_spec.len(), count, "{of_spec:?}");
            let request = spec::Request::of(spec).expect(more);
            let machine = cuda_cluster_model::topology::builtin("dgx-1-v100").expect("a machine");
            let machine = cuda_cluster_model::topology::parse(machine).expect("a machine");
            let plan = cuda_cluster_model::plan::plan(&machine, &request, &Default::default())
                .expect(more);
            let of_plan = named(&plan).into_iter().filter_map(|one| usable(one).err());
            let of_plan: Vec<&str> = of_plan.map(|error| error.key()).collect();
            assert_eq!(of_plan, of_spec, "{more}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_named_with_its_cause() {
        let folder = tempfile::tempdir().expect("a directory");
        let taken = folder.path().join("file");
        fs::write(&taken, "kept").expect("written");
        for path in [Path::new("/proc/nope"), &taken, &taken.join("below")] {
            let error = directory("worker.local_directory", path).expect_err("no directory");
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
        assert!(file("scheduler.file", folder.path()).is_err(), "a directory is no file");
        assert!(file("scheduler.file", &folder.path().join("no/file")).is_err());
        file("scheduler.file", &taken).expect("a file that is there can be written again");
        assert_eq!(fs::read_to_string(&taken).expect("still there"), "kept");
    }
}
