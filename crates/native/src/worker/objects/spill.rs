//! The file for objects that have no room in memory.
//!
//! It has no name, so it is freed however the process ends. The CRC-32C of each object's part is
//! kept in memory. Several threads may read and write at the same time, one chunk after the other:
//! when memory is short, spilling must not need any.
//!
//! *Invariant:* no name is left in the directory.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FallocateFlags, fallocate};

use super::error::StoreError;
use cuda_cluster_data::ucx::Buffer;
use cuda_cluster_wire::tasks::ObjectId;

/// Bytes that are read, or copied from a device, at once.
const CHUNK: usize = 1 << 20;

/// An object's part of the file. Dropping it frees the space.
pub(super) struct Extent {
    file: Arc<File>,
    directory: PathBuf,
    offset: u64,
    length: usize,
    checksum: u32,
}

impl Extent {
    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Reads the object's bytes in chunks; `take` gets the offset of each chunk.
    pub(super) fn read<E: From<StoreError>>(
        &self,
        object: ObjectId,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut chunk = vec![0; CHUNK.min(self.length)];
        let (mut checksum, mut at) = (0, 0);
        while at < self.length {
            let bytes = CHUNK.min(self.length - at);
            let bytes = &mut chunk[..bytes];
            self.read_at(at, bytes)?;
            checksum = crc32c::crc32c_append(checksum, bytes);
            take(at, bytes)?;
            at += bytes.len();
        }
        if checksum == self.checksum { Ok(()) } else { Err(StoreError::Checksum { object }.into()) }
    }

    /// Checks that the bytes are those that were written.
    pub(super) fn verify(&self, object: ObjectId) -> Result<(), StoreError> {
        self.read(object, |_, _| Ok(()))
    }

    /// Reads some of the object's bytes without checking them.
    pub(super) fn read_at(&self, at: usize, bytes: &mut [u8]) -> Result<(), StoreError> {
        let read = self.file.read_exact_at(bytes, self.offset + at as u64);
        read.map_err(|source| {
            let (action, directory) = ("read from", self.directory.clone());
            StoreError::File { action, directory, source }
        })
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
            // A file system without holes keeps the space until the process ends.
            let _ = fallocate(&*self.file, flags, offset, length);
        }
    }
}

/// The file, created when it is first needed.
pub(super) struct Spill {
    directory: PathBuf,
    /// The file, and the offset of its next part. It is sparse: freed parts are returned to the
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

    /// The file, and space in it.
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

    /// A file without a name, in a directory that is created if it does not exist.
    fn make(&self) -> Result<File, StoreError> {
        fs::create_dir_all(&self.directory).map_err(self.error("create"))?;
        let unnamed = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(&self.directory);
        match unnamed {
            Ok(file) => Ok(file),
            Err(_) => self.make_named(),
        }
    }

    /// The same for file systems that only support files with names.
    fn make_named(&self) -> Result<File, StoreError> {
        let name = format!("cuda-cluster-objects-{}", std::process::id());
        let path = self.directory.join(name);
        let made =
            OpenOptions::new().read(true).write(true).mode(0o600).create_new(true).open(&path);
        let file = made.map_err(self.error("create"))?;
        fs::remove_file(&path).map_err(self.error("unlink"))?;
        Ok(file)
    }

    /// Writes a buffer's bytes, in chunks if they must first be copied from a device.
    pub(super) fn write(&self, buffer: &Buffer) -> Result<Extent, StoreError> {
        let length = buffer.len();
        let (file, offset) = self.reserve(length)?;
        // Created before writing, so that space is freed if the disk fills up midway.
        let directory = self.directory.clone();
        let mut extent = Extent { file, directory, offset, length, checksum: 0 };
        let mut chunk = vec![0; if buffer.host().is_some() { 0 } else { CHUNK.min(length) }];
        let mut at = 0;
        while at < length {
            let end = (at + CHUNK).min(length);
            let bytes = match buffer.host() {
                Some(bytes) => &bytes[at..end],
                None => {
                    buffer.read(at, &mut chunk[..end - at])?;
                    &chunk[..end - at]
                }
            };
            let written = extent.file.write_all_at(bytes, offset + at as u64);
            written.map_err(self.error("write to"))?;
            extent.checksum = crc32c::crc32c_append(extent.checksum, bytes);
            at = end;
        }
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
            (0..3u8).map(|n| spill.write(&vec![n; 5000].into()).expect("room")).collect();
        extents.remove(0);
        let mut bytes: Vec<u8> = Vec::new();
        let take = |_, chunk: &[u8]| -> Result<(), StoreError> {
            bytes.extend(chunk);
            Ok(())
        };
        extents[0].read(ObjectId::new(1, 1), take).expect("it is there");
        assert_eq!(bytes, [1; 5000]);
        assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 0);
    }

    #[test]
    fn a_directory_that_is_not_there_is_made_and_a_file_system_without_unnamed_files_will_do() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = directory.path().join("not/there");
        let spill = Spill::new(&place);
        assert!(spill.write(&vec![1; 10].into()).is_ok());
        assert!(spill.make_named().is_ok());
        assert_eq!(fs::read_dir(place).expect("it is there now").count(), 0);
    }

    #[test]
    fn damaged_bytes_are_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let spill = Spill::new(directory.path());
        let extent = spill.write(&vec![7; 100].into()).expect("room");
        extent.file.write_all_at(&[8], 50).expect("writable");
        let read = extent.verify(ObjectId::new(1, 1));
        assert!(matches!(read, Err(StoreError::Checksum { .. })));
    }

    #[test]
    fn a_directory_that_is_not_there_is_a_clear_error() {
        let spill = Spill::new(Path::new("/proc/nowhere"));
        let error = spill.write(&vec![1].into()).err().expect("no directory");
        assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    }
}
