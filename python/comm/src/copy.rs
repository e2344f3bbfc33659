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

/// Threads that copy at the same time. Two fill the memory bus of a small machine, and the event
/// loops of the workers need the processors, too.
const THREADS: usize = 2;

/// Whether this process can read the memory of that one, where `token` lies at `address`.
pub(crate) fn can_read(pid: Pid, address: u64, token: &[u8]) -> bool {
    let mut read = vec![0; token.len()];
    let start = read.as_mut_ptr();
    // SAFETY: `start` is writable for as many bytes.
    let done = unsafe { read_into(pid, address, start, read.len()) };
    done.is_ok() && read == token
}

/// Fills the blocks that are to be copied from the sender's memory.
pub(crate) fn copy_all(pid: Pid, message: &mut Message) -> io::Result<()> {
    for (block, address) in &message.copies {
        let bytes = message.blocks[*block].bytes_mut();
        let (start, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: `start` is writable for `len` bytes.
        unsafe { read_into(pid, *address, start, len) }?;
    }
    Ok(())
}

/// # Safety
///
/// `to` must be writable for `len` bytes.
unsafe fn read_into(pid: Pid, address: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let part = (len - done).min(PART);
        // SAFETY: `done` is less than `len`.
        let local = libc::iovec { iov_base: unsafe { to.add(done) }.cast(), iov_len: part };
        let from = usize::try_from(address).ok().and_then(|address| address.checked_add(done));
        let from = from.ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
        let remote =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(from), iov_len: part };
        // SAFETY: the kernel writes at most `part` bytes to `local`, which is writable; what it
        // reads belongs to the other process, and it says so where nothing is.
        let read = unsafe { libc::process_vm_readv(pid.as_raw(), &local, 1, &remote, 1, 0) };
        match usize::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
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
