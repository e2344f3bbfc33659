//! Copies that several threads make together.
//!
//! *Invariant:* whoever has a copy made waits for every thread at work on it.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::unistd::Pid;

use super::peer::{Part, in_groups, read_all};
use super::stream::{Piece, stream};

/// From this size on, in bytes, several threads read from another process. Where all processors are
/// busy, a smaller copy would wait for them longer than it takes.
const SEVERAL: usize = 16 << 20;

/// Bytes that one of them reads before it takes the next.
const GROUP: usize = 2 << 20;

/// A copy that several threads make together.
struct Together<P> {
    state: Mutex<Progress<P>>,
    /// A thread has ended a piece.
    ended: Condvar,
    /// Copies a piece; whether to go on.
    act: Box<dyn Fn(P) -> bool + Send + Sync>,
}

struct Progress<P> {
    pieces: Vec<P>,
    /// Threads that are copying.
    at_work: usize,
}

impl<P> Together<P> {
    fn work(&self) {
        let mut progress = self.progress();
        while let Some(piece) = progress.pieces.pop() {
            progress.at_work += 1;
            drop(progress);
            let goes_on = (self.act)(piece);
            progress = self.progress();
            progress.at_work -= 1;
            if !goes_on {
                progress.pieces.clear();
            }
            self.ended.notify_all();
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads for copies. They start when they are needed.
pub struct Copiers {
    name: &'static str,
    /// Most of them.
    threads: usize,
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
    /// At most so many threads of this name.
    pub fn new(name: &'static str, threads: usize) -> Arc<Self> {
        let (jobs, more) = (Mutex::default(), Condvar::new());
        Arc::new(Self { name, threads, jobs, more })
    }

    /// Runs `job` on one of them.
    pub fn run(self: &Arc<Self>, job: Job) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.idle <= jobs.waiting.len() && jobs.threads < self.threads {
            let copiers = Arc::clone(self);
            let thread = std::thread::Builder::new().name(self.name.to_owned());
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

    /// Copies pieces, on this thread and on others that have nothing to do, past the caches. Gives
    /// up when `stop` says so.
    ///
    /// # Safety
    ///
    /// Each piece's bytes must be readable and writable, and no two may overlap.
    pub unsafe fn copy(
        self: &Arc<Self>,
        pieces: Vec<Piece>,
        stop: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        self.share(pieces, move |piece| {
            let goes_on = !stop();
            if goes_on {
                // SAFETY: the caller keeps all pieces until this call returns, and `share` waits
                // for every thread at work.
                unsafe { stream(piece) };
            }
            goes_on
        });
    }

    /// Reads parts of another process, on this thread, and if they are large on others that have
    /// nothing to do.
    ///
    /// # Errors
    /// As [`read_all`]; then any of the bytes may have been written.
    ///
    /// # Safety
    /// All places must be writable, and no two may overlap.
    pub unsafe fn read(self: &Arc<Self>, pid: Pid, parts: Vec<Part>) -> io::Result<()> {
        if parts.iter().map(|part| part.len).sum::<usize>() < SEVERAL {
            // SAFETY: the caller's promise.
            return unsafe { read_all(pid, parts) };
        }
        let error = Arc::new(Mutex::new(None));
        let failed = Arc::clone(&error);
        self.share(in_groups(parts, GROUP)?, move |group| {
            // SAFETY: the caller's promise; it keeps all places until this call returns, and
            // `share` waits for every thread at work.
            let read = unsafe { read_all(pid, group) };
            read.map_err(|error| {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            })
            .is_ok()
        });
        let error = error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.map_or(Ok(()), Err)
    }

    /// Acts on all pieces until one says no, here and on other threads. No thread is at work on one
    /// when it returns.
    fn share<P: Send + 'static>(
        self: &Arc<Self>,
        pieces: Vec<P>,
        act: impl Fn(P) -> bool + Send + Sync + 'static,
    ) {
        let helpers = pieces.len().min(self.threads).saturating_sub(1);
        let state = Mutex::new(Progress { pieces, at_work: 0 });
        let together = Arc::new(Together { state, ended: Condvar::new(), act: Box::new(act) });
        for _ in 0..helpers {
            let together = Arc::clone(&together);
            self.run(Box::new(move || together.work()));
        }
        together.work();
        let mut progress = together.progress();
        while progress.at_work > 0 {
            progress = together.ended.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
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
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const THREADS: usize = 2;

    fn pieces(from: &[u8], to: &mut [u8], len: usize) -> Vec<Piece> {
        let places = from.chunks(len).zip(to.chunks_mut(len));
        places
            .map(|(from, to)| Piece {
                from: from.as_ptr(),
                to: NonNull::from(to).cast(),
                len: from.len(),
            })
            .collect()
    }

    #[test]
    fn several_threads_copy_everything_once_and_stop_when_told() {
        let copiers = Copiers::new("copy", THREADS);
        let from: Vec<u8> = (0..40 << 20).map(|n: u32| (n >> 12).to_le_bytes()[0]).collect();
        let mut to = vec![0_u8; from.len()];
        // SAFETY: parts of two vectors, which outlive the call.
        unsafe { copiers.copy(pieces(&from, &mut to, 1 << 20), || false) };
        assert!(from == to);
        to.fill(0);
        let asked = AtomicUsize::new(0);
        let asked = Arc::new(asked);
        let stop = {
            let asked = Arc::clone(&asked);
            move || asked.fetch_add(1, Ordering::Relaxed) >= 4
        };
        // SAFETY: as above.
        unsafe { copiers.copy(pieces(&from, &mut to, 1 << 20), stop) };
        assert!(to.chunks(1 << 20).filter(|part| part[0] == 0 && part[1 << 19] == 0).count() >= 34);
        assert!(asked.load(Ordering::Relaxed) <= 4 + THREADS);
    }

    #[test]
    fn several_threads_read_everything_once_and_what_is_not_there_is_an_error() {
        let copiers = Copiers::new("copy", THREADS);
        let from: Vec<u8> = (0..40 << 20).map(|n: u32| (n >> 12).to_le_bytes()[0]).collect();
        let mut to = vec![0_u8; from.len()];
        let mut parts = |sizes: &[usize]| {
            let (mut parts, mut at) = (Vec::new(), 0);
            for &len in sizes {
                let address = from[at..].as_ptr().expose_provenance() as u64;
                parts.push(Part { address, to: to[at..].as_mut_ptr(), len });
                at += len;
            }
            assert_eq!(at, from.len());
            parts
        };
        let many = vec![5 << 10; 8 << 10];
        for sizes in [&[from.len()][..], &[1, 0, (30 << 20) - 1, 10 << 20], &many] {
            let parts = parts(sizes);
            // SAFETY: parts of two vectors, which outlive the call.
            unsafe { copiers.read(Pid::this(), parts) }.unwrap();
        }
        let mut wrong = parts(&[20 << 20, 20 << 20]);
        wrong[1].address = 4096;
        // SAFETY: as above.
        assert!(unsafe { copiers.read(Pid::this(), wrong) }.is_err());
        assert!(from == to);
    }

    #[test]
    fn every_job_is_run() {
        let copiers = Copiers::new("copy", THREADS);
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
