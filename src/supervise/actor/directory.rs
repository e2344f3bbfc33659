//! Maintains the run directory of a running cluster: saves the state, and restores removed files.
//!
//! Session managers remove `$XDG_RUNTIME_DIR` when a user logs out, and people clean up. The
//! processes keep running, but without the directory they would be unreachable.
//!
//! *Invariant:* a directory that another cluster has created in its place is not touched.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::Actor;
use crate::os::presence::Presence;
use crate::os::run_directory::{Paths, RunDirectory, RunDirectoryError};
use crate::supervise::control;
use crate::supervise::core::Event;

/// Maximum size of files to keep a copy of.
const LARGEST: u64 = 4 << 20;

/// The files that were in the run directory when the supervisor started: plan, secret, and so on.
#[derive(Debug, Default)]
pub(super) struct InitialFiles(Vec<(PathBuf, Vec<u8>)>);

impl InitialFiles {
    /// Reads the files.
    pub(super) fn of(paths: &Paths) -> Self {
        let entries = fs::read_dir(paths.root()).into_iter().flatten().flatten();
        let files = entries.filter(|entry| {
            entry.metadata().is_ok_and(|found| found.is_file() && found.len() <= LARGEST)
        });
        let read = |entry: fs::DirEntry| Some((entry.path(), fs::read(entry.path()).ok()?));
        Self(files.filter_map(read).collect())
    }

    fn all_there(&self) -> bool {
        self.0.iter().all(|(path, _)| path.exists())
    }

    fn put_back(&self, directory: &RunDirectory) -> Result<(), RunDirectoryError> {
        // Also writes files that still exist: a directory that was created again has no guardian in
        // its owners file.
        self.0.iter().try_for_each(|(path, content)| directory.write_private(path, content))
    }
}

/// Opens `events.jsonl`; the cluster also runs without it.
pub(super) fn open_journal(paths: &Paths) -> Option<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(paths.events()).ok()
}

impl Actor {
    /// Saves the state for queries after the cluster has ended.
    pub(super) fn save_state(&self) {
        let Some(directory) = self.directory.as_ref().filter(|one| one.is_in_place()) else {
            return;
        };
        if let Ok(text) = serde_json::to_vec(&self.core.state()) {
            // A full disk must not stop the cluster; the records may still be complete.
            let _ = directory.write_private(&self.paths.state(), &text);
        }
    }

    /// Restores what was removed.
    pub(super) fn restore_directory(&mut self) -> Option<Event> {
        self.restore_at = None;
        let in_place = self.directory.as_ref().is_some_and(RunDirectory::is_in_place);
        let reachable = self.paths.control().exists() && self.paths.events().exists();
        if in_place && reachable && self.initial_files.all_there() {
            return None;
        }
        let text = match self.make_again(in_place) {
            Ok(()) => "the run directory was removed, and was made again".to_owned(),
            Err(reason) => format!("the run directory was removed, and is not back: {reason}"),
        };
        Some(Event::Noted { text })
    }

    fn make_again(&mut self, in_place: bool) -> Result<(), String> {
        let in_full = |error: RunDirectoryError| super::in_full(&error);
        if !in_place {
            let base = self.paths.root().parent().ok_or("it has no parent")?;
            let directory =
                RunDirectory::acquire_below(base, &self.launch.name).map_err(in_full)?;
            self.directory = Some(directory);
            self.presence = Presence::watch(self.paths.root());
        }
        if let Some(directory) = &self.directory {
            self.initial_files.put_back(directory).map_err(in_full)?;
        }
        self.journal = open_journal(&self.paths);
        let socket = self.paths.control();
        // A socket without a listener would block the next one.
        let _ = fs::remove_file(&socket);
        self.control = control::serve(&self.paths, self.handle.clone())
            .map_err(|error| format!("cannot listen on {}: {error}", socket.display()))?;
        self.save_state();
        Ok(())
    }
}
