//! The arenas of peers, as this process has mapped them to write large frames there.
//!
//! What a process has written stays in its page tables, and so counts as its own memory. So that is
//! bounded, and nothing of it is left when it has not been used for a while.
//!
//! *Invariant:* only ranges that the peer has granted are written, within its file as it was when
//! it was mapped; the file cannot shrink.

use std::collections::HashMap;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::fstat;

use super::limits::Limits;
use super::pages::page_size;

/// How long page tables are kept that nobody uses.
const KEEP: Duration = Duration::from_secs(10);

/// A peer's arena.
#[derive(Debug)]
pub struct Mapped {
    start: NonNull<u8>,
    len: usize,
    touched: Mutex<Touched>,
}

#[derive(Debug)]
struct Touched {
    /// Where this process has written, and how many bytes.
    ranges: HashMap<usize, usize>,
    bytes: usize,
    last: Instant,
}

/// All of them, by file.
#[derive(Debug)]
pub struct Mappings {
    limits: Arc<Limits>,
    files: Mutex<HashMap<(u64, u64), Weak<Mapped>>>,
}

// SAFETY: the mapping is only written, in ranges that were granted for one message each.
unsafe impl Send for Mapped {}
// SAFETY: as above; everything else in it is for many threads.
unsafe impl Sync for Mapped {}

impl Mappings {
    /// No more bytes than it may hold stay in the page tables of this process.
    pub fn new(limits: &Arc<Limits>) -> Self {
        Self { limits: Arc::clone(limits), files: Mutex::default() }
    }

    /// The arena that a peer has sent.
    pub fn map(&self, file: &OwnedFd, now: Instant) -> io::Result<Arc<Mapped>> {
        let stat = fstat(file)?;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapped) = files.get(&(stat.st_dev, stat.st_ino)).and_then(Weak::upgrade) {
            return Ok(mapped);
        }
        let mapped = Arc::new(Mapped::new(file, stat.st_size, now)?);
        files.retain(|_, mapped| mapped.strong_count() > 0);
        files.insert((stat.st_dev, stat.st_ino), Arc::downgrade(&mapped));
        Ok(mapped)
    }

    /// Forgets page tables that have not been used. The time of the next that may be.
    pub fn trim(&self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        for mapped in self.all() {
            let touched = mapped.touched();
            if touched.bytes == 0 {
                continue;
            }
            let due = touched.last + KEEP;
            drop(touched);
            if due <= now {
                mapped.forget();
            } else {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next
    }

    /// Bytes in the page tables.
    pub fn touched(&self) -> usize {
        self.all().iter().map(|mapped| mapped.touched().bytes).sum()
    }

    /// Before `len` bytes are written to an arena: lets go of others, if it is too much.
    pub fn make_room(&self, this: &Arc<Mapped>, len: usize) {
        let mut all = self.all();
        all.sort_by_key(|mapped| (Arc::ptr_eq(mapped, this), mapped.touched().last));
        let mut sum: usize = all.iter().map(|mapped| mapped.touched().bytes).sum();
        let mut excess = self.limits.excess(len);
        for mapped in all {
            if sum.saturating_add(len) <= self.limits.keep() && excess == 0 {
                return;
            }
            let forgotten = mapped.forget();
            sum -= forgotten;
            excess = excess.saturating_sub(forgotten);
        }
    }

    /// Takes so many bytes out of the page tables, those first that have not been used for longest.
    pub fn free_up(&self, mut bytes: usize) {
        let mut all = self.all();
        all.sort_by_key(|mapped| mapped.touched().last);
        for mapped in all {
            if bytes == 0 {
                return;
            }
            bytes = bytes.saturating_sub(mapped.forget());
        }
    }

    fn all(&self) -> Vec<Arc<Mapped>> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.values().filter_map(Weak::upgrade).collect()
    }
}

/// The length of a peer's file, which cannot shrink.
///
/// # Errors
/// If it can.
pub(super) fn sealed_length(file: &OwnedFd, size: i64) -> io::Result<NonZeroUsize> {
    let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text);
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
    if !seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK)) {
        return Err(wrong("the peer's memory may shrink"));
    }
    let len = usize::try_from(size).ok().and_then(NonZeroUsize::new);
    len.ok_or_else(|| wrong("the peer's memory is empty"))
}

