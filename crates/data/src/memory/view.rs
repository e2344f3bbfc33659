//! Memory of peers, read in place.
//!
//! A peer says where in its arena some bytes are, and leaves them as they are until it is told that
//! nobody reads them any more. If it needs the memory before, the bytes are *detached*: copied, and
//! the copy takes their place at the same addresses, so that whoever reads them notices nothing.
//!
//! What has been read stays in the page tables for a while, and so counts as memory of this
//! process: peers use their memory again, and then there is no fault for each 64 KiB.
//!
//! When a peer dies, its file stays, with all that was in it, as long as any process has it mapped.
//! So what is viewed of it is detached, too.
//!
//! *Invariant:* the bytes of a view stay as they were when it was made, if the peer does what it
//! says, as it could also run code here by what it sends; and nothing can be written through it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use nix::sys::stat::fstat;

use super::lease::Lease;
use super::mapping::Mapping;
use super::pages::page_size;
use super::pool::KEEP;

/// At least so many bytes are detached at once, and a 16th of a view: so much memory is needed
/// twice. Each piece is a mapping of its own afterwards, and the kernel limits their number.
const CHUNK: usize = 4 << 20;

/// The arenas of all peers, by file.
#[derive(Debug, Default)]
pub(super) struct Views {
    files: Mutex<HashMap<(u64, u64), Arc<Viewed>>>,
    idle: Arc<Idle>,
}

/// What the arenas have in common.
#[derive(Default)]
struct Idle {
    /// In the page tables, and not in use.
    bytes: AtomicUsize,
    /// In use, and not detached.
    used: AtomicUsize,
    /// Called when there is something to [`Views::trim`].
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A peer's arena, mapped for reading.
#[derive(Debug)]
pub struct Viewed {
    /// None once the peer is dead, and what is still viewed is detached.
    file: Mutex<Option<OwnedFd>>,
    /// Only read, and by views alone, whose bytes nobody writes.
    mapping: Mapping,
    /// By offset. Those in use do not overlap.
    parts: Mutex<BTreeMap<usize, Part>>,
    idle: Arc<Idle>,
}

/// A part that is read, or was read not long ago.
#[derive(Debug)]
struct Part {
    len: usize,
    /// How many views there are.
    users: u32,
    /// Whether it is a copy.
    detached: bool,
    /// Whether a thread is taking it out of the page tables, or the copy out of its place: until
    /// then there is nothing else.
    leaving: bool,
    /// When it was last used.
    since: Instant,
}

/// Bytes of a peer. The peer is told by the lease when it is dropped.
pub struct View {
    viewed: Arc<Viewed>,
    offset: usize,
    len: usize,
    /// Dropped after the view has ended.
    _lease: Lease,
}

impl std::fmt::Debug for Idle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Idle").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Idle {
    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }
}

impl Views {
    /// The arena that a peer has sent.
    ///
    /// # Errors
    /// If its file may shrink, or cannot be mapped.
    pub(super) fn map(&self, file: OwnedFd) -> io::Result<Arc<Viewed>> {
        let stat = fstat(&file)?;
        let mut files = self.files();
        let known = files.get(&(stat.st_dev, stat.st_ino));
        // A dead peer's number may be another's now.
        if let Some(viewed) = known.filter(|viewed| viewed.file().is_some()) {
            return Ok(Arc::clone(viewed));
        }
        let viewed = Arc::new(Viewed::new(file, stat.st_size, Arc::clone(&self.idle))?);
        files.insert((stat.st_dev, stat.st_ino), Arc::clone(&viewed));
        drop(files);
        // It is to be forgotten, some time after its last use.
        self.idle.wake();
        Ok(viewed)
    }

