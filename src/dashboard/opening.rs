//! The file that leads a browser to the page.
//!
//! A browser is started with what it is to open on its command line, which all users can read, and
//! the link has the token in it. So a browser is given a file that only this user can read, and the
//! file has the link. Browsers in a sandbox of their own (those of snap see neither hidden files
//! nor `/tmp` or `/run`: jupyter/notebook#5479) can't open it; the link is also printed.
//!
//! *Invariant:* the file is in a directory that is closed to others, is readable by its owner alone
//! from its first moment, and goes with its [`Opening`].

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::DashboardError;
use super::assets::notice;
use crate::os::process;
use crate::os::run_directory;

/// What the file's name begins with; the server's process id follows.
const PREFIX: &str = "open-page-";
const SUFFIX: &str = ".html";

/// A file that leads a browser to the page.
#[derive(Debug)]
pub struct Opening(PathBuf);

impl Opening {
    /// Writes the file for a link, beside this user's run directories. Removes those of servers
    /// that were killed.
    ///
    /// # Errors
    /// If the directory is not closed to others, or the file can't be written.
    pub fn write(link: &str) -> Result<Self, DashboardError> {
        let base = run_directory::private_base()?;
        remove_dead(&base);
        let path = base.join(format!("{PREFIX}{}{SUFFIX}", std::process::id()));
        let failed = |source| DashboardError::Opening { path: path.clone(), source };
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        let mut file = file.map_err(failed)?;
        let opening = Self(path.clone());
        let (_, page) = notice("Opening the page…", Some(link));
        file.write_all(page.as_bytes()).map_err(failed)?;
        Ok(opening)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        // Whoever has removed it has done the same.
        let _ = std::fs::remove_file(&self.0);
        // Fails while there are run directories in it.
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Removes the files of servers that do not run any more, and one that would have our name.
fn remove_dead(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else { return };
    let server = |name: &str| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse::<u32>().ok();
    for entry in entries.flatten() {
        let of = entry.file_name().to_str().and_then(server);
        if of.is_some_and(|pid| pid == std::process::id() || process::age(pid).is_none()) {
            let _: io::Result<()> = std::fs::remove_file(entry.path());
        }
    }
}
