//! Private pages, huge ones where that is possible.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

const HUGE: usize = 2 << 20;

/// Pages of this process.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
}

// SAFETY: memory that only its owner refers to.
unsafe impl Send for Pages {}
// SAFETY: all access to the memory is through `&mut` or the owner's own rules ([`Block::start`]).
unsafe impl Sync for Pages {}

impl Pages {
    pub(super) fn new(len: usize) -> io::Result<Self> {
        // Huge pages need a region that begins at a multiple of their size.
        // (Miri knows no such thing.)
        let spare = if len >= HUGE && !cfg!(miri) { HUGE } else { 0 };
        let whole = len.checked_add(spare).and_then(NonZeroUsize::new);
        let whole = whole.ok_or(io::ErrorKind::OutOfMemory)?;
        let reserved = if cfg!(miri) { MapFlags::empty() } else { MapFlags::MAP_NORESERVE };
        let flags = MapFlags::MAP_PRIVATE | reserved;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(None, whole, protection, flags) }?.cast::<u8>();
        if spare == 0 {
            return Ok(Self { start: mapped, len });
        }
        let before = mapped.as_ptr().align_offset(HUGE);
        // SAFETY: `before` is less than `HUGE`, by which the mapping is longer than `len`.
        let start = unsafe { mapped.add(before) };
        // SAFETY: both parts are of this mapping, and nobody knows them.
        unsafe {
            if before > 0 {
                let _ = munmap(mapped.cast(), before);
            }
            if before < spare {
                let _ = munmap(start.add(len).cast(), spare - before);
            }
            // Where there are none, pages are small.
            let _ = madvise(start.cast(), len, MmapAdvise::MADV_HUGEPAGE);
        }
        Ok(Self { start, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of what was mapped; its owner is gone.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
