//! Memory that peers of this machine may map: a file without a name, and ranges of it.
//!
//! A range is touched once, which takes longer than with private memory, and is then used again and
//! again. Whoever has a range hands its place to one peer that writes it, or to any that read it. A
//! peer that went away in the middle of writing may still write, and a fork sees what is written
//! later: then the arena is *retired*. No range of it is used again, and it is freed with its last
//! one.
//!
//! *Invariant:* a range has one owner, and no bytes of a range change after its message was
//! delivered, except by that owner.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl, open};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::ftruncate;

use super::limits::Limits;

/// Addresses that an arena takes for each byte that may be in use: ranges have many sizes, and
/// none is moved.
const SPARE: usize = 8;

/// Arenas of a process that a fork makes its own.
const SLOTS: usize = 16;

/// How often this process has been forked.
static FORKS: AtomicU64 = AtomicU64::new(0);

static ARENAS: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];

/// A file without a name, mapped.
#[derive(Debug)]
pub struct Arena {
    file: OwnedFd,
    /// The same file, which cannot be written through it.
    read_only: OnceLock<OwnedFd>,
    start: NonNull<u8>,
    len: usize,
    /// Which of [`ARENAS`] it has.
    slot: usize,
    forks: u64,
    retired: AtomicBool,
    /// Bytes in use, of this and other arenas.
    budget: Arc<Budget>,
    places: Mutex<Places>,
}

/// How many bytes may be in use.
#[derive(Debug)]
pub struct Budget {
    limits: Arc<Limits>,
    used: AtomicUsize,
}

#[derive(Debug)]
struct Places {
    /// Bytes in use of this arena.
    used: usize,
    /// Where nothing is: lengths by offset. No two of them touch.
    free: BTreeMap<usize, usize>,
}

/// Part of an arena. Its bytes exist.
#[derive(Debug)]
pub struct Range {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
}

/// What a fork must know of an arena, without locks.
struct Slot {
    taken: AtomicBool,
    start: AtomicPtr<u8>,
    len: AtomicUsize,
    file: AtomicI32,
}

// SAFETY: the memory of an arena is accessed through its ranges alone, each of which has one owner.
unsafe impl Send for Arena {}
// SAFETY: as above; everything else in it is for many threads.
unsafe impl Sync for Arena {}

impl Budget {
    pub fn new(limits: &Arc<Limits>) -> Arc<Self> {
        Arc::new(Self { limits: Arc::clone(limits), used: AtomicUsize::new(0) })
    }

    /// In bytes.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, len: usize) -> bool {
        let more = |used: usize| used.checked_add(len).filter(|sum| *sum <= self.limits.keep());
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, len: usize) {
        self.used.fetch_sub(len, Ordering::Relaxed);
    }
}

impl Arena {
    /// With huge pages where the system is set so.
    pub fn new(budget: &Arc<Budget>) -> io::Result<Arc<Self>> {
        Self::with(budget, MmapAdvise::MADV_HUGEPAGE)
    }

    /// With small pages alone: of a range that is given back, who has pinned pages keeps their
    /// bytes. The kernel clears parts of huge pages before it splits them.
    pub fn with_small_pages(budget: &Arc<Budget>) -> io::Result<Arc<Self>> {
        Self::with(budget, MmapAdvise::MADV_NOHUGEPAGE)
    }

