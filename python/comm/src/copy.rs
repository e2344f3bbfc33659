//! Copies from the memory of another process, with `process_vm_readv(2)`.
//!
//! The kernel permits it between processes of one user, unless Yama (`kernel.yama.ptrace_scope`) or
//! a container's filter forbids it: [`can_read`] tries.
//!
//! *Invariant:* only the caller's own block is written.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nix::unistd::Pid;

use crate::reader::Message;

/// Most bytes of one call, so that a copy that nobody waits for any more ends soon.
const PART: usize = 64 << 20;

/// Most parts of one call: the kernel takes no more.
const PARTS: usize = 1024;

/// Threads that copy at the same time. Two fill the memory bus of a small machine, and the event
/// loops of the workers need the processors, too.
const THREADS: usize = 2;

/// Whether this process can read the memory of that one, where `token` lies at `address`.
pub(crate) fn can_read(pid: Pid, address: u64, token: &[u8]) -> bool {
    let mut read = vec![0; token.len()];
    let part = Part { address, to: read.as_mut_ptr(), len: read.len() };
    // SAFETY: the vector is writable.
    let done = unsafe { read_all(pid, vec![part]) };
    done.is_ok() && read == token
}

/// Fills the blocks that are to be copied from the sender's memory.
pub(crate) fn copy_all(pid: Pid, message: &mut Message) -> io::Result<()> {
    let parts = std::mem::take(&mut message.copies).into_iter().map(|(block, address)| {
        let bytes = message.blocks[block].bytes_mut();
        Part { address, to: bytes.as_mut_ptr(), len: bytes.len() }
    });
    // SAFETY: each part is a block, which is writable for its length.
    unsafe { read_all(pid, parts.collect()) }
}

/// Where bytes lie in another process, and where they are to be in this one.
pub(crate) struct Part {
    pub(crate) address: u64,
    pub(crate) to: *mut u8,
    pub(crate) len: usize,
}

/// Reads all parts, many with one call.
///
/// # Safety
///
/// All places must be writable.
pub(crate) unsafe fn read_all(pid: Pid, mut parts: Vec<Part>) -> io::Result<()> {
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

type Job = Box<dyn FnOnce() + Send>;

/// Threads for copies that would hold up the messages of other connections.
#[derive(Default)]
pub(crate) struct Copiers {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl std::fmt::Debug for Copiers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copiers").finish_non_exhaustive()
    }
}

impl Copiers {
    /// Runs `job` on one of them.
    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.idle <= jobs.waiting.len() && jobs.threads < THREADS {
            let copiers = Arc::clone(self);
            let thread = std::thread::Builder::new().name("native copy".into());
            if thread.spawn(move || copiers.serve()).is_ok() {
                jobs.threads += 1;
            } else if jobs.threads == 0 {
                // Too many threads: better late than never.
                drop(jobs);
                return job();
            }
        }
        jobs.waiting.push_back(job);
        self.more.notify_one();
    }

    fn serve(&self) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                job();
                jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            jobs.idle += 1;
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            jobs.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_where_a_token_lies_and_nowhere_else() {
        let token = [5_u8; 32];
        let at = token.as_ptr().addr() as u64;
        let own = Pid::this();
        assert!(can_read(own, at, &token));
        assert!(!can_read(own, at, &[6; 32]), "another process's");
        assert!(!can_read(own, 8, &token), "nothing is there");
        assert!(!can_read(Pid::from_raw(i32::MAX), at, &token), "no such process");
    }

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

    #[test]
    fn every_job_is_run() {
        let copiers = Arc::new(Copiers::default());
        let (send, receive) = std::sync::mpsc::channel();
        for job in 0..50 {
            let send = send.clone();
            copiers.run(Box::new(move || send.send(job).unwrap()));
        }
        let mut done: Vec<i32> = receive.iter().take(50).collect();
        done.sort_unstable();
        assert_eq!(done, (0..50).collect::<Vec<_>>());
    }
}
