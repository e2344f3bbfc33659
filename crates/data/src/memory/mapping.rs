//! The file of a peer's arena, mapped whole.
//!
//! Does not know which of its bytes may be used, and when.
//!
//! *Invariant:* the file cannot shrink, and a fork does not have the mapping.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};

/// A mapping, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it gives addresses alone; who uses them says who may.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file of this size.
    ///
    /// # Errors
    /// If it may shrink, is empty, or cannot be mapped.
    pub(super) fn new(file: &OwnedFd, size: i64, protection: ProtFlags) -> io::Result<Self> {
        let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text);
        let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
        if !seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK)) {
            return Err(wrong("the peer's memory may shrink"));
        }
        let len = usize::try_from(size).ok().and_then(NonZeroUsize::new);
        let len = len.ok_or_else(|| wrong("the peer's memory is empty"))?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let start = unsafe { mmap(None, len, protection, flags, file, 0) }?;
        let mapping = Self { start: start.cast(), len: len.get() };
        mapping.advise(0, mapping.len, MmapAdvise::MADV_DONTFORK);
        Ok(mapping)
    }

    /// In bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where a byte is. No place beyond the end is given.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "within the mapping");
        // SAFETY: as was just checked.
        unsafe { self.start.add(offset) }
    }

    /// Takes bytes out of the page tables. They stay in the file.
    pub(super) fn forget(&self, offset: usize, len: usize) {
        self.advise(offset, len, MmapAdvise::MADV_DONTNEED);
    }

    /// Gives advice that changes no byte of the file.
    pub(super) fn advise(&self, offset: usize, len: usize, advice: MmapAdvise) {
        assert!(len <= self.len - offset.min(self.len), "within the mapping");
        // SAFETY: a part of the mapping. If the advice is refused, everything still works.
        let _ = unsafe { madvise(self.at(offset).cast(), len, advice) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole of the mapping, of which nobody has a part any more.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
