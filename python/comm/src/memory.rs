//! Memory that messages are received into.
//!
//! Large blocks are regions of their own, which go back to a [`Pool`] when their last user is gone
//! and are given to the next message of that size: memory that has been touched costs no page
//! faults. What the pool keeps is bounded ([`Limits`]), and is returned to the system when it is not
//! used, or when the process has nearly as much memory as it may have.
//!
//! A region is private at first. One that is used again and again is replaced by one that peers may
//! map and write (`arena`): that takes longer to make than a private one, and pays only then.
//!
//! *Invariant:* a block has one owner, and its region is in the pool only after that owner is gone.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arena::{Arena, Budget, Range};
pub use limits::Limits;
use pages::Pages;

pub(crate) mod arena;
mod limits;
mod pages;

/// From this size on, in bytes, a block is a region of the pool. Smaller ones are the allocator's.
pub const POOLED: usize = 64 << 10;

/// How long the pool keeps a region that nobody asks for.
pub const KEEP: Duration = Duration::from_secs(10);

/// Regions from this size on, in bytes, are replaced by shared ones.
const SHARED: usize = 256 << 10;

/// After so many uses. Making a shared one takes about as long as is then saved by as many.
const USES: u32 = 3;

/// Regions that wait for their next use.
#[derive(Debug)]
pub struct Pool {
    /// The process whose threads take its lock; a fork of it may have been made while it was held.
    process: u32,
    limits: Arc<Limits>,
    free: Mutex<Free>,
    /// Whether regions are replaced by shared ones.
    shares: AtomicBool,
    /// Of shared regions, in the pool or not.
    budget: Arc<Budget>,
    shared: Mutex<Shared>,
    /// Called when there is something to [`Pool::trim`] again.
    wake: OnceLock<Wake>,
}

struct Wake(Box<dyn Fn() + Send + Sync>);

#[derive(Debug, Default)]
struct Shared {
    arena: Option<Arc<Arena>>,
    /// Sizes of regions to make. Not empty while a thread makes them.
    wanted: VecDeque<usize>,
}

#[derive(Debug, Default)]
struct Free {
    bytes: usize,
    /// By size, shared and private ones; those used last at the end.
    regions: BTreeMap<(usize, Kind), VecDeque<(Region, Instant)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Shared,
    Private,
}

#[derive(Debug)]
enum Region {
    Private { pages: Pages, uses: u32 },
    Shared(Range),
}

// SAFETY: a block is the only owner of its memory.
unsafe impl Send for Block {}
// SAFETY: shared references give an address alone.
unsafe impl Sync for Block {}

/// Writable memory of a length.
#[derive(Debug)]
pub struct Block {
    len: usize,
    from: From,
    /// A peer may be writing it.
    lent: bool,
}

#[derive(Debug)]
enum From {
    /// A box, of which this is the only pointer.
    Heap(NonNull<[u8]>),
    Pool(Option<Region>, Arc<Pool>),
}

/// The size of the region for so many bytes: at most an eighth larger, so that messages of similar
/// size share regions.
fn region_size(len: usize) -> Option<usize> {
    let step = (len.checked_next_power_of_two()? / 16).max(4096);
    len.checked_next_multiple_of(step)
}

impl std::fmt::Debug for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wake").finish_non_exhaustive()
    }
}

impl Region {
    fn private(len: usize) -> io::Result<Self> {
        Ok(Region::Private { pages: Pages::new(len)?, uses: 0 })
    }

    fn start(&self) -> NonNull<u8> {
        match self {
            Region::Private { pages, .. } => pages.start,
            Region::Shared(range) => range.start(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Region::Private { pages, .. } => pages.len,
            Region::Shared(range) => range.len(),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Region::Private { .. } => Kind::Private,
            Region::Shared(_) => Kind::Shared,
        }
    }

    /// Whether its bytes may be used for another message.
    fn is_usable(&self) -> bool {
        match self {
            Region::Private { .. } => true,
            Region::Shared(range) => !range.is_retired(),
        }
    }
}

impl Pool {
    /// A pool that keeps no more than it may for later use, and shares at most as many bytes.
    pub fn new(limits: &Arc<Limits>) -> Arc<Self> {
        Arc::new(Self {
            process: std::process::id(),
            limits: Arc::clone(limits),
            free: Mutex::default(),
            shares: AtomicBool::new(false),
            budget: Budget::new(limits),
            shared: Mutex::default(),
            wake: OnceLock::new(),
        })
    }

