//! Maintains the run directory of a running cluster: saves the state, and restores what was
//! removed, renamed or changed.
//!
//! Session managers remove `$XDG_RUNTIME_DIR` when a user logs out, and people clean up. The
//! processes keep running, but without the directory they would be unreachable.
//!
//! *Invariant:* a directory that another cluster has created in its place is not touched.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Actor;
use crate::core::{Event, Subject};
use cuda_cluster_machine::os::presence::Presence;
use cuda_cluster_machine::os::run_directory::{Paths, RunDirectory, RunDirectoryError};

/// Maximum size of files to keep a copy of.
const LARGEST: u64 = 4 << 20;

/// How often to try again what failed: whoever took the name may be gone, or the disk has room.
const AGAIN: Duration = Duration::from_secs(2);

/// Directories whose files nobody needs to go on.
const OF_RECORDS: [&str; 2] = ["logs", "crashes"];

/// Files that processes write, by which others find them.
const WRITTEN: [&str; 4] = ["scheduler.json", "scheduler-ports.json", "client.env", "client.json"];

/// The files that were in the run directory when the supervisor started: plan, secret, Dask's
/// package, and so on. They do not change while the cluster runs. And what processes have written
/// since, as it was last seen.
#[derive(Debug, Default)]
pub(super) struct InitialFiles {
    initial: Vec<(PathBuf, Vec<u8>)>,
    written: Vec<(PathBuf, Vec<u8>)>,
}

impl InitialFiles {
    /// Reads the files.
    pub(super) fn of(paths: &Paths) -> Self {
        let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
        let is_needed = |entry: &fs::DirEntry| {
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            is_directory && !OF_RECORDS.iter().any(|name| *name == entry.file_name())
        };
        let inner = entries(paths.root()).filter(is_needed).flat_map(|one| entries(&one.path()));
        let files = entries(paths.root()).chain(inner).filter(|entry| {
            entry.metadata().is_ok_and(|found| found.is_file() && found.len() <= LARGEST)
        });
        let is_written = |path: &Path| WRITTEN.iter().any(|name| path.ends_with(name));
        let read = |entry: fs::DirEntry| Some((entry.path(), fs::read(entry.path()).ok()?));
        let initial = files.filter_map(read).filter(|(path, _)| !is_written(path)).collect();
        let mut this = Self { initial, written: Vec::new() };
        this.look(paths);
        this
    }

    /// Looks what processes have written.
    pub(super) fn look(&mut self, paths: &Paths) {
        for path in WRITTEN.map(|name| paths.root().join(name)) {
            let Ok(content) = fs::read(&path) else { continue };
            self.written.retain(|(known, _)| *known != path);
            self.written.push((path, content));
        }
    }

    /// The names of those that are missing, or were changed.
    fn damaged(&self) -> Vec<&str> {
        let damaged = self
            .initial
            .iter()
            .filter(|(path, content)| fs::read(path).ok().as_deref() != Some(content.as_slice()));
        damaged.filter_map(|(path, _)| path.file_name()?.to_str()).collect()
    }

    fn put_back(&self, directory: &RunDirectory) -> Result<(), RunDirectoryError> {
        // Also writes files that still exist: a directory that was created again has no guardian in
        // its owners file.
        let lost = self.written.iter().filter(|(path, _)| !path.exists());
        self.initial.iter().chain(lost).try_for_each(|(path, content)| {
            if let Some(parent) = path.parent() {
                // Where it can't be made, the file can't be written.
                let _ = fs::DirBuilder::new().mode(0o700).create(parent);
            }
            directory.write_private(path, content)
        })
    }
}

impl Actor {
    /// Saves the state for queries after the cluster has ended.
    pub(super) fn save_state(&mut self) {
        let Some(directory) = self.directory.as_ref().filter(|one| one.is_in_place()) else {
            return;
        };
        self.initial_files.look(&self.paths);
        if let Ok(text) = serde_json::to_vec(&self.core.state()) {
            // A full disk must not stop the cluster; the records may still be complete.
            let _ = directory.write_private(&self.paths.state(), &text);
        }
    }

    /// Restores what was removed, renamed or changed.
    pub(super) fn restore_directory(&mut self) -> Option<Event> {
        self.restore_at = None;
        let moved = self.directory.as_ref().and_then(RunDirectory::move_back);
        if let Some(elsewhere) = moved {
            self.presence = Presence::watch(self.paths.root());
            // Its files may have been changed there.
            self.restore_at = Some(Instant::now());
            let elsewhere = elsewhere.display();
            let text =
                format!("the run directory was renamed to {elsewhere}, and has its name again");
            return self.noted(text, false);
        }
        let in_place = self.directory.as_ref().is_some_and(RunDirectory::is_in_place);
        let reachable = self.paths.control().exists() && self.paths.events().exists();
        let damaged = self.initial_files.damaged().join(", ");
        if in_place && reachable && damaged.is_empty() {
            // Somebody else may have put it right.
            self.not_back = None;
            return None;
        }
        let (what, restored) = match in_place && reachable {
            true => (format!("{damaged} of the run directory was changed"), self.put_back()),
            false => ("the run directory was removed".to_owned(), self.make_again(in_place)),
        };
        match restored {
            Ok(()) => self.noted(format!("{what}, and was made again"), false),
            Err(reason) => {
                self.restore_at = Some(Instant::now() + AGAIN);
                self.noted(format!("{what}, and is not back: {reason}"), true)
            }
        }
    }

    /// The event for what is new.
    fn noted(&mut self, text: String, lasts: bool) -> Option<Event> {
        let known = lasts && self.not_back.as_ref() == Some(&text);
        self.not_back = lasts.then(|| text.clone());
        (!known).then_some(Event::Noted { about: Subject::Directory, text, lasts })
    }

    fn put_back(&self) -> Result<(), String> {
        let Some(directory) = &self.directory else { return Ok(()) };
        self.initial_files.put_back(directory).map_err(|error| super::in_full(&error))
    }

    fn make_again(&mut self, in_place: bool) -> Result<(), String> {
        if !in_place {
            let base = self.paths.root().parent().ok_or("it has no parent")?;
            let directory = RunDirectory::acquire_below(base, &self.launch.name)
                .map_err(|error| super::in_full(&error))?;
            self.directory = Some(directory);
            self.presence = Presence::watch(self.paths.root());
        }
        self.put_back()?;
        self.journal.reopen(&self.paths);
        let socket = self.paths.control();
        // A socket without a listener would block the next one.
        let _ = fs::remove_file(&socket);
        self.control = (self.control.again(&self.paths, self.handle.clone()))
            .map_err(|error| format!("cannot listen on {}: {error}", socket.display()))?;
        self.save_state();
        Ok(())
    }
}
