//! Host memory that is used again.
//!
//! Large blocks are regions of their own, which go back to a [`Pool`] when their last user is gone
//! and are given to the next one that needs so much. The kernel clears each page that it hands out,
//! and the first access to a new page costs a fault; in a virtual machine it can cost a second
//! one, in the hypervisor: then new memory is filled at a twentieth of the speed of memory that
//! was used before. What the pool keeps is bounded ([`Limits`]), and is returned to the system when
//! it is not used, or when the process has nearly as much memory as it may have.
//!
//! A region is private at first. One that is used again and again is replaced by one that peers may
//! map and write (`arena`): that takes longer to make than a private one, and pays only then.
//!
//! *Invariant:* a block has one owner, and its region is in the pool only after that owner is gone.

use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{Arena, Budget, Range};
use super::kept::{Kept, Piece};
use super::limits::Limits;
use super::pages::Pages;
use super::reserve::Reserve;
use super::sizes::Sizes;

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
    pub(super) limits: Arc<Limits>,
    pub(super) sizes: Sizes,
    free: Mutex<Kept<Region>>,
    /// Whether a region has been asked for since [`Pool::prepare`] began.
    pub(super) asked: AtomicBool,
    /// For regions that would be new otherwise.
    pub(super) reserve: Mutex<Option<Reserve>>,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Shared,
    Private,
}

#[derive(Debug)]
pub(super) enum Region {
    Private { pages: Pages, uses: u32 },
    Shared(Range),
}

// SAFETY: a block is the only owner of its memory.
unsafe impl Send for Block {}
// SAFETY: shared references only read it.
unsafe impl Sync for Block {}

/// Writable memory of a length.
#[derive(Debug)]
pub struct Block {
    len: usize,
    from: From,
    /// A peer may be writing it.
    lent: bool,
    /// Whether its bytes are never written again.
    spent: AtomicBool,
}

#[derive(Debug)]
enum From {
    /// A box, of which this is the only pointer.
    Heap(NonNull<[u8]>),
    Pool(Option<Region>, Arc<Pool>),
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
            Region::Private { pages, .. } => pages.start(),
            Region::Shared(range) => range.start(),
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

impl Piece for Region {
    type Kind = Kind;

    fn kind(&self) -> Kind {
        match self {
            Region::Private { .. } => Kind::Private,
            Region::Shared(_) => Kind::Shared,
        }
    }

    fn len(&self) -> usize {
        match self {
            Region::Private { pages, .. } => pages.len(),
            Region::Shared(range) => range.len(),
        }
    }
}

impl Pool {
    /// A pool that keeps no more than it may for later use, and shares at most as many bytes. Its
    /// regions have few sizes, so that they serve blocks of similar length, and arenas stay whole.
    pub fn new(limits: &Arc<Limits>) -> Arc<Self> {
        Self::with(limits, Sizes::Few)
    }

    /// As [`Self::new`], whose regions are as large as their first blocks: for who counts them.
    pub fn exact(limits: &Arc<Limits>) -> Arc<Self> {
        Self::with(limits, Sizes::Any)
    }