    /// A block of `len` bytes. What they are is not defined: another message may have been there.
    pub fn take(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        if len < POOLED {
            let bytes = NonNull::from(Box::leak(vec![0; len].into_boxed_slice()));
            return Ok(Block { len, from: From::Heap(bytes), lent: false });
        }
        let size = region_size(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let kept = self.free().take(size);
        let region = kept.map_or_else(|| self.make_private(size), Ok)?;
        Ok(Block { len, from: From::Pool(Some(region), Arc::clone(self)), lent: false })
    }

    fn make_private(&self, size: usize) -> io::Result<Region> {
        // What is kept of other sizes makes room.
        self.free_up(self.limits.excess_after(size, size));
        Region::private(size)
    }

    /// As [`Self::take`], where peers may write it if that is possible.
    pub fn take_shared(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        let size = region_size(len.max(POOLED)).ok_or(io::ErrorKind::OutOfMemory)?;
        let kept = self.free().take_kind(size, Kind::Shared);
        match kept.or_else(|| self.make_shared(size)) {
            Some(region) => {
                Ok(Block { len, from: From::Pool(Some(region), Arc::clone(self)), lent: false })
            }
            None => self.take(len),
        }
    }

    /// Calls this when the pool keeps something again: then it has to be trimmed, some time later.
    pub fn wake_with(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Wake(Box::new(wake)));
    }

    /// Whether memory can be shared at all.
    pub fn can_share(&self) -> bool {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        self.arena(&mut shared).is_some()
    }

    /// From now on, regions that are used often are replaced by shared ones.
    pub fn share(&self) {
        self.shares.store(true, Ordering::Relaxed);
    }

    /// Shared memory that exists, in bytes.
    pub fn shared(&self) -> usize {
        self.budget.used()
    }

    fn make_shared(&self, size: usize) -> Option<Region> {
        let arena = {
            let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(self.arena(&mut shared)?)
        };
        arena.take(size).map(Region::Shared)
    }

