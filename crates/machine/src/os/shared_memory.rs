//! A cluster's own directory for shared memory files, below `/dev/shm`.
//!
//! UCX creates each of its files with a name, and unlinks the name once the file is open. A process
//! killed in between leaves the file, and its memory is never freed. In a directory of its own, the
//! file is removed with the directory.
//!
//! *Invariant:* a directory created here belongs to this user alone, and its name is derived from
//! one run directory, so that whoever cleans up one finds the other.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;

/// Where the kernel keeps files in memory.
const MEMORY: &str = "/dev/shm";

/// The path of the directory that belongs to a run directory, whether or not it exists.
///
/// Ends with the cluster's name, so that users can recognise it.
pub fn beside(run_directory: &Path) -> PathBuf {
    let base = run_directory.parent().unwrap_or(run_directory);
    let name = run_directory.file_name().unwrap_or_default().to_string_lossy();
    Path::new(MEMORY).join(format!("{}{name}", prefix(base)))
}

/// Prefix of the directories whose run directories are in `base`.
pub fn prefix(base: &Path) -> String {
    // FNV-1a is the same in every build of this program, unlike the standard library's hasher.
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = base.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix);
    format!("cuda-cluster-{}-{hash:016x}-", Uid::effective())
}

/// Creates the directory, empty and closed to other users.
///
/// # Errors
/// If there is no such file system, or another user has a file of that name.
pub fn make(directory: &Path) -> io::Result<()> {
    remove(directory);
    fs::DirBuilder::new().mode(0o700).create(directory)
}

/// Makes the directory again if it was removed: a session manager empties `/dev/shm` of a user's
/// files at the last logout.
///
/// # Errors
/// As [`make`].
pub fn keep(directory: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Removes the directory and its contents, if it belongs to this user.
pub fn remove(directory: &Path) {
    let own = |found: fs::Metadata| found.is_dir() && found.uid() == Uid::effective().as_raw();
    if fs::symlink_metadata(directory).is_ok_and(own) {
        // If removal fails, the next owner of the run directory tries again.
        let _ = fs::remove_dir_all(directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_empty_and_goes_with_all_that_lies_in_it() {
        let run = tempfile::tempdir().expect("a run directory");
        let directory = beside(run.path());
        assert_eq!(directory, beside(run.path()), "whoever asks finds the same");
        assert_ne!(directory, beside(&run.path().join("other")));
        make(&directory).expect("made");
        fs::write(directory.join("left"), "x").expect("written");
        make(&directory).expect("made again");
        assert_eq!(fs::read_dir(&directory).expect("a directory").count(), 0);
        fs::write(directory.join("left"), "x").expect("written");
        remove(&directory);
        assert!(!directory.exists());
    }
}