    fn with(limits: &Arc<Limits>, sizes: Sizes) -> Arc<Self> {
        Arc::new(Self {
            sizes,
            process: std::process::id(),
            limits: Arc::clone(limits),
            free: Mutex::default(),
            asked: AtomicBool::new(false),
            reserve: Mutex::default(),
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
            return Ok(Block::new(len, From::Heap(bytes)));
        }
        let size = self.sizes.of(len)?;
        let kept = self.kept_shared(size);
        let kept = kept.or_else(|| self.kept_region(Kind::Private, size));
        let kept = kept.or_else(|| self.split(size)).or_else(|| self.cut(size));
        let region = kept.map_or_else(|| self.make_private(size), Ok)?;
        Ok(Block::new(len, From::Pool(Some(region), Arc::clone(self))))
    }

    /// The first place to look in for a block.
    fn kept_shared(&self, size: usize) -> Option<Region> {
        self.asked.store(true, Ordering::Relaxed);
        self.kept_region(Kind::Shared, size)
    }

    /// A region that is kept. What cannot be used any more goes.
    fn kept_region(&self, kind: Kind, size: usize) -> Option<Region> {
        loop {
            let region = self.free().take(kind, size, self.sizes.most(size))?;
            if region.is_usable() {
                return Some(region);
            }
        }
    }

    fn make_private(&self, size: usize) -> io::Result<Region> {
        // What is kept of other sizes makes room.
        self.free_up(self.limits.excess_after(size, size));
        Region::private(size)
    }

    /// As [`Self::take`], where peers may write it if that is possible.
    pub fn take_shared(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        self.shared_block(len).map_or_else(|| self.take(len), Ok)
    }

    /// As [`Self::take_shared`], for which memory that is kept makes room.
    pub(super) fn take_shared_first(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        if let Some(block) = self.shared_block(len) {
            return Ok(block);
        }
        let would_fit = self.shared().saturating_sub(self.kept()).saturating_add(len);
        if would_fit > self.limits.keep() {
            return self.take(len);
        }
        self.free_up(len);
        self.take_shared(len)
    }

    fn shared_block(self: &Arc<Self>, len: usize) -> Option<Block> {
        let size = self.sizes.of(len.max(POOLED)).ok()?;
        let region = self.kept_shared(size).or_else(|| self.make_shared(size))?;
        Some(Block::new(len, From::Pool(Some(region), Arc::clone(self))))
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
            shared.arena = match self.sizes {
                Sizes::Few => Arena::new(&self.budget),
                Sizes::Any => Arena::with_small_pages(&self.budget),
            }
            .ok();
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
        let thread = std::thread::Builder::new().name("shared memory".into());
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
                let replaced = self.kept_region(Kind::Private, size);
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
        let idle = free.take_idle(now, KEEP);
        let next = free.oldest().map(|since| since + KEEP);
        drop(free);
        let (old, due) = self.trim_reserve(now);
        // Unmapping takes time: not under a lock.
        drop((idle, old));
        next.into_iter().chain(due).min()
    }

    /// Returns as many bytes to the system, those first that nobody has used yet or for longest,
    /// and what it may not keep any more. How many it returned.
    pub fn free_up(&self, bytes: usize) -> usize {
        self.release(bytes, self.limits.keep())
    }

    /// Returns bytes to the system until it keeps no more than this.
    pub fn shrink(&self, most: usize) {
        self.release(0, most);
    }

    fn release(&self, least: usize, most: usize) -> usize {
        let mut freed = Vec::new();
        let mut sum = 0;
        let unused = {
            let mut reserve = self.reserve();
            let touched = reserve.as_ref().map_or(0, Reserve::touched);
            let goes = least > 0 || self.free().bytes() + touched > most;
            sum += if goes { touched } else { 0 };
            if goes { reserve.take() } else { None }
        };
        {
            let mut free = self.free();
            while (sum < least || free.bytes() > most)
                && let Some(oldest) = free.take_oldest()
            {
                sum += oldest.len();
                freed.push(oldest);
            }
        }
        drop((freed, unused));
        sum
    }

    /// What it keeps, in bytes.
    pub fn kept(&self) -> usize {
        let touched = self.reserve().as_ref().map_or(0, Reserve::touched);
        self.free().bytes() + touched
    }

    pub(super) fn give_back(&self, region: Region) {
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
            free.keep(region, Instant::now());
            free.bytes() == len
        };
        self.free_up(self.limits.excess_after(len, 0));
        if is_first {
            self.wake();
        }
    }

    /// There is something to trim.
    pub(super) fn wake(&self) {
        if let Some(Wake(wake)) = self.wake.get() {
            wake();
        }
    }

