//! Copies between processes: from another's memory, and to memory that another has mapped, too.
//!
//! Does not know what the bytes are, nor when they may change.
//!
//! *Invariant:* only bytes that were copied become visible.
#![allow(unsafe_code)]

mod peer;
mod stream;
mod threads;

pub use peer::{Part, read_all};
pub use stream::{Piece, STREAMED, stream};
pub use threads::Copiers;

use std::io::{self, ErrorKind};
use std::sync::{Arc, LazyLock};

use nix::unistd::Pid;

use crate::memory::HUGE;

/// Most threads that copy at the same time for this process. More would wait for the same memory.
const THREADS: usize = 4;

static COPIERS: LazyLock<Arc<Copiers>> = LazyLock::new(|| {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Copiers::new("copy", processors.min(THREADS))
});

/// Fills `bytes` from `address` of another process, with several threads if they are many.
///
/// # Errors
/// If the kernel does not allow it, or not all of that is memory of the process.
pub fn read(pid: u32, address: usize, bytes: &mut [u8]) -> io::Result<()> {
    let pid = Pid::from_raw(pid.try_into().map_err(|_| ErrorKind::InvalidInput)?);
    let part = Part { address: address as u64, to: bytes.as_mut_ptr(), len: bytes.len() };
    // SAFETY: the slice is writable, and borrowed until the call returns.
    unsafe { COPIERS.read(pid, vec![part]) }
}

/// An empty vector with room for exactly this many bytes, on huge pages where that saves faults.
///
/// # Errors
/// If there is no memory.
pub fn vector(bytes: usize) -> io::Result<Vec<u8>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(bytes).map_err(|_| ErrorKind::OutOfMemory)?;
    let room = vector.spare_capacity_mut();
    let start = room.as_ptr().align_offset(HUGE);
    if let Some(whole) = room.get_mut(start..).filter(|rest| rest.len() >= HUGE) {
        let length = whole.len() - whole.len() % HUGE;
        // SAFETY: the range lies within the vector's allocation and begins and ends at a page;
        // advice on huge pages changes no byte. If they are refused, everything still works.
        let _ = unsafe { libc::madvise(whole.as_mut_ptr().cast(), length, libc::MADV_HUGEPAGE) };
    }
    Ok(vector)
}

/// As [`read`], into a new [`vector`].
///
/// # Errors
/// As [`read`], or if there is no memory.
pub fn copy(pid: u32, address: usize, bytes: usize) -> io::Result<Vec<u8>> {
    let mut copy = vector(bytes)?;
    let room = copy.spare_capacity_mut();
    // SAFETY: only the kernel writes to the room, and `read` fails unless it fills all of it.
    let room = unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), bytes) };
    read(pid, address, room)?;
    // SAFETY: all of them have been written.
    unsafe { copy.set_len(bytes) };
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_and_what_is_not_mapped_is_an_error() {
        let bytes: Vec<u8> = (0..5_000_000u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let own = std::process::id();
        let copied = copy(own, bytes.as_ptr().addr(), bytes.len()).expect("one's own memory");
        assert!(copied == bytes, "the bytes are the same");
        assert!(copy(own, 4096, 100).is_err(), "the first pages are never mapped");
        assert!(copy(own, usize::MAX, 100).is_err());
        assert!(read(u32::MAX, bytes.as_ptr().addr(), &mut [0; 8]).is_err());
        assert!(vector(usize::MAX).is_err());
        assert!(copy(own, bytes.as_ptr().addr(), 0).expect("nothing").is_empty());
    }
}
