//! Host memory, page-aligned if it is at least a page long.
//!
//! Does not lock or register it.
//!
//! One process copies from another's memory page by page. If both sides are page-aligned, the
//! kernel copies whole pages, otherwise two pieces for each page: then 64 KiB take a twentieth
//! longer (`scripts/bench-links.sh`).
//!
//! *Invariant:* the bytes stay at their address while the value is moved.

use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};

use super::spare;

/// The smallest page of any machine that CUDA and UCX run on, in bytes.
pub(crate) const PAGE: usize = 4096;

/// Memory of this size or more uses huge pages: a fault for each 2 MiB instead of each 4 KiB, for
/// the owner and for every process that copies from it.
const HUGE: usize = 4 << 20;

/// A value of the caller's that is dropped when a piece of memory is freed.
pub type Lease = Box<dyn Any + Send + Sync>;

/// Bytes in host memory.
pub struct HostMemory {
    /// The bytes, with `start` bytes of padding before them for the alignment.
    bytes: Vec<u8>,
    start: usize,
    /// Whether every byte of the capacity has been written, so that the memory may be reused.
    is_whole: bool,
    /// The last field, so that it is dropped after the bytes are freed.
    lease: Option<Lease>,
}

impl HostMemory {
    /// Memory that is page-aligned if it is at least a page long. Its bytes are undefined: zero in
    /// pages that come from the kernel, or those of an earlier piece of this process. `None` if
    /// there is no memory.
    pub fn undefined(bytes: usize) -> Option<Self> {
        if bytes == 0 {
            return Some(Self::from(Vec::new()));
        }
        let room = if bytes < PAGE { bytes } else { bytes.checked_add(PAGE - 1)? };
        if let Some(mut memory) = spare::take(room) {
            // SAFETY: of what is kept, every byte up to its capacity has been written.
            unsafe { memory.set_len(memory.capacity()) };
            return Self::from_page(memory, bytes);
        }
        let layout = Layout::array::<u8>(room).ok()?;
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        if memory.is_null() {
            return None;
        }
        // SAFETY: the global allocator gave this memory for exactly this layout, and all of its
        // bytes are initialised.
        let memory = unsafe { Vec::from_raw_parts(memory, room, room) };
        let mut memory = Self::from_page(memory, bytes)?;
        if bytes >= HUGE {
            memory.advise_huge_pages();
        }
        Some(memory)
    }

    /// The first `bytes` of a vector from a page boundary on, or from its start if they are few.
    fn from_page(mut memory: Vec<u8>, bytes: usize) -> Option<Self> {
        let start = if bytes < PAGE { 0 } else { memory.as_ptr().align_offset(PAGE) };
        memory.truncate(start.checked_add(bytes)?);
        Some(Self { bytes: memory, start, is_whole: true, lease: None })
    }

    /// The bytes as a vector, copied if they are not at its beginning.
    pub fn into_vec(mut self) -> Vec<u8> {
        match self.start {
            0 => std::mem::take(&mut self.bytes),
            start => self.bytes[start..].to_vec(),
        }
    }

    /// Keeps a value until the memory is freed.
    pub fn hold(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// The value that is kept until the memory is freed.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Asks for huge pages. If they are refused, everything still works, only slower.
    fn advise_huge_pages(&mut self) {
        let bytes = &mut self[..];
        // SAFETY: the range lies within one allocation and begins at a page; advice on huge pages
        // changes no byte.
        let _ =
            unsafe { libc::madvise(bytes.as_mut_ptr().cast(), bytes.len(), libc::MADV_HUGEPAGE) };
    }
}

impl From<Vec<u8>> for HostMemory {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, start: 0, is_whole: false, lease: None }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.is_whole {
            spare::keep(std::mem::take(&mut self.bytes));
        }
    }
}

impl Deref for HostMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

impl DerefMut for HostMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_as_long_as_asked_for_and_begins_at_a_page() {
        for bytes in [0, 1, PAGE - 1, PAGE, PAGE + 1, 100_000, HUGE, HUGE + 5] {
            let mut memory = HostMemory::undefined(bytes).expect("a little memory");
            assert_eq!(memory.len(), bytes);
            assert!(bytes < PAGE || memory.as_ptr().align_offset(PAGE) == 0);
            memory.fill(7);
            let place = memory.as_ptr();
            let moved = Box::new(memory);
            assert_eq!(moved.as_ptr(), place);
            assert_eq!(moved.into_vec(), vec![7; bytes]);
        }
        assert!(HostMemory::undefined(usize::MAX).is_none());
        assert!(HostMemory::undefined(isize::MAX.unsigned_abs()).is_none());
    }
}