    fn with(budget: &Arc<Budget>, pages: MmapAdvise) -> io::Result<Arc<Self>> {
        static WATCH: Once = Once::new();
        WATCH.call_once(watch_forks);
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(c"cuda-cluster", flags)?;
        let len = budget.limits.keep().saturating_mul(SPARE).checked_next_multiple_of(1 << 21);
        let len = len.and_then(NonZeroUsize::new).ok_or(io::ErrorKind::OutOfMemory)?;
        ftruncate(&file, i64::try_from(len.get()).map_err(|_| io::ErrorKind::OutOfMemory)?)?;
        // Who maps it must not be hit by a signal because it has shrunk.
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL))?;
        let slot = ARENAS.iter().position(|slot| !slot.taken.swap(true, Ordering::Acquire));
        let slot = slot.ok_or(io::ErrorKind::QuotaExceeded)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        let forks = FORKS.load(Ordering::Acquire);
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let mapped = unsafe { mmap(None, len, protection, flags, &file, 0) };
        let start = mapped
            .inspect_err(|_| ARENAS[slot].taken.store(false, Ordering::Release))?
            .cast::<u8>();
        let len = len.get();
        // Refused only where no pages are huge.
        // SAFETY: the whole of the mapping.
        let _ = unsafe { madvise(start.cast(), len, pages) };
        ARENAS[slot].set(start.as_ptr(), len, file.as_raw_fd());
        let (retired, places) = (AtomicBool::new(false), Mutex::new(Places::new(len)));
        let (budget, read_only) = (Arc::clone(budget), OnceLock::new());
        Ok(Arc::new(Self { file, read_only, start, len, slot, forks, retired, budget, places }))
    }

    /// Its file, for a peer that is to read only: who has it can neither map it to write nor open
    /// it again to write, unless he may do everything.
    ///
    /// # Errors
    /// If the system refuses, such as without `/proc`.
    pub fn read_only(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(file) = self.read_only.get() {
            return Ok(file.as_fd());
        }
        fchmod(&self.file, Mode::S_IRUSR)?;
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(self.read_only.get_or_init(|| file).as_fd())
    }

    /// Whether nothing of it is used again.
    pub(super) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire) || self.has_been_forked()
    }

    fn has_been_forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Acquire)
    }

    /// A range of so many bytes, a multiple of a page, all touched. None beyond the budget.
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Range> {
        if self.is_retired() || !self.budget.take(len) {
            return None;
        }
        let offset = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            places.take(len)
        };
        let Some(offset) = offset else {
            self.budget.give_back(len);
            return None;
        };
        let range = Range { arena: Arc::clone(self), offset, len };
        // SAFETY: it is a range of the mapping.
        let touched =
            unsafe { madvise(range.start().cast(), len, MmapAdvise::MADV_POPULATE_WRITE) };
        // Before Linux 5.14, pages are touched when they are written.
        matches!(touched, Ok(()) | Err(nix::errno::Errno::EINVAL)).then_some(range)
    }

    /// Gives bytes back to the system. By the mapping, because UCX watches that, and forgets what
    /// it knows of the pages.
    fn punch(&self, offset: usize, len: usize) -> bool {
        // SAFETY: a part of the mapping, to which nobody refers.
        let start = unsafe { self.start.add(offset) };
        // SAFETY: as above.
        if unsafe { madvise(start.cast(), len, MmapAdvise::MADV_REMOVE) }.is_ok() {
            return true;
        }
        // Locked memory is not removed in this way.
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
            return false;
        };
        fallocate(&self.file, flags, offset, len).is_ok()
    }
}

impl Places {
    fn new(len: usize) -> Self {
        Self { used: 0, free: BTreeMap::from([(0, len)]) }
    }

    /// The first place that is large enough.
    fn take(&mut self, len: usize) -> Option<usize> {
        let (&offset, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&offset);
        if room > len {
            self.free.insert(offset + len, room - len);
        }
        self.used += len;
        Some(offset)
    }

    fn give_back(&mut self, mut offset: usize, len: usize) {
        self.used -= len;
        let mut end = offset + len;
        if let Some(after) = self.free.remove(&end) {
            end += after;
        }
        if let Some((&before, &room)) = self.free.range(..offset).next_back()
            && before + room == offset
        {
            offset = before;
        }
        self.free.insert(offset, end - offset);
    }
}

impl Range {
    /// Where it lies in this process.
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: a range lies within the arena's mapping.
        unsafe { self.arena.start.add(self.offset) }
    }

    /// In bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where it lies in its arena.
    pub(super) fn place(&self) -> (&Arc<Arena>, usize) {
        (&self.arena, self.offset)
    }

    /// A peer may write it at any time from now on.
    pub(super) fn retire_arena(&self) {
        self.arena.retired.store(true, Ordering::Release);
    }

    pub(super) fn is_retired(&self) -> bool {
        self.arena.is_retired()
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let arena = &self.arena;
        if arena.is_retired() || !arena.punch(self.offset, self.len) {
            // Its bytes go with the arena.
            return;
        }
        arena.budget.give_back(self.len);
        let mut places = arena.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.give_back(self.offset, self.len);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.has_been_forked() {
            // Peers may have it mapped for a while.
            self.punch(0, self.len);
        }
        ARENAS[self.slot].clear();
        // SAFETY: the whole of the mapping; nobody has a range of it any more.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
        let places = self.places.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.budget.give_back(places.used);
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            start: AtomicPtr::new(std::ptr::null_mut()),
            len: AtomicUsize::new(0),
            file: AtomicI32::new(-1),
        }
    }

    fn set(&self, start: *mut u8, len: usize, file: c_int) {
        self.len.store(len, Ordering::Relaxed);
        self.file.store(file, Ordering::Relaxed);
        self.start.store(start, Ordering::Release);
    }

    fn clear(&self) {
        self.start.store(std::ptr::null_mut(), Ordering::Release);
        self.taken.store(false, Ordering::Release);
    }
}

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

