//! Copies from the memory of another process, with `process_vm_readv(2)`: one copy, where a socket
//! takes two.
//!
//! The kernel permits it between processes of one user, unless Yama (`kernel.yama.ptrace_scope`), a
//! container's filter or the process itself forbids it, ptrace(2).
//!
//! *Invariant:* only what the caller names is written.

use std::io;

use nix::unistd::Pid;

/// Most bytes of one call, so that a copy that nobody waits for any more ends soon.
const PART: usize = 64 << 20;

/// Most parts of one call: the kernel takes no more.
const PARTS: usize = 1024;

/// Where bytes lie in another process, and where they are to be in this one.
pub struct Part {
    pub address: u64,
    pub to: *mut u8,
    pub len: usize,
}

// SAFETY: only addresses; whoever reads promises what it needs.
unsafe impl Send for Part {}

/// Reads all parts, many with one call.
///
/// # Errors
/// If the kernel does not allow it, or not all of that is memory of the process.
///
/// # Safety
/// All places must be writable.
pub unsafe fn read_all(pid: Pid, mut parts: Vec<Part>) -> io::Result<()> {
    let mut first = 0;
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    while first < parts.len() {
        local.clear();
        remote.clear();
        let mut bytes = 0;
        for part in parts[first..].iter().take(PARTS) {
            let len = part.len.min(PART - bytes);
            let from = usize::try_from(part.address).map_err(|_| wrong_address())?;
            let from = std::ptr::without_provenance_mut(from);
            local.push(libc::iovec { iov_base: part.to.cast(), iov_len: len });
            remote.push(libc::iovec { iov_base: from, iov_len: len });
            bytes += len;
            if bytes == PART {
                break;
            }
        }
        let count = local.len() as libc::c_ulong;
        // SAFETY: the kernel writes to the local places alone, which are writable; what it reads
        // belongs to the other process, and it says so where nothing is.
        let read = unsafe {
            libc::process_vm_readv(pid.as_raw(), local.as_ptr(), count, remote.as_ptr(), count, 0)
        };
        let Ok(mut read) = usize::try_from(read) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
        if read == 0 && bytes > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while let Some(part) = parts.get_mut(first) {
            if part.len > read {
                part.address = part.address.checked_add(read as u64).ok_or_else(wrong_address)?;
                // SAFETY: `read` is less than the part's length.
                part.to = unsafe { part.to.add(read) };
                part.len -= read;
                break;
            }
            read -= part.len;
            first += 1;
        }
    }
    Ok(())
}

fn wrong_address() -> io::Error {
    io::Error::from_raw_os_error(libc::EFAULT)
}

/// The same parts in groups of about so many bytes each, the larger ones divided.
pub(super) fn in_groups(parts: Vec<Part>, bytes: usize) -> io::Result<Vec<Vec<Part>>> {
    let mut groups = vec![Vec::new()];
    let mut room = bytes;
    for Part { mut address, mut to, mut len } in parts {
        while len > 0 {
            if room == 0 {
                groups.push(Vec::new());
                room = bytes;
            }
            let now = len.min(room);
            groups
                .last_mut()
                .into_iter()
                .for_each(|group| group.push(Part { address, to, len: now }));
            address = address.checked_add(now as u64).ok_or_else(wrong_address)?;
            to = to.wrapping_add(now);
            len -= now;
            room -= now;
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_size_and_number_are_read() {
        let from: Vec<Vec<u8>> =
            (0..3000_usize).map(|n| vec![n.to_le_bytes()[0]; n % 7 * 1000]).collect();
        let mut to: Vec<Vec<u8>> = from.iter().map(|bytes| vec![255; bytes.len()]).collect();
        let part = |(from, to): (&Vec<u8>, &mut Vec<u8>)| {
            let address = from.as_ptr().expose_provenance() as u64;
            Part { address, to: to.as_mut_ptr(), len: to.len() }
        };
        let parts = from.iter().zip(&mut to).map(part).collect();
        // SAFETY: the places are vectors of these lengths.
        unsafe { read_all(Pid::this(), parts) }.unwrap();
        assert_eq!(from, to);
        let big = vec![3_u8; PART + 5];
        let mut copy = vec![0_u8; PART + 5];
        let address = big.as_ptr().expose_provenance() as u64;
        let part = Part { address, to: copy.as_mut_ptr(), len: copy.len() };
        // SAFETY: as above.
        unsafe { read_all(Pid::this(), vec![part]) }.unwrap();
        assert!(copy == big);
    }
}