    fn arena<'a>(&self, shared: &'a mut Shared) -> Option<&'a Arc<Arena>> {
        if shared.arena.as_ref().is_none_or(|arena| arena.is_retired()) {
            shared.arena = Arena::new(&self.budget).ok();
        }
        shared.arena.as_ref()
    }

    /// A thread makes a shared region of this size for the pool, and perhaps more.
    fn want_shared(self: &Arc<Self>, size: usize) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.wanted.push_back(size);
        if shared.wanted.len() > 1 {
            return;
        }
        let pool = Arc::clone(self);
        let thread = std::thread::Builder::new().name("native memory".into());
        if thread.spawn(move || pool.make_wanted()).is_err() {
            shared.wanted.clear();
        }
    }

    fn make_wanted(&self) {
        let wanted = |done: bool| {
            let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
            if done {
                shared.wanted.pop_front();
            }
            shared.wanted.front().copied()
        };
        let mut next = wanted(false);
        while let Some(size) = next {
            let has_room = self.limits.excess(size) == 0;
            if let Some(region) = has_room.then(|| self.make_shared(size)).flatten() {
                // It takes the place of a private one.
                let replaced = self.free().take_kind(size, Kind::Private);
                drop(replaced);
                self.give_back(region);
            }
            next = wanted(true);
        }
    }

    /// Returns to the system what nobody has used for [`KEEP`]. The time of the next such region,
    /// if there is one.
    pub fn trim(&self, now: Instant) -> Option<Instant> {
        let mut free = self.free();
        let mut freed = Vec::new();
        free.regions.retain(|_, regions| {
            let old = regions.partition_point(|(_, since)| now.duration_since(*since) >= KEEP);
            freed.extend(regions.drain(..old).map(|(region, _)| region));
            !regions.is_empty()
        });
        free.bytes -= freed.iter().map(Region::len).sum::<usize>();
        let oldest = free.regions.values().filter_map(|regions| regions.front());
        oldest.map(|(_, since)| *since + KEEP).min()
    }

    /// Returns as many bytes to the system, those first that nobody has used for longest, and what it
    /// may not keep any more. How many it returned.
    pub fn free_up(&self, bytes: usize) -> usize {
        let mut freed = Vec::new();
        let mut sum = 0;
        {
            let mut free = self.free();
            while (sum < bytes || free.bytes > self.limits.keep())
                && let Some(oldest) = free.take_oldest()
            {
                sum += oldest.len();
                freed.push(oldest);
            }
        }
        // Unmapping takes time: not under the lock.
        drop(freed);
        sum
    }

    /// What it keeps, in bytes.
    pub fn kept(&self) -> usize {
        self.free().bytes
    }

    fn give_back(&self, region: Region) {
        if std::process::id() != self.process {
            // The parent's region, of which a fork has a copy.
            std::mem::forget(region);
            return;
        }
        let len = region.len();
        if len > self.limits.keep() || !region.is_usable() {
            return;
        }
        let is_first = {
            let mut free = self.free();
            free.bytes += len;
            let key = (len, region.kind());
            free.regions.entry(key).or_default().push_back((region, Instant::now()));
            free.bytes == len
        };
        self.free_up(self.limits.excess_after(len, 0));
        if is_first && let Some(Wake(wake)) = self.wake.get() {
            wake();
        }
    }

    /// A region whose block is gone.
    fn used(self: &Arc<Self>, mut region: Region, lent: bool) {
        match &mut region {
            Region::Private { uses, pages } => {
                *uses += 1;
                let (uses, len) = (*uses, pages.len);
                self.give_back(region);
                if uses.is_multiple_of(USES) && len >= SHARED && self.shares.load(Ordering::Relaxed)
                {
                    self.want_shared(len);
                }
            }
            Region::Shared(range) => {
                if lent {
                    range.retire_arena();
                }
                self.give_back(region);
            }
        }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    fn take(&mut self, size: usize) -> Option<Region> {
        self.take_kind(size, Kind::Shared).or_else(|| self.take_kind(size, Kind::Private))
    }

    fn take_kind(&mut self, size: usize, kind: Kind) -> Option<Region> {
        loop {
            // The one used last is the likeliest to be in the processor's caches.
            let region = self.remove((size, kind), VecDeque::pop_back)?;
            if region.is_usable() {
                return Some(region);
            }
        }
    }

    fn take_oldest(&mut self) -> Option<Region> {
        let since = |regions: &VecDeque<(Region, Instant)>| regions.front().map(|(_, at)| *at);
        let oldest = self.regions.iter().min_by_key(|(_, regions)| since(regions));
        let key = *oldest?.0;
        self.remove(key, VecDeque::pop_front)
    }

    fn remove(
        &mut self,
        key: (usize, Kind),
        one: impl FnOnce(&mut VecDeque<(Region, Instant)>) -> Option<(Region, Instant)>,
    ) -> Option<Region> {
        let regions = self.regions.get_mut(&key)?;
        let (region, _) = one(regions)?;
        self.bytes -= key.0;
        if regions.is_empty() {
            self.regions.remove(&key);
        }
        Some(region)
    }
}

impl Block {
    /// In bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies. It stays there as long as the block lives.
    pub fn start(&self) -> NonNull<u8> {
        match &self.from {
            From::Heap(bytes) => bytes.cast(),
            From::Pool(Some(region), _) => region.start(),
            From::Pool(None, _) => NonNull::dangling(),
        }
    }

    /// Where a peer may write it, if it may: the arena, and the place there.
    pub(crate) fn shared(&self) -> Option<(&Arc<Arena>, usize)> {
        match &self.from {
            From::Pool(Some(Region::Shared(range)), _) if !range.is_retired() => {
                Some(range.place())
            }
            _ => None,
        }
    }

    /// Whether a peer may be writing it. If it is dropped meanwhile, its bytes are never used again.
    pub(crate) fn lend(&mut self, lent: bool) {
        self.lent = lent;
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block owns `len` bytes from `start` on, which the kernel or the allocator has
        // filled with zeros and messages with other bytes; nobody else in this process refers to
        // them. A peer that has mapped them writes only while they are lent to it, and they are
        // used only after it has said that it is done: one that does not behave could change them
        // at any time, as it could run code here by any message that it sends to Dask.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &mut self.from {
            // SAFETY: it was leaked by `Pool::take`, and its owner is gone.
            From::Heap(bytes) => drop(unsafe { Box::from_raw(bytes.as_ptr()) }),
            From::Pool(region, pool) => {
                if let Some(region) = region.take() {
                    pool.used(region, self.lent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