    /// A region whose block is gone.
    fn used(self: &Arc<Self>, mut region: Region, lent: bool) {
        match &mut region {
            Region::Private { uses, pages } => {
                *uses += 1;
                let (uses, len) = (*uses, pages.len());
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

    pub(super) fn free(&self) -> std::sync::MutexGuard<'_, Kept<Region>> {
        // No step between two changes of it can panic.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Block {
    fn new(len: usize, from: From) -> Self {
        Self { len, from, lent: false, spent: AtomicBool::new(false) }
    }

    /// In bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Leaves out what is behind its first bytes.
    pub(super) fn cut(&mut self, len: usize) {
        // The length of a piece of the heap is with its pointer.
        self.len = self.len.min(len);
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
    pub fn shared(&self) -> Option<(&Arc<Arena>, usize)> {
        match &self.from {
            From::Pool(Some(Region::Shared(range)), _) if !range.is_retired() => {
                Some(range.place())
            }
            _ => None,
        }
    }

    /// Whether a peer may be writing it. If it is dropped meanwhile, its bytes are never used
    /// again.
    pub fn lend(&mut self, lent: bool) {
        self.lent = lent;
    }

    /// Its memory goes back to the system and not to the pool, because pages of it may still be
    /// read, such as by a device, when it is dropped. Who reads them keeps them as they are.
    pub fn spend(&self) {
        self.spent.store(true, Ordering::Relaxed);
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`; meanwhile nobody writes them.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }

    /// Its bytes, to write.
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
                // Otherwise it is dropped here.
                if let Some(region) = region.take_if(|_| !*self.spent.get_mut()) {
                    pool.used(region, self.lent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn memory_is_used_again_when_its_block_is_gone_and_not_before() {
        let pool = Pool::new(&Limits::new(1 << 30));
        let mut first = pool.take(5 << 20).unwrap();
        first.bytes_mut().fill(7);
        let second = pool.take(5 << 20).unwrap();
        let (one, other) = (first.start(), second.start());
        assert_ne!(one, other);
        drop(first);
        let mut again = pool.take(5_000_000).unwrap();
        assert_eq!(again.start(), one, "blocks of similar size share a region");
        assert_eq!(again.len(), 5_000_000);
        again.bytes_mut().fill(1);
        assert_eq!(pool.kept(), 0);
    }

    #[test]
    fn the_pool_keeps_no_more_than_its_limit_and_lets_the_oldest_go() {
        let pool = Pool::new(&Limits::new(3 << 20));
        let blocks: Vec<Block> = (0..5).map(|_| pool.take(1 << 20).unwrap()).collect();
        let newest = blocks[4].start();
        drop(blocks);
        assert_eq!(pool.kept(), 3 << 20);
        assert_eq!(pool.take(1 << 20).unwrap().start(), newest);
        drop(pool.take(4 << 20).unwrap());
        assert_eq!(pool.kept(), 3 << 20, "larger than the limit");
    }

    #[test]
    fn what_nobody_uses_goes_back_to_the_system() {
        let pool = Pool::new(&Limits::new(1 << 30));
        drop(pool.take(1 << 20).unwrap());
        let now = Instant::now();
        assert!(pool.trim(now).is_some_and(|next| next <= now + KEEP));
        assert_eq!(pool.kept(), 1 << 20);
        assert_eq!(pool.trim(now + KEEP), None);
        assert_eq!(pool.kept(), 0);
    }

    /// A block that was replaced by a shared one, after some uses.
    fn shared(pool: &Arc<Pool>, len: usize) -> Block {
        for _ in 0..3000 {
            let block = pool.take(len).unwrap();
            if block.shared().is_some() {
                return block;
            }
            drop(block);
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it is still private");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn memory_that_is_used_again_and_again_becomes_shared_if_that_is_wanted() {
        let pool = Pool::new(&Limits::new(4 << 20));
        for _ in 0..5 {
            drop(pool.take(1 << 20).unwrap());
        }
        assert_eq!(pool.shared(), 0);
        pool.share();
        drop((pool.take(1 << 20), pool.take(1 << 20)));
        let block = shared(&pool, 1 << 20);
        assert!(pool.shared() <= 4 << 20);
        drop(block);
        // For the other block, a thread may make one as well, at any time.
        let gone = (0..3000).any(|_| {
            pool.trim(Instant::now() + KEEP);
            std::thread::sleep(Duration::from_millis(1));
            (pool.kept(), pool.shared()) == (0, 0)
        });
        assert!(gone, "it goes back to the system, too");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn memory_that_a_peer_may_still_write_is_never_used_again() {
        let pool = Pool::new(&Limits::new(4 << 20));
        let mut lent = pool.take_shared(1 << 20).unwrap();
        let other = pool.take_shared(1 << 20).unwrap();
        lent.lend(true);
        drop(lent);
        assert!(other.shared().is_none(), "nor any other memory beside it");
        let new = pool.take_shared(1 << 20).unwrap();
        assert!(new.shared().is_some());
        assert_eq!(pool.shared(), 3 << 20);
        drop(other);
        assert_eq!((pool.shared(), pool.kept()), (1 << 20, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory that is shared")]
    fn where_no_more_may_be_shared_memory_is_private() {
        let pool = Pool::new(&Limits::new(1 << 20));
        let shared = pool.take_shared(1 << 20).unwrap();
        let private = pool.take_shared(1 << 20).unwrap();
        assert!(shared.shared().is_some() && private.shared().is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where there is no memory")]
    fn more_than_there_is_is_an_error() {
        let pool = Pool::new(&Limits::new(1 << 30));
        assert!(pool.take(usize::MAX).is_err());
        assert!(pool.take(isize::MAX as usize).is_err());
        assert!(pool.take(0).unwrap().is_empty());
    }

    #[test]
    fn a_process_that_has_as_much_as_it_may_keeps_nothing_and_what_it_has_too_much_of_goes_oldest_first()
     {
        let has = Arc::new(AtomicUsize::new(0));
        let resident = Arc::clone(&has);
        let limits = Limits::within(1 << 30, 100 << 20, move || resident.load(Ordering::Relaxed));
        let pool = Pool::new(&limits);
        let blocks: Vec<Block> = (0..4).map(|_| pool.take(4 << 20).unwrap()).collect();
        let newest = blocks[3].start();
        drop(blocks);
        assert_eq!(pool.kept(), 16 << 20);
        // Memory of another size would be too much.
        has.store(91 << 20, Ordering::Relaxed);
        let other = pool.take(16 << 20).unwrap();
        assert_eq!(pool.kept(), 8 << 20);
        let again = pool.take(4 << 20).unwrap();
        assert_eq!(again.start(), newest, "what is there already takes nothing");
        has.store(200 << 20, Ordering::Relaxed);
        drop((other, again));
        assert_eq!(pool.kept(), 0);
        // The limit itself may change.
        limits.set(1 << 30, usize::MAX);
        drop(pool.take(4 << 20).unwrap());
        assert_eq!(pool.kept(), 4 << 20);
        limits.set(2 << 20, usize::MAX);
        pool.free_up(0);
        assert_eq!(pool.kept(), 0);
    }
}
