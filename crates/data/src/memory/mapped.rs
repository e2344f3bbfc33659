//! The arenas of peers, as this process has mapped them to write large frames there.
//!
//! What a process has written stays in its page tables, and so counts as its own memory. So that is
//! bounded, and nothing of it is left when it has not been used for a while.
//!
//! *Invariant:* only ranges that the peer has granted are written, within its file as it was when
//! it was mapped; the file cannot shrink.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::sys::mman::{MmapAdvise, ProtFlags};
use nix::sys::stat::fstat;

use super::limits::Limits;
use super::mapping::Mapping;
use super::pages::page_size;

/// How long page tables are kept that nobody uses.
const KEEP: Duration = Duration::from_secs(10);

/// A peer's arena.
#[derive(Debug)]
pub struct Mapped {
    /// Only written, in ranges that were granted for one message each.
    mapping: Mapping,
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

impl Mapped {
    fn new(file: &OwnedFd, size: i64, now: Instant) -> io::Result<Self> {
        let mapping = Mapping::new(file, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        let touched = Touched { ranges: HashMap::new(), bytes: 0, last: now };
        Ok(Self { mapping, touched: Mutex::new(touched) })
    }

    /// Where `len` bytes at `offset` are to be written, if there are as many. Their pages are in
    /// the page tables then, which takes less time all at once.
    pub fn place(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        offset.checked_add(len).filter(|end| *end <= self.mapping.len())?;
        let mut touched = self.touched();
        touched.last = Instant::now();
        let before = touched.ranges.insert(offset, len).unwrap_or(0);
        touched.bytes = touched.bytes - before + len;
        drop(touched);
        if before < len && offset.is_multiple_of(page_size()) {
            self.mapping.advise(offset, len, MmapAdvise::MADV_POPULATE_WRITE);
        }
        Some(self.mapping.at(offset))
    }

    /// Takes it out of the page tables: how many bytes.
    fn forget(&self) -> usize {
        let mut touched = self.touched();
        touched.ranges.clear();
        self.mapping.forget(0, self.mapping.len());
        std::mem::take(&mut touched.bytes)
    }

    fn touched(&self) -> std::sync::MutexGuard<'_, Touched> {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner)
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
