//! Pages that the kernel gives to this process, huge ones where that is possible.
//!
//! *Invariant:* the pages are mapped for as long as their owner lives, and nobody else refers to
//! them.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The smallest page of any machine that CUDA and UCX run on, in bytes.
pub const PAGE: usize = 4096;

/// Size of a huge page. Memory of at least this size begins at a multiple of it, and asks for huge
/// pages: a fault for each 2 MiB instead of each 4 KiB, for the owner and for every process that
/// copies from it.
const HUGE: usize = 2 << 20;

/// Readable and writable memory, filled with zeros when it is new.
pub(super) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only the owner refers to the memory.
unsafe impl Send for Pages {}
// SAFETY: shared references only read it.
unsafe impl Sync for Pages {}

impl Pages {
    /// New pages of at least `bytes`, or `None` if there are none.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let len = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let surplus = if len >= HUGE { HUGE } else { 0 };
        let whole = map(len.checked_add(surplus)?)?;
        if surplus == 0 {
            return Some(Self { start: whole, len });
        }
        let before = whole.as_ptr().align_offset(HUGE);
        // SAFETY: `before` is less than `HUGE`, by which the mapping is longer than `len`.
        let start = unsafe { whole.add(before) };
        // SAFETY: both parts belong to this mapping and are referred to by nobody.
        unsafe {
            unmap(whole, before);
            unmap(start.add(len), surplus - before);
        }
        // SAFETY: the range is mapped; advice on huge pages changes no byte. If they are refused,
        // everything still works, only slower.
        let _ = unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Some(Self { start, len })
    }
}

fn map(bytes: usize) -> Option<NonNull<u8>> {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { None } else { NonNull::new(mapped.cast()) }
}

/// Returns whole pages to the kernel.
///
/// # Safety
/// They are mapped, and nobody refers to them any more.
unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        let result = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        debug_assert_eq!(result, 0, "mapped pages can be unmapped");
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped from `start` on, which the kernel has filled with zeros.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: its own pages, and their owner is gone.
        unsafe { unmap(self.start, self.len) };
    }
}
