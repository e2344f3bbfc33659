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
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::arena::Arena;
use super::lease::Lease;
use super::pages::PAGE;
use super::pool::Block;
use super::spare;
use super::view::View;

/// From this size on, in bytes, memory is pages of its own, which are kept for reuse. Smaller
/// pieces come from the heap, whose free lists are just as fast.
const OWN_PAGES: usize = 128 << 10;

/// From this size on, in bytes, memory that peers may read is shared with them. They take a smaller
/// copy in the time in which they would get to know where it is.
pub const SHAREABLE: usize = 1 << 20;

/// Bytes in host memory.
pub struct HostMemory {
    content: Content,
    /// The last field, so that it is dropped after the bytes are freed.
    lease: Option<Lease>,
}

enum Content {
    /// The bytes, with `start` bytes of padding before them for the alignment.
    Heap { bytes: Vec<u8>, start: usize },
    /// Pages of its own.
    Pages(Block),
    /// Memory of another library.
    Foreign(Foreign),
    /// Memory of a peer.
    View(View),
}

/// So many bytes from `start` on.
///
/// *Invariant:* nobody else uses them in a way that conflicts with a slice: the promise of who
/// made it.
struct Foreign {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is used as a slice of bytes is, which other threads may have and share.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl HostMemory {
    /// Memory that is page-aligned if it is at least a page long. Its bytes are undefined: zero in
    /// pages that come from the kernel, or those of an earlier piece of this process. `None` if
    /// there is no memory.
    pub fn undefined(bytes: usize) -> Option<Self> {
        let content = if bytes >= OWN_PAGES {
            Content::Pages(spare::take(bytes)?)
        } else {
            let room = if bytes < PAGE { bytes } else { bytes.checked_add(PAGE - 1)? };
            let mut memory = zeroed(room)?;
            let start = if bytes < PAGE { 0 } else { memory.as_ptr().align_offset(PAGE) };
            memory.truncate(start.checked_add(bytes)?);
            Content::Heap { bytes: memory, start }
        };
        Some(Self { content, lease: None })
    }

    /// As [`Self::undefined`], where peers may read it if it is at least [`SHAREABLE`] bytes long,
    /// and this process may keep as much ([`spare::keep_up_to`]).
    pub fn shareable(bytes: usize) -> Option<Self> {
        if bytes < SHAREABLE {
            return Self::undefined(bytes);
        }
        Some(Self { content: Content::Pages(spare::take_shareable(bytes)?), lease: None })
    }

    /// Where peers may read it, if they may: the arena, and the place there.
    pub fn shared(&self) -> Option<(&Arc<Arena>, usize)> {
        let Content::Pages(block) = &self.content else { return None };
        block.shared()
    }

    /// Where peers may have read it, it goes back to the system when it is dropped, as
    /// [`Block::spend`] says.
    pub fn spend(&self) {
        if let Content::Pages(block) = &self.content {
            block.spend();
        }
    }

    /// Whether it is memory of a peer.
    pub fn is_view(&self) -> bool {
        matches!(self.content, Content::View(_))
    }

    /// Memory that another library of this process has allocated, from `start` on.
    ///
    /// # Safety
    /// The range is initialised and stays allocated until this is dropped, and nobody else writes
    /// to it; while this is written, nobody reads it.
    pub unsafe fn foreign(start: NonNull<u8>, len: usize) -> Self {
        Self { content: Content::Foreign(Foreign { start, len }), lease: None }
    }

    /// The bytes as a vector, copied if they are not at the beginning of one.
    pub fn into_vec(mut self) -> Vec<u8> {
        match &mut self.content {
            Content::Heap { bytes, start: 0 } => std::mem::take(bytes),
            _ => self.to_vec(),
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
}

/// A vector of zeros, or `None` if there is no memory.
fn zeroed(bytes: usize) -> Option<Vec<u8>> {
    if bytes == 0 {
        return Some(Vec::new());
    }
    let layout = Layout::array::<u8>(bytes).ok()?;
    // SAFETY: the layout's size is not zero.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    if memory.is_null() {
        return None;
    }
    // SAFETY: the global allocator gave this memory for exactly this layout, and all of its bytes
    // are initialised.
    Some(unsafe { Vec::from_raw_parts(memory, bytes, bytes) })
}

impl From<Vec<u8>> for HostMemory {
    fn from(bytes: Vec<u8>) -> Self {
        Self { content: Content::Heap { bytes, start: 0 }, lease: None }
    }
}

/// Read in place. Whoever writes it gets a copy.
impl From<View> for HostMemory {
    fn from(view: View) -> Self {
        Self { content: Content::View(view), lease: None }
    }
}

impl Deref for HostMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.content {
            Content::Heap { bytes, start } => &bytes[*start..],
            Content::Pages(block) => block.bytes(),
            // SAFETY: the invariant of the type.
            Content::Foreign(Foreign { start, len }) => unsafe {
                std::slice::from_raw_parts(start.as_ptr(), *len)
            },
            Content::View(view) => view,
        }
    }
}

impl DerefMut for HostMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        if let Content::View(view) = &self.content {
            self.content = Content::Heap { bytes: view.to_vec(), start: 0 };
        }
        match &mut self.content {
            Content::Heap { bytes, start } => &mut bytes[*start..],
            Content::Pages(block) => block.bytes_mut(),
            // SAFETY: the invariant of the type.
            Content::Foreign(Foreign { start, len }) => unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr(), *len)
            },
            // It has just been replaced.
            Content::View(_) => &mut [],
        }
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
        for bytes in [0, 1, PAGE - 1, PAGE, PAGE + 1, 100_000, OWN_PAGES, (4 << 20) + 5] {
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

    #[test]
    fn freed_memory_serves_the_next_piece_of_its_size() {
        spare::keep_up_to(64 << 20).expect("a thread");
        // A size that no other test uses.
        let size = 5_432_100;
        let mut memory = HostMemory::undefined(size).expect("a little memory");
        memory.fill(7);
        drop(memory);
        let again = HostMemory::undefined(size - 1000).expect("a little memory");
        assert!(again.iter().all(|byte| *byte == 7), "new pages would be zero");
        assert_eq!(again.len(), size - 1000);
    }
}