    /// Bytes that are in the page tables, and not in use.
    pub(super) fn idle(&self) -> usize {
        self.idle.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of peers that are viewed, whether they have been read yet or not.
    pub(super) fn used(&self) -> usize {
        self.idle.used.load(Ordering::Relaxed)
    }

    /// Calls this when there is something to trim again.
    pub(super) fn wake_with(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.idle.wake.set(Box::new(wake));
    }

    /// Forgets until no more than this many bytes are idle, those first that have been so for
    /// longest.
    pub(super) fn shrink(&self, most: usize) {
        while self.idle() > most {
            let all: Vec<_> = self.files().values().cloned().collect();
            let oldest = all.iter().filter_map(|viewed| Some((viewed.oldest()?, viewed)));
            let Some((since, viewed)) = oldest.min_by_key(|(since, _)| *since) else { return };
            viewed.forget_before(since);
        }
    }

    /// Forgets what has been idle for [`KEEP`]. The time of the next part that may be, or the
    /// next arena.
    pub(super) fn trim(&self, now: Instant) -> Option<Instant> {
        let all: Vec<_> = self.files().values().cloned().collect();
        for viewed in &all {
            if let Some(limit) = now.checked_sub(KEEP) {
                viewed.forget_before(limit);
            }
        }
        drop(all);
        let mut files = self.files();
        // One that nobody else has gets no views while the lock is held.
        files.retain(|_, viewed| Arc::strong_count(viewed) > 1 || !viewed.parts().is_empty());
        let oldest = files.values().map(|viewed| viewed.oldest().unwrap_or(now));
        oldest.min().map(|since| since + KEEP)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<(u64, u64), Arc<Viewed>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Viewed {
    fn new(file: OwnedFd, size: i64, idle: Arc<Idle>) -> io::Result<Self> {
        let mapping = Mapping::new(&file, size, ProtFlags::PROT_READ)?;
        let (file, parts) = (Mutex::new(Some(file)), Mutex::default());
        Ok(Self { file, mapping, parts, idle })
    }

    fn file(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes at a place that the peer has told, and leaves as they are until the lease is
    /// dropped. None if they are not all there, or others are still read in their place.
    pub fn view(self: &Arc<Self>, offset: u64, len: usize, lease: Lease) -> Option<View> {
        let offset = usize::try_from(offset).ok().filter(|at| at.is_multiple_of(page_size()))?;
        let whole = len.checked_next_multiple_of(page_size()).filter(|whole| *whole > 0)?;
        let end = offset.checked_add(whole).filter(|end| *end <= self.mapping.len())?;
        let mut parts = self.parts();
        self.file().as_ref()?;
        let near = parts.range(..end).rev();
        let met: Vec<usize> = near
            .map_while(|(at, part)| (at + part.len > offset).then_some((*at, part)))
            .map(|(at, _)| at)
            .collect();
        let is_same = |at: usize, part: &Part| at == offset && part.len == whole && !part.detached;
        let is_taken =
            |at: usize, part: &Part| part.leaving || part.users > 0 && !is_same(at, part);
        if met.iter().any(|at| is_taken(*at, &parts[at])) {
            return None;
        }
        for at in met.into_iter().filter(|at| !is_same(*at, &parts[at])).collect::<Vec<_>>() {
            let gone = parts.remove(&at).map_or(0, |part| part.len);
            self.idle.remove(gone);
            self.mapping.forget(at, gone);
        }
        if parts.get(&offset).is_some_and(Part::is_idle) {
            self.idle.remove(whole);
        }
        let since = Instant::now();
        let new = Part { len: whole, users: 0, detached: false, leaving: false, since };
        let part = parts.entry(offset).or_insert(new);
        if part.users == 0 {
            self.idle.used.fetch_add(whole, Ordering::Relaxed);
        }
        part.users += 1;
        drop(parts);
        Some(View { viewed: Arc::clone(self), offset, len, _lease: lease })
    }

    /// Copies what is viewed at a place, and puts the copy there: afterwards the peer may change or
    /// free its own. Does nothing if it is viewed no more.
    ///
    /// # Errors
    /// If there is no memory. Then part of it may be a copy.
    pub fn detach(&self, offset: u64) -> io::Result<()> {
        let Ok(offset) = usize::try_from(offset) else { return Ok(()) };
        let len = {
            let mut parts = self.parts();
            let is_viewed = |part: &&mut Part| part.users > 0 && !part.leaving;
            let Some(part) = parts.get_mut(&offset).filter(is_viewed) else { return Ok(()) };
            // It must not go meanwhile.
            part.users += 1;
            if !std::mem::replace(&mut part.detached, true) {
                self.idle.used.fetch_sub(part.len, Ordering::Relaxed);
            }
            part.len
        };
        let chunk = CHUNK.max(len / 16).next_multiple_of(page_size());
        let chunks = (0..len).step_by(chunk);
        let result = chunks
            .map(|at| (offset + at, chunk.min(len - at)))
            .try_for_each(|(at, len)| self.replace(at, len));
        self.end(offset);
        result
    }

    /// Puts a copy of some bytes in their place.
    fn replace(&self, offset: usize, len: usize) -> io::Result<()> {
        let whole = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let copy = unsafe { mmap_anonymous(None, whole, protection, MapFlags::MAP_PRIVATE) }?;
        let place = self.mapping.at(offset);
        // SAFETY: both are so many bytes long; nobody writes the first, or knows the second.
        unsafe { place.copy_to_nonoverlapping(copy.cast(), len) };
        // SAFETY: the copy, which nobody knows, takes the place of a part of this mapping with the
        // same bytes. The kernel lets no other thread see the place between the two.
        let moved = unsafe {
            mprotect(copy, len, ProtFlags::PROT_READ)
                .and_then(|()| move_pages(copy.cast(), len, place))
        };
        if let Err(error) = moved {
            // SAFETY: the copy is still where it was made, and nobody knows it.
            let _ = unsafe { munmap(copy, len) };
            return Err(error.into());
        }
        self.mapping.advise(offset, len, MmapAdvise::MADV_DONTFORK);
        Ok(())
    }

    /// A view has ended.
    fn end(&self, offset: usize) {
        let mut parts = self.parts();
        let Some(part) = parts.get_mut(&offset) else { return };
        if part.users > 1 {
            part.users -= 1;
            return;
        }
        if !part.detached {
            part.users = 0;
            part.since = Instant::now();
            self.idle.used.fetch_sub(part.len, Ordering::Relaxed);
            self.idle.bytes.fetch_add(part.len, Ordering::Relaxed);
            drop(parts);
            self.idle.wake();
            return;
        }
        let len = part.len;
        part.leaving = true;
        // Unmapping takes time.
        drop(parts);
        if self.restore(offset, len).is_ok() {
            self.parts().remove(&offset);
        }
    }

    /// Puts the peer's memory in the place of a copy, which is gone then; nothing if the peer is
    /// dead.
    fn restore(&self, offset: usize, len: usize) -> io::Result<()> {
        let file = self.file();
        let Some(file) = &*file else { return self.seclude(offset, len) };
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        let place = Some(self.mapping.at(offset).addr());
        let whole = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let from = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a part of this mapping, to which nobody refers, is mapped as it was at first.
        unsafe { mmap(place, whole, ProtFlags::PROT_READ, flags, file, from) }?;
        self.mapping.advise(offset, len, MmapAdvise::MADV_DONTFORK);
        Ok(())
    }

    /// Leaves addresses of the mapping without memory, and keeps them.
    fn seclude(&self, offset: usize, len: usize) -> io::Result<()> {
        let Some(len) = NonZeroUsize::new(len) else { return Ok(()) };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        let place = Some(self.mapping.at(offset).addr());
        // SAFETY: a part of this mapping, to which nobody refers.
        unsafe { mmap_anonymous(place, len, ProtFlags::PROT_NONE, flags) }?;
        Ok(())
    }

    /// Lets go of the memory of a peer that is dead: of all of it, of which the views are a part.
    /// They are detached.
    ///
    /// # Errors
    /// If there is no memory. Then all of the peer's stays until the last view has ended.
    pub fn abandon(&self) -> io::Result<()> {
        let viewed: Vec<usize> = self.parts().keys().copied().collect();
        for offset in viewed {
            self.detach(offset as u64)?;
        }
        self.forget_idle();
        let parts = self.parts();
        let is_viewed = |part: &Part| part.users > 0 && !part.leaving;
        if parts.values().any(|part| is_viewed(part) && !part.detached) {
            // Viewed just now: by whom, if the peer is dead?
            return Ok(());
        }
        let mut file = self.file();
        let mut from = 0;
        for (&offset, part) in parts.iter().filter(|(_, part)| is_viewed(part)) {
            self.seclude(from, offset - from)?;
            from = offset + part.len;
        }
        self.seclude(from, self.mapping.len() - from)?;
        *file = None;
        Ok(())
    }

    /// When the part that has been idle for longest was last used.
    fn oldest(&self) -> Option<Instant> {
        let parts = self.parts();
        parts.values().filter(|part| part.is_idle()).map(|part| part.since).min()
    }

    /// Takes out of the page tables what has not been used since then.
    fn forget_before(&self, limit: Instant) {
        let mut old = Vec::new();
        for (offset, part) in &mut *self.parts() {
            if part.is_idle() && part.since <= limit {
                part.leaving = true;
                old.push((*offset, part.len));
            }
        }
        for (offset, len) in old {
            self.mapping.forget(offset, len);
            self.parts().remove(&offset);
            self.idle.remove(len);
        }
    }

    /// Forgets everything that is not in use: there will be no more of it.
    pub fn forget_idle(&self) {
        self.forget_before(Instant::now());
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<usize, Part>> {
        // No step between two changes of it can panic.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves the pages from one place to another, and unmaps what was there.
///
/// By the kernel's call itself: the function of the same name of a process that uses UCX may be
/// UCX's, which up to 1.13 did not pass on where to (ucm/event/event.c, `ucm_mremap`).
///
/// # Safety
/// Nobody refers to the first place, and nobody notices the change at the second.
unsafe fn move_pages(from: NonNull<u8>, len: usize, to: NonNull<u8>) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved =
        unsafe { libc::syscall(libc::SYS_mremap, from.as_ptr(), len, len, flags, to.as_ptr()) };
    Errno::result(moved).map(drop)
}

impl Drop for Viewed {
    fn drop(&mut self) {
        let idle = self.parts().values().filter(|part| part.is_idle()).map(|part| part.len).sum();
        self.idle.remove(idle);
    }
}

impl Part {
    fn is_idle(&self) -> bool {
        self.users == 0 && !self.leaving
    }
}

impl Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes of the mapping, which nobody writes as long as this is viewed: the
        // peer has said so, and who detaches them puts the same bytes there.
        unsafe {
            std::slice::from_raw_parts(self.viewed.mapping.at(self.offset).as_ptr(), self.len)
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.viewed.end(self.offset);
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("bytes", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Limits;
    use crate::memory::arena::{Arena, Budget, Range};

    const MIB: usize = 1 << 20;

    fn arena() -> Arc<Arena> {
        Arena::new(&Budget::new(&Limits::new(64 * MIB))).unwrap()
    }

    fn viewed(views: &Views, arena: &Arena) -> Arc<Viewed> {
        views.map(arena.read_only().unwrap().try_clone_to_owned().unwrap()).unwrap()
    }

    fn fill(range: &Range, byte: u8) {
        // SAFETY: the range is writable, and the test says who reads it.
        unsafe { range.start().write_bytes(byte, range.len()) };
    }

    fn at(range: &Range) -> u64 {
        range.place().1 as u64
    }

    fn view(viewed: &Arc<Viewed>, range: &Range) -> Option<View> {
        viewed.view(at(range), range.len(), Box::new(()))
    }

    fn all_are(view: &View, byte: u8) -> bool {
        view.iter().all(|other| *other == byte)
    }

    /// Whether they are no part of the peer's memory any more. Nobody may write them in any case.
    fn private(view: &View) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let address = view.as_ptr().addr();
        let line = maps.lines().find(|line| {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
            (from..to).contains(&address)
        });
        let line = line.unwrap();
        assert!(line.contains(" r--"), "{line}");
        !line.contains("memfd")
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn bytes_are_read_in_place_and_nothing_beyond_the_file_is() {
        let (views, arena) = (Views::default(), arena());
        let range = arena.take(3 * MIB).unwrap();
        fill(&range, 7);
        let viewed = viewed(&views, &arena);
        let one = view(&viewed, &range).unwrap();
        assert!(all_are(&one, 7) && !private(&one));
        let end = 8 * 64 * MIB as u64;
        for (offset, len) in [(end, MIB), (0, usize::MAX), (u64::MAX, 1), (1, MIB), (0, 0)] {
            assert!(viewed.view(offset, len, Box::new(())).is_none(), "{offset} {len}");
        }
        let told = Arc::new(());
        let lease = Box::new(Arc::clone(&told));
        let again = viewed.view(at(&range), 3 * MIB - 5, lease).unwrap();
        assert_eq!((again.len(), Arc::strong_count(&told)), (3 * MIB - 5, 2));
        drop(again);
        assert_eq!(Arc::strong_count(&told), 1, "the peer knows");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn detached_bytes_stay_as_they_were_and_nobody_else_is_shown_them() {
        let (views, arena) = (Views::default(), arena());
        let range = arena.take(9 * MIB).unwrap();
        fill(&range, 1);
        let viewed = viewed(&views, &arena);
        let [one, other] = [(); 2].map(|()| view(&viewed, &range).unwrap());
        let stop = Arc::new(AtomicUsize::new(0));
        let reader = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                while stop.load(Ordering::Relaxed) == 0 {
                    assert!(all_are(&one, 1));
                }
                one
            }
        });
        viewed.detach(at(&range)).unwrap();
        fill(&range, 2);
        assert!(all_are(&other, 1) && private(&other));
        stop.store(1, Ordering::Relaxed);
        let one = reader.join().unwrap();
        assert!(view(&viewed, &range).is_none(), "the old bytes are still there");
        drop(one);
        assert!(all_are(&other, 1));
        drop(other);
        let now = view(&viewed, &range).unwrap();
        assert!(all_are(&now, 2) && !private(&now));
        viewed.detach(at(&range) + (64 * MIB) as u64).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn what_is_not_used_is_forgotten_and_the_arena_with_it() {
        let (views, arena) = (Views::default(), arena());
        let [first, second] = [2, 3].map(|size| arena.take(size * MIB).unwrap());
        let viewed = viewed(&views, &arena);
        drop((view(&viewed, &first), view(&viewed, &second)));
        assert_eq!(views.idle(), 5 * MIB);
        let used = view(&viewed, &first).unwrap();
        assert_eq!(views.idle(), 3 * MIB);
        views.shrink(MIB);
        assert_eq!(views.idle(), 0);
        drop(used);
        // Other bytes in the same place.
        drop(viewed.view(at(&first), MIB, Box::new(())).unwrap());
        assert_eq!(views.idle(), MIB);
        let known = Arc::downgrade(&viewed);
        drop(viewed);
        let now = Instant::now();
        assert!(views.trim(now).is_some());
        assert!(known.upgrade().is_some());
        assert_eq!(views.trim(now + KEEP), None);
        assert!(known.upgrade().is_none() && views.idle() == 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn bytes_outlive_their_owner_and_nothing_else_of_it_stays() {
        let (views, arena) = (Views::default(), arena());
        let [first, second, third] = [(); 3].map(|()| arena.take(5 * MIB).unwrap());
        fill(&first, 5);
        fill(&third, 7);
        let viewed = viewed(&views, &arena);
        drop(view(&viewed, &second).unwrap());
        let [one, other] = [&first, &third].map(|range| view(&viewed, range).unwrap());
        let name = arena.read_only().unwrap().try_clone_to_owned().unwrap();
        let inode = fstat(&name).unwrap().st_ino;
        // As when a process is killed: it changes nothing any more.
        std::mem::forget(arena);
        viewed.abandon().unwrap();
        assert!(all_are(&one, 5) && all_are(&other, 7) && private(&one) && private(&other));
        assert!(view(&viewed, &first).is_none() && views.idle() == 0 && views.used() == 0);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_file = |line: &&str| line.contains(&format!(" {inode} "));
        assert!(!maps.lines().filter(of_file).any(|line| line.contains(" r--s ")), "{maps}");
        drop((one, first));
        assert!(all_are(&other, 7));
        drop(other);
        assert!(viewed.parts().is_empty());
        // Another arena may get the number of one that is gone.
        let again = views.map(name).unwrap();
        assert!(!Arc::ptr_eq(&again, &viewed));
        drop((again, second, third));
    }

    /// What is forgotten, viewed, detached and ended at the same time is never another's bytes.
    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn whatever_happens_at_once_a_view_shows_what_its_owner_had_there() {
        let (views, arena) = (Arc::new(Views::default()), arena());
        let viewed = viewed(&views, &arena);
        let stop = Arc::new(AtomicUsize::new(0));
        let forgetting = std::thread::spawn({
            let (viewed, stop) = (Arc::clone(&viewed), Arc::clone(&stop));
            move || {
                while stop.load(Ordering::Relaxed) == 0 {
                    viewed.forget_idle();
                }
            }
        });
        let work = |thread: u8| {
            let (viewed, arena) = (Arc::clone(&viewed), Arc::clone(&arena));
            std::thread::spawn(move || {
                let mut seen = 0;
                for round in 0..400_u32 {
                    let range = arena.take(MIB << (round % 3)).unwrap();
                    let byte = thread.wrapping_mul(100).wrapping_add((round % 97) as u8);
                    fill(&range, byte);
                    let Some(one) = view(&viewed, &range) else { continue };
                    let again = view(&viewed, &range).unwrap();
                    if round % 3 > 0 {
                        viewed.detach(at(&range)).unwrap();
                        // The owner has it back.
                        fill(&range, 255);
                    }
                    let late = std::thread::spawn({
                        let (viewed, place) = (Arc::clone(&viewed), at(&range));
                        move || viewed.detach(place).unwrap()
                    });
                    assert!(all_are(&one, byte), "{thread} {round}");
                    drop(one);
                    assert!(all_are(&again, byte), "{thread} {round}");
                    drop(again);
                    late.join().unwrap();
                    seen += 1;
                }
                seen
            })
        };
        let seen = [1, 2].map(work).map(|thread| thread.join().unwrap());
        stop.store(1, Ordering::Relaxed);
        forgetting.join().unwrap();
        assert!(seen.iter().all(|seen| *seen > 100), "{seen:?}");
        viewed.forget_idle();
        assert_eq!((views.idle(), views.used()), (0, 0));
    }
}
