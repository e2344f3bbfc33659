//! Where an open run directory is: at its path, elsewhere, or nowhere.
//!
//! *Invariant:* a directory that is at the path of another one is never replaced.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{RunDirectory, make_private};

impl RunDirectory {
    /// Whether the directory still exists at its path.
    pub fn is_in_place(&self) -> bool {
        is_at(&self.lock, self.path())
    }

    /// Moves a directory that was renamed back to its path, and returns where it was; `None` if it
    /// is in place, or can't be moved back: it was removed, or something else is at its path.
    pub fn move_back(&self) -> Option<PathBuf> {
        let path = self.path();
        let now = fs::read_link(format!("/proc/self/fd/{}", self.lock.as_raw_fd())).ok()?;
        if self.is_in_place() || !is_at(&self.lock, &now) {
            return None;
        }
        make_private(path.parent()?).ok()?;
        renameat2(AT_FDCWD, &now, AT_FDCWD, path, RenameFlags::RENAME_NOREPLACE).ok()?;
        Some(now)
    }
}

/// Whether an open directory is the one at `path`.
pub(super) fn is_at(open: &OwnedFd, path: &Path) -> bool {
    let Ok(open) = nix::sys::stat::fstat(open) else { return false };
    fs::symlink_metadata(path)
        .is_ok_and(|named| named.ino() == open.st_ino && named.dev() == open.st_dev)
}