impl Mapped {
    fn new(file: &OwnedFd, size: i64, now: Instant) -> io::Result<Self> {
        let len = sealed_length(file, size)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let start = unsafe { mmap(None, len, protection, flags, file, 0) }?;
        let len = len.get();
        // SAFETY: the whole of the mapping.
        let _ = unsafe { madvise(start, len, MmapAdvise::MADV_DONTFORK) };
        let touched = Touched { ranges: HashMap::new(), bytes: 0, last: now };
        Ok(Self { start: start.cast(), len, touched: Mutex::new(touched) })
    }

    /// Where `len` bytes at `offset` are to be written, if there are as many. Their pages are in
    /// the page tables then, which takes less time all at once.
    pub fn place(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        offset.checked_add(len).filter(|end| *end <= self.len)?;
        // SAFETY: within the mapping, as was just checked.
        let start = unsafe { self.start.add(offset) };
        let mut touched = self.touched();
        touched.last = Instant::now();
        let before = touched.ranges.insert(offset, len).unwrap_or(0);
        touched.bytes = touched.bytes - before + len;
        drop(touched);
        if before < len && offset.is_multiple_of(page_size()) {
            // SAFETY: within the mapping, whose end is the end of a page.
            let _ = unsafe { madvise(start.cast(), len, MmapAdvise::MADV_POPULATE_WRITE) };
        }
        Some(start)
    }

    /// Takes it out of the page tables: how many bytes.
    fn forget(&self) -> usize {
        let mut touched = self.touched();
        touched.ranges.clear();
        // SAFETY: the whole of the mapping; its bytes stay in the file.
        let _ = unsafe { madvise(self.start.cast(), self.len, MmapAdvise::MADV_DONTNEED) };
        std::mem::take(&mut touched.bytes)
    }

    fn touched(&self) -> std::sync::MutexGuard<'_, Touched> {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the whole of the mapping, of which nobody has a part any more.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::memory::arena::{Arena, Budget};

    fn arena() -> (Arc<Arena>, OwnedFd) {
        let arena = Arena::new(&Budget::new(&Limits::new(8 << 20))).unwrap();
        let file = arena.as_fd().try_clone_to_owned().unwrap();
        (arena, file)
    }

    #[test]
    fn what_is_written_is_seen_by_whoever_granted_it_and_nothing_beyond_is_written() {
        let (arena, file) = arena();
        let range = arena.take(1 << 20).unwrap();
        let mappings = Mappings::new(&Limits::new(8 << 20));
        let mapped = mappings.map(&file, Instant::now()).unwrap();
        assert!(Arc::ptr_eq(&mapped, &mappings.map(&file, Instant::now()).unwrap()));
        let offset = range.place().1 as u64;
        let at = mapped.place(offset, range.len()).unwrap();
        // SAFETY: it was granted, as it were.
        unsafe { at.write_bytes(9, range.len()) };
        // SAFETY: the range is readable.
        assert_eq!(unsafe { range.start().add(range.len() - 1).read() }, 9);
        for (offset, len) in [(64 * (8 << 20), 1), (0, usize::MAX), (u64::MAX, 1)] {
            assert_eq!(mapped.place(offset, len), None, "{offset} {len}");
        }
    }

    #[test]
    fn what_counts_as_memory_of_this_process_is_bounded_and_goes_when_it_is_not_used() {
        let arenas = [arena(), arena()];
        let ranges = [arenas[0].0.take(2 << 20).unwrap(), arenas[1].0.take(2 << 20).unwrap()];
        let mappings = Mappings::new(&Limits::new(3 << 20));
        let now = Instant::now();
        let mapped = [&arenas[0].1, &arenas[1].1].map(|file| mappings.map(file, now).unwrap());
        for (mapped, range) in mapped.iter().zip(&ranges) {
            mappings.make_room(mapped, range.len());
            mapped.place(range.place().1 as u64, range.len()).unwrap();
            assert_eq!(mappings.touched(), 2 << 20);
        }
        assert!(mappings.trim(now).is_some());
        assert_eq!(mappings.trim(Instant::now() + KEEP), None);
        assert_eq!(mappings.touched(), 0);
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(Mappings::new(&Limits::new(1 << 20)).map(&file.into(), Instant::now()).is_err());
    }
}
