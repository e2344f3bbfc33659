//! The file that takes the objects for which memory has no room.
//!
//! It has no name: it is removed as soon as it is made, so that whatever ends the process frees it.
//! Each object's part carries its CRC-32C in memory. Several threads may read and write at a time.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FallocateFlags, fallocate};

use super::StoreError;
use crate::wire::tasks::ObjectId;

/// Where an object lies in the file. Dropping it gives the room back.
pub(super) struct Extent {
    file: Arc<File>,
    directory: PathBuf,
    offset: u64,
    length: usize,
    checksum: u32,
}

impl Extent {
    /// The object's bytes, as they were written.
    pub(super) fn read(&self, object: ObjectId) -> Result<Vec<u8>, StoreError> {
        let mut bytes = vec![0; self.length];
        let read = self.file.read_exact_at(&mut bytes, self.offset);
        read.map_err(|source| {
            let (action, directory) = ("read from", self.directory.clone());
            StoreError::File { action, directory, source }
        })?;
        if crc32c::crc32c(&bytes) == self.checksum {
            Ok(bytes)
        } else {
            Err(StoreError::Checksum { object })
        }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (Ok(offset), Ok(length)) = (i64::try_from(self.offset), i64::try_from(self.length))
        else {
            return;
        };
        if length > 0 {
            // A file system without holes keeps the room until the process ends.
            let _ = fallocate(&*self.file, flags, offset, length);
        }
    }
}

/// The file, made when it is first needed.
pub(super) struct Spill {
    directory: PathBuf,
    /// The file, and where its next part begins. It is sparse: what is freed is given back to the
    /// system, and the end only grows.
    file: Mutex<(Option<Arc<File>>, u64)>,
}

impl Spill {
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_path_buf(), file: Mutex::new((None, 0)) }
    }

    fn error(&self, action: &'static str) -> impl FnOnce(std::io::Error) -> StoreError + use<> {
        let directory = self.directory.clone();
        move |source| StoreError::File { action, directory, source }
    }

    /// The file, and room in it.
    fn reserve(&self, bytes: usize) -> Result<(Arc<File>, u64), StoreError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let made = match &file.0 {
            Some(made) => Arc::clone(made),
            None => Arc::new(self.make()?),
        };
        let offset = file.1;
        *file = (Some(Arc::clone(&made)), offset + bytes as u64);
        Ok((made, offset))
    }

    fn make(&self) -> Result<File, StoreError> {
        let name = format!("cuda-cluster-objects-{}", std::process::id());
        let path = self.directory.join(name);
        let made = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = made.map_err(self.error("create"))?;
        std::fs::remove_file(&path).map_err(self.error("unlink"))?;
        Ok(file)
    }

    pub(super) fn write(&self, bytes: &[u8]) -> Result<Extent, StoreError> {
        let (file, offset) = self.reserve(bytes.len())?;
        let (length, checksum) = (bytes.len(), crc32c::crc32c(bytes));
        // Made before the bytes, so that what a full disk took of them is given back.
        let extent = Extent { file, directory: self.directory.clone(), offset, length, checksum };
        extent.file.write_all_at(bytes, offset).map_err(self.error("write to"))?;
        Ok(extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_back_and_no_file_is_seen() {
        let directory = tempfile::tempdir().expect("a directory");
        let spill = Spill::new(directory.path());
        let mut extents: Vec<Extent> =
            (0..3u8).map(|n| spill.write(&[n; 5000]).expect("room")).collect();
        extents.remove(0);
        let bytes = extents[0].read(ObjectId::new(1, 1)).expect("it is there");
        assert_eq!(bytes, [1; 5000]);
        assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 0);
    }

    #[test]
    fn damaged_bytes_are_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let spill = Spill::new(directory.path());
        let extent = spill.write(&[7; 100]).expect("room");
        extent.file.write_all_at(&[8], 50).expect("writable");
        let read = extent.read(ObjectId::new(1, 1));
        assert!(matches!(read, Err(StoreError::Checksum { .. })));
    }

    #[test]
    fn a_directory_that_is_not_there_is_a_clear_error() {
        let spill = Spill::new(Path::new("/nowhere/at/all"));
        let error = spill.write(&[1]).err().expect("no directory");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