fn watch_forks() {
    // SAFETY: both functions do only what is permitted in the child of a process with threads.
    let _ = unsafe { pthread_atfork(Some(before_fork), None, Some(in_child)) };
}

/// What Python sees at this moment must stay as it is, because the fork will see it, too.
unsafe extern "C" fn before_fork() {
    FORKS.fetch_add(1, Ordering::AcqRel);
}

/// What a fork writes is its own.
unsafe extern "C" fn in_child() {
    for slot in &ARENAS {
        let start = slot.start.load(Ordering::Acquire);
        if start.is_null() {
            continue;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let (len, file) = (slot.len.load(Ordering::Relaxed), slot.file.load(Ordering::Relaxed));
        // SAFETY: the mapping of the same bytes is replaced, as a whole.
        unsafe { libc::mmap(start.cast(), len, protection, flags, file, 0) };
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::sys::mman::mprotect;

    use super::*;

    const MIB: usize = 1 << 20;

    fn fill(range: &Range, byte: u8) {
        // SAFETY: the range is writable, and nobody else has it.
        unsafe { range.start().write_bytes(byte, range.len()) };
    }

    fn bytes(range: &Range) -> &[u8] {
        // SAFETY: the range is readable, and nobody writes it.
        unsafe { std::slice::from_raw_parts(range.start().as_ptr(), range.len()) }
    }

    #[test]
    fn a_range_that_is_gone_gives_its_bytes_back_and_its_place_is_used_again() {
        let budget = Budget::new(&Limits::new(2 * MIB));
        let arena = Arena::new(&budget).unwrap();
        let one = arena.take(MIB).unwrap();
        fill(&one, 1);
        let other = arena.take(MIB).unwrap();
        assert!(arena.take(4096).is_none(), "beyond the budget");
        let place = one.place().1;
        assert_ne!(place, other.place().1);
        drop(one);
        assert_eq!(budget.used(), MIB);
        let again = arena.take(MIB).unwrap();
        assert_eq!(again.place().1, place);
        assert!(bytes(&again).iter().all(|byte| *byte == 0), "new pages");
    }

    #[test]
    fn places_are_apart_and_all_of_them_together_are_whole_again() {
        let mut places = Places::new(10);
        let taken: Vec<usize> = (1..=4).map(|len| places.take(len).unwrap()).collect();
        assert_eq!(taken, [0, 1, 3, 6]);
        assert_eq!(places.take(1), None);
        for at in [1, 3, 0, 2] {
            places.give_back(taken[at], at + 1);
        }
        assert_eq!((places.used, places.free), (0, BTreeMap::from([(0, 10)])));
    }

    #[test]
    fn the_file_for_readers_cannot_be_written() {
        let budget = Budget::new(&Limits::new(8 * MIB));
        let arena = Arena::new(&budget).unwrap();
        let file = arena.read_only().unwrap().try_clone_to_owned().unwrap();
        let len = NonZeroUsize::new(MIB).unwrap();
        let map = |protection| {
            // SAFETY: a new mapping, at a place of the kernel's choice.
            unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, &file, 0) }
        };
        assert_eq!(map(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE), Err(Errno::EACCES));
        let mapped = map(ProtFlags::PROT_READ).unwrap();
        // SAFETY: the mapping, of which nobody refers to a byte.
        let made = unsafe { mprotect(mapped, MIB, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) };
        assert_eq!(made, Err(Errno::EACCES));
        // SAFETY: as above.
        unsafe { munmap(mapped, MIB) }.unwrap();
        assert!(fallocate(&file, FallocateFlags::empty(), 0, 1).is_err());
    }

    #[test]
    fn a_retired_arena_gives_nothing_out_and_is_freed_with_its_last_range() {
        let budget = Budget::new(&Limits::new(8 * MIB));
        let arena = Arena::new(&budget).unwrap();
        let (one, other) = (arena.take(MIB).unwrap(), arena.take(MIB).unwrap());
        fill(&other, 7);
        one.retire_arena();
        drop(one);
        assert!(arena.take(MIB).is_none());
        assert!(bytes(&other).iter().all(|byte| *byte == 7));
        assert_eq!(budget.used(), 2 * MIB, "someone may still write there");
        drop(arena);
        drop(other);
        assert_eq!(budget.used(), 0);
    }
}
