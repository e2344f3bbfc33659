//! The file that takes the objects for which memory has no room.
//!
//! It has no name: it is removed as soon as it is made, so that whatever ends the process frees it.
//! Each object's part carries its CRC-32C in memory.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FallocateFlags, fallocate};

use super::StoreError;
use crate::wire::tasks::ObjectId;

/// Where an object lies in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    offset: u64,
    length: usize,
    checksum: u32,
}

impl Extent {
    pub(super) fn len(&self) -> usize {
        self.length
    }
}

/// The file, made when it is first needed.
pub(super) struct Spill {
    directory: PathBuf,
    file: Option<File>,
    /// The file is sparse: what is freed is given back to the system, and the end only grows.
    end: u64,
}

impl Spill {
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_path_buf(), file: None, end: 0 }
    }

    fn error(&self, action: &'static str) -> impl FnOnce(std::io::Error) -> StoreError + use<> {
        let directory = self.directory.clone();
        move |source| StoreError::File { action, directory, source }
    }

    fn open(&mut self) -> Result<&File, StoreError> {
        if self.file.is_none() {
            let name = format!("cuda-cluster-objects-{}", std::process::id());
            let path = self.directory.join(name);
            let made = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            let file = made.map_err(self.error("create"))?;
            std::fs::remove_file(&path).map_err(self.error("unlink"))?;
            self.file = Some(file);
        }
        self.file.as_ref().ok_or_else(|| {
            let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
            StoreError::File { action: "open", directory: self.directory.clone(), source: missing }
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<Extent, StoreError> {
        let offset = self.end;
        let failed = self.error("write to");
        self.open()?.write_all_at(bytes, offset).map_err(failed)?;
        self.end += bytes.len() as u64;
        Ok(Extent { offset, length: bytes.len(), checksum: crc32c::crc32c(bytes) })
    }

    pub(super) fn read(
        &mut self,
        object: ObjectId,
        extent: Extent,
        bytes: &mut [u8],
    ) -> Result<(), StoreError> {
        let failed = self.error("read from");
        self.open()?.read_exact_at(bytes, extent.offset).map_err(failed)?;
        if crc32c::crc32c(bytes) == extent.checksum {
            Ok(())
        } else {
            Err(StoreError::Checksum { object })
        }
    }

    pub(super) fn free(&mut self, extent: Extent) {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (Ok(offset), Ok(length)) = (i64::try_from(extent.offset), i64::try_from(extent.length))
        else {
            return;
        };
        if let Some(file) = self.file.as_ref().filter(|_| length > 0) {
            // A file system without holes keeps the room until the process ends.
            let _ = fallocate(file, flags, offset, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_back_and_no_file_is_seen() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spill = Spill::new(directory.path());
        let extents: Vec<Extent> =
            (0..3u8).map(|n| spill.write(&[n; 5000]).expect("room")).collect();
        spill.free(extents[0]);
        let mut bytes = vec![0; 5000];
        spill.read(ObjectId::new(1, 1), extents[1], &mut bytes).expect("it is there");
        assert_eq!(bytes, [1; 5000]);
        assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 0);
    }

    #[test]
    fn damaged_bytes_are_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut spill = Spill::new(directory.path());
        let extent = spill.write(&[7; 100]).expect("room");
        spill.file.as_ref().expect("open").write_all_at(&[8], 50).expect("writable");
        let read = spill.read(ObjectId::new(1, 1), extent, &mut [0; 100]);
        assert!(matches!(read, Err(StoreError::Checksum { .. })));
    }

    #[test]
    fn a_directory_that_is_not_there_is_a_clear_error() {
        let mut spill = Spill::new(Path::new("/nowhere/at/all"));
        let error = spill.write(&[1]).expect_err("no directory");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
