//! Pages that the kernel gives to this process, huge ones where that is possible.
//!
//! *Invariant:* the pages are mapped for as long as their owner lives, and nobody else refers to
//! them.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{
    MRemapFlags, MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, mremap, munmap,
};
use nix::unistd::{SysconfVar, sysconf};

/// The smallest page of any machine that CUDA and UCX run on, in bytes. Writing to every so many
/// touches all pages, whatever their size; what is mapped or unmapped goes by the machine's.
pub const PAGE: usize = 4096;

/// The size of this machine's pages, in bytes: 4 KiB, on Arm also 16 or 64.
pub(super) fn page_size() -> usize {
    let told = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    told.and_then(|size| usize::try_from(size).ok()).unwrap_or(64 << 10)
}

/// Size of a huge page. Memory of at least this size begins at a multiple of it, and asks for huge
/// pages: a fault for each 2 MiB instead of each 4 KiB, for the owner and for every process that
/// copies from it.
pub(crate) const HUGE: usize = 2 << 20;

/// Readable and writable memory, filled with zeros when it is new.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only the owner refers to the memory.
unsafe impl Send for Pages {}
// SAFETY: shared references give an address alone.
unsafe impl Sync for Pages {}

impl Pages {
    /// New pages of `len` bytes, a multiple of [`page_size`].
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        assert!(len.is_multiple_of(page_size()), "whole pages");
        // Miri unmaps only what was mapped at once.
        let surplus = if len >= HUGE && !cfg!(miri) { HUGE } else { 0 };
        let whole = len.checked_add(surplus).and_then(NonZeroUsize::new);
        let whole = whole.ok_or(io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapped = unsafe { mmap_anonymous(None, whole, protection, MapFlags::MAP_PRIVATE) };
        let mapped = mapped?.cast::<u8>();
        if surplus == 0 {
            return Ok(Self { start: mapped, len });
        }
        let before = mapped.as_ptr().align_offset(HUGE);
        // SAFETY: `before` is less than `HUGE`, by which the mapping is longer than `len`.
        let start = unsafe { mapped.add(before) };
        // SAFETY: both parts belong to this mapping and are referred to by nobody. Advice on huge
        // pages changes no byte; if they are refused, everything still works, only slower.
        unsafe {
            if before > 0 {
                let _ = munmap(mapped.cast(), before);
            }
            let _ = munmap(start.add(len).cast(), surplus - before);
            let _ = madvise(start.cast(), len, MmapAdvise::MADV_HUGEPAGE);
        }
        Ok(Self { start, len })
    }

    /// Takes off the first `len` bytes, a multiple of [`page_size`]: the kernel would unmap the
    /// rest of a page together with them.
    pub(super) fn cut(&mut self, len: usize) -> Self {
        assert!(len.is_multiple_of(page_size()) && len <= self.len, "a part of the pages");
        let start = self.start;
        // SAFETY: at most the end of the mapping. Each part is unmapped by its own owner.
        self.start = unsafe { start.add(len) };
        self.len -= len;
        Self { start, len }
    }

    /// Adds pages that lie behind these, or gives them back if they lie elsewhere.
    pub(super) fn join(&mut self, next: Self) -> Option<Self> {
        // Behind no pages lies nothing.
        if self.len == 0 || self.start.addr().get() + self.len != next.start.addr().get() {
            return Some(next);
        }
        self.len += next.len;
        std::mem::forget(next);
        None
    }

    /// Moves them, with what they hold, to where untouched pages follow: `len` bytes in all. They
    /// were mapped at once.
    ///
    /// # Errors
    /// If there is no memory; nothing has moved then.
    pub(super) fn grow(&mut self, len: usize) -> io::Result<()> {
        assert!(self.len <= len, "larger");
        let mut larger = Self::new(len)?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        let (from, to) = (self.start.cast(), larger.start.cast());
        // SAFETY: both places are their own pages', to which nobody refers.
        let moved = unsafe { mremap(from, self.len, self.len, flags, Some(to)) };
        if let Err(error) = moved {
            // The kernel may have unmapped the place before it failed; it may be anybody's now.
            std::mem::forget(larger.cut(self.len));
            return Err(error.into());
        }
        // Nothing is mapped any more where they were.
        std::mem::forget(std::mem::replace(self, larger));
        Ok(())
    }

    /// Where they begin.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// In bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: its own pages, and their owner is gone.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
