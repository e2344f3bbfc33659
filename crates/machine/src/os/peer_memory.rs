//! Reads another process's memory, which takes one copy where a socket takes two.
//!
//! The kernel allows that for processes of the same user, unless Yama, a seccomp profile or the
//! process itself forbids it, process_vm_readv(2) and ptrace(2).
//!
//! *Invariant:* only bytes that were read become visible.

use std::io::{self, ErrorKind, IoSliceMut};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

/// Memory of at least this size, in bytes, asks for huge pages.
const HUGE: usize = 2 << 20;

/// Fills `bytes` from `address` of another process.
///
/// # Errors
/// If the kernel does not allow it, or not all of that is memory of the process.
pub fn read(pid: u32, address: usize, bytes: &mut [u8]) -> io::Result<()> {
    let pid = Pid::from_raw(pid.try_into().map_err(|_| ErrorKind::InvalidInput)?);
    let mut done = 0;
    while done < bytes.len() {
        let base = address.checked_add(done).ok_or(ErrorKind::InvalidInput)?;
        let remote = [RemoteIoVec { base, len: bytes.len() - done }];
        match process_vm_readv(pid, &mut [IoSliceMut::new(&mut bytes[done..])], &remote)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(())
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
    // SAFETY: process_vm_readv only writes to the room, and `read` fails unless it fills all of it.
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
