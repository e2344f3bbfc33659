//! A cluster's own place for files of shared memory, below `/dev/shm`.
//!
//! UCX gives each of its files a name, and takes the name away once the file is open. A process
//! that is killed in between leaves it, and nobody ever frees its memory. In a directory where
//! nothing else lies, it goes with the directory.
//!
//! *Invariant:* a directory made here is this user's alone, and its name is that of one run
//! directory, so that whoever cleans up after the one finds the other.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;

/// Where the kernel keeps files in memory.
const MEMORY: &str = "/dev/shm";

/// The directory that belongs to a run directory; says nothing about whether it exists.
///
/// Its name ends with the cluster's, for people who look around there.
pub fn beside(run_directory: &Path) -> PathBuf {
    let base = run_directory.parent().unwrap_or(run_directory);
    let name = run_directory.file_name().unwrap_or_default().to_string_lossy();
    Path::new(MEMORY).join(format!("{}{name}", prefix(base)))
}

/// How the names of the directories begin whose run directories lie in `base`.
pub fn prefix(base: &Path) -> String {
    // FNV-1a: the same in every build of this program, unlike the standard library's.
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = base.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix);
    format!("cuda-cluster-{}-{hash:016x}-", Uid::effective())
}

/// Makes it, empty, and open to nobody else.
///
/// # Errors
/// If there is no such memory here, or somebody else has a file of that name.
pub fn make(directory: &Path) -> io::Result<()> {
    remove(directory);
    fs::DirBuilder::new().mode(0o700).create(directory)
}

/// Removes it with all that lies in it, if it is this user's.
pub fn remove(directory: &Path) {
    let own = |found: fs::Metadata| found.is_dir() && found.uid() == Uid::effective().as_raw();
    if fs::symlink_metadata(directory).is_ok_and(own) {
        // What cannot be removed now is tried again by whoever takes the run directory next.
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
