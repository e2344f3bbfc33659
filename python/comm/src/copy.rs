//! Copies: from the memory of another process, with `process_vm_readv(2)`, and to memory that
//! another process has mapped, too.
//!
//! The kernel permits the first between processes of one user, unless Yama
//! (`kernel.yama.ptrace_scope`) or a container's filter forbids it: [`can_read`] tries.
//!
//! *Invariant:* only what the caller names is written.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nix::unistd::Pid;

use crate::peer::Barrier;
use crate::reader::Message;

/// Most bytes of one call, so that a copy that nobody waits for any more ends soon.
const PART: usize = 64 << 20;

/// Most parts of one call: the kernel takes no more.
const PARTS: usize = 1024;

/// Threads that copy at the same time. Two fill the memory bus of a small machine, and the event
/// loops of the workers need the processors, too.
const THREADS: usize = 2;

/// Whether this process can read the memory of that one, where `token` lies at `address`.
pub(crate) fn can_read(pid: Pid, address: u64, token: &[u8]) -> Result<(), Barrier> {
    if pid.as_raw() == 0 {
        return Err(Barrier::NoNumber);
    }
    let mut read = vec![0; token.len()];
    let part = Part { address, to: read.as_mut_ptr(), len: read.len() };
    // SAFETY: the vector is writable.
    let done = unsafe { read_all(pid, vec![part]) };
    match done {
        Ok(()) if read == token => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(Barrier::Forbidden),
        _ => Err(Barrier::NotThere),
    }
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

/// From this size on, in bytes, what is copied would push everything else out of a processor's own
/// cache, and its beginning out again before it is read.
pub(crate) const STREAMED: usize = 4 << 20;

/// Bytes to copy within the memory of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) from: *const u8,
    pub(crate) to: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: only addresses; whoever makes a copy of them promises what it needs.
unsafe impl Send for Piece {}

/// Copies past the caches.
///
/// A processor follows few pages at a time when it reads ahead, so several are copied in turns: on
/// one machine with 4 MiB pieces 10.9 GB/s instead of `memcpy`'s 6.8.
///
/// # Safety
///
/// `len` bytes must be readable and writable there, and the ranges must not overlap.
pub(crate) unsafe fn stream(Piece { from, to, len }: Piece) {
    let to = to.as_ptr();
    // SAFETY: both halves are parts of the whole.
    unsafe {
        let done = stream_pages(from, to, len);
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
}

/// As far as whole groups of pages go: how many bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn stream_pages(from: *const u8, to: *mut u8, len: usize) -> usize {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    const PAGE: usize = 4096;
    const TOGETHER: usize = 4;
    const LINE: usize = 64;
    const AHEAD: usize = 256;
    if !to.addr().is_multiple_of(16) {
        return 0;
    }
    let whole = len - len % (TOGETHER * PAGE);
    for group in (0..whole).step_by(TOGETHER * PAGE) {
        for line in (0..PAGE).step_by(LINE) {
            for page in (0..TOGETHER * PAGE).step_by(PAGE) {
                let at = group + page + line;
                // SAFETY: `at + LINE` is at most `whole`; `to` is aligned as streaming needs it.
                // What is prefetched need not exist.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
                    for part in (at..at + LINE).step_by(16) {
                        let bytes = _mm_loadu_si128(from.add(part).cast());
                        _mm_stream_si128(to.add(part).cast(), bytes);
                    }
                }
            }
        }
    }
    // Whoever is told that the bytes are there must see them.
    // SAFETY: every x86-64 processor has it.
    unsafe { _mm_sfence() };
    whole
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream_pages(_: *const u8, _: *mut u8, _: usize) -> usize {
    0
}

/// A copy that several threads make together.
struct Together {
    state: Mutex<Progress>,
    /// A thread has ended a piece.
    ended: Condvar,
    stop: Box<dyn Fn() -> bool + Send + Sync>,
}

struct Progress {
    pieces: Vec<Piece>,
    /// Threads that are copying.
    at_work: usize,
}

impl Together {
    fn work(&self) {
        let mut progress = self.progress();
        while let Some(piece) = progress.pieces.pop() {
            progress.at_work += 1;
            drop(progress);
            let stopped = (self.stop)();
            if !stopped {
                // SAFETY: `Copiers::copy`'s caller keeps all pieces until it returns, and it waits for
                // every thread at work.
                unsafe { stream(piece) };
            }
            progress = self.progress();
            progress.at_work -= 1;
            if stopped {
                progress.pieces.clear();
            }
            self.ended.notify_all();
        }
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

    /// Copies pieces, on this thread and on others that have nothing to do, past the caches. Gives up
    /// when `stop` says so.
    ///
    /// # Safety
    ///
    /// Each piece's bytes must be readable and writable, and no two may overlap.
    pub(crate) unsafe fn copy(
        self: &Arc<Self>,
        pieces: Vec<Piece>,
        stop: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let helpers = (pieces.len().saturating_sub(1)).min(THREADS - 1);
        let state = Mutex::new(Progress { pieces, at_work: 0 });
        let together = Together { state, ended: Condvar::new(), stop: Box::new(stop) };
        let together = Arc::new(together);
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
    use super::*;

    #[test]
    fn memory_is_read_where_a_token_lies_and_nowhere_else() {
        let token = [5_u8; 32];
        let at = token.as_ptr().addr() as u64;
        let own = Pid::this();
        assert_eq!(can_read(own, at, &token), Ok(()));
        let not_there = Err(Barrier::NotThere);
        assert_eq!(can_read(own, at, &[6; 32]), not_there, "another process's");
        assert_eq!(can_read(own, 8, &token), not_there, "nothing is there");
        assert_eq!(can_read(Pid::from_raw(i32::MAX), at, &token), not_there, "no such process");
        assert_eq!(can_read(Pid::from_raw(0), at, &token), Err(Barrier::NoNumber));
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
    fn a_copy_past_the_caches_is_a_copy_whatever_its_length_and_place() {
        let from: Vec<u8> =
            (0..100_000_u32).map(|n| n.to_le_bytes()[0] ^ (n >> 9).to_le_bytes()[0]).collect();
        for (start, len) in [(0, 100_000), (0, 16_384), (1, 16_383), (16, 70_001), (7, 0), (64, 50)]
        {
            for shift in [0, 1, 16] {
                let mut to = vec![255_u8; 100_064];
                let part = &mut to[shift..shift + len];
                let [piece] = pieces(&from[start..start + len], part, len.max(1))[..] else {
                    assert_eq!(len, 0);
                    continue;
                };
                // SAFETY: parts of two vectors.
                unsafe { stream(piece) };
                assert_eq!(
                    to[shift..shift + len],
                    from[start..start + len],
                    "{start} {len} {shift}"
                );
                let around = to[..shift].iter().chain(&to[shift + len..]);
                assert!(around.copied().all(|byte| byte == 255), "{start} {len} {shift}");
            }
        }
    }

    #[test]
    fn several_threads_copy_everything_once_and_stop_when_told() {
        let copiers = Arc::new(Copiers::default());
        let from: Vec<u8> = (0..40 << 20).map(|n: u32| (n >> 12).to_le_bytes()[0]).collect();
        let mut to = vec![0_u8; from.len()];
        // SAFETY: parts of two vectors, which outlive the call.
        unsafe { copiers.copy(pieces(&from, &mut to, 1 << 20), || false) };
        assert!(from == to);
        to.fill(0);
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let asked = Arc::new(asked);
        let stop = {
            let asked = Arc::clone(&asked);
            move || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 4
        };
        // SAFETY: as above.
        unsafe { copiers.copy(pieces(&from, &mut to, 1 << 20), stop) };
        assert!(to.chunks(1 << 20).filter(|part| part[0] == 0 && part[1 << 19] == 0).count() >= 34);
        assert!(asked.load(std::sync::atomic::Ordering::Relaxed) <= 4 + THREADS);
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
