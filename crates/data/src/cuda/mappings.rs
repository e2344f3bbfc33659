//! What other processes may have mapped of a pool's slabs, as far as it can be told from here.
//!
//! UCX keeps what it has mapped, up to a limit (`UCX_CUDA_IPC_CACHE_MAX_SIZE`), and what a peer has
//! mapped stays on the GPU even when it is freed (openucx/ucx#11288, #4410). Nobody tells the owner
//! what is mapped: small messages map nothing, and of several at once nobody here sees the order.
//! So there are two answers: what is probably mapped decides which slabs are worth freeing, and
//! what may be mapped, which is no more than the device has in use, is told where memory is
//! missing.
//! Pure.
//!
//! *Invariant:* what has ended, or was never exchanged with, has nothing mapped.

use std::collections::{BTreeMap, BTreeSet};

/// Which way a piece goes. Without NVLink UCX lets the sender write, else the receiver read
/// (`ENABLE_GET_ZCOPY`): only one of the two maps the other's memory, and nobody here knows which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// From here: the peer may read it.
    Sent,
    /// To here: the peer may write it.
    Received,
}

/// A number that no other slab of the pool has, also after it is freed.
pub(super) type SlabNumber = u64;

/// What UCX in another process probably keeps mapped: a cache for each owner and device, from which
/// the slabs go that were used the longest ago (UCX 1.21, `cuda_ipc_cache.c`).
#[derive(Debug, Default)]
struct Cache {
    bytes: u64,
    /// Slabs with their lengths, by the time of their last use.
    by_use: BTreeMap<u64, (SlabNumber, u64)>,
    last_use: BTreeMap<SlabNumber, u64>,
}

impl Cache {
    /// Uses a slab. For a new one those go, and are returned, that were used the longest ago, so
    /// that no more is mapped than a limit, or this one alone. `None` if it was there.
    fn uses(
        &mut self,
        slab: SlabNumber,
        bytes: u64,
        limit: Option<u64>,
        now: u64,
    ) -> Option<Vec<SlabNumber>> {
        let before = self.last_use.insert(slab, now);
        if let Some(before) = before {
            self.by_use.remove(&before);
            self.by_use.insert(now, (slab, bytes));
            return None;
        }
        self.bytes += bytes;
        let mut gone = Vec::new();
        while limit.is_some_and(|limit| self.bytes > limit)
            && let Some((_, (oldest, length))) = self.by_use.pop_first()
        {
            self.last_use.remove(&oldest);
            self.bytes -= length;
            gone.push(oldest);
        }
        self.by_use.insert(now, (slab, bytes));
        Some(gone)
    }

    fn forget(&mut self, slab: SlabNumber) {
        let at = self.last_use.remove(&slab);
        let known = at.and_then(|at| self.by_use.remove(&at));
        self.bytes -= known.map_or(0, |(_, bytes)| bytes);
    }
}

/// A slab that was given back to the driver while others may have it mapped.
#[derive(Debug)]
struct Freed {
    bytes: u64,
    readers: BTreeSet<u64>,
    /// Whether the device has been found to have so much in use since.
    is_seen: bool,
    /// Whether its readers were told again to let go of it.
    is_told: bool,
}

/// What others may have mapped of a pool.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    /// Most bytes that a peer keeps mapped.
    limit: Option<u64>,
    /// The names of peers, for people.
    names: BTreeMap<u64, String>,
    /// For each way as if it were the one that UCX maps for.
    caches: BTreeMap<(u64, Way), Cache>,
    /// How many caches have a slab.
    mapped: BTreeMap<SlabNumber, usize>,
    /// Counts exchanges.
    now: u64,
    /// Who has ever got a piece of a slab or sent one to it, while it lives.
    ever: BTreeMap<SlabNumber, BTreeSet<u64>>,
    /// The last one last.
    freed: Vec<Freed>,
    /// Who keeps memory mapped that is free again, and more of it than the limit.
    beyond: BTreeSet<u64>,
}

impl Mappings {
    /// Sets most bytes that a peer keeps mapped; `None` for no limit.
    pub(super) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    /// Whether peers let go of anything.
    pub(super) fn has_limit(&self) -> bool {
        self.limit.is_some()
    }

    /// Names another process.
    pub(super) fn found(&mut self, peer: u64, name: &str) {
        self.names.insert(peer, name.to_owned());
    }

    /// Records that a piece of a slab is sent to another process or received from it.
    pub(super) fn exchanged(&mut self, (slab, bytes): (SlabNumber, u64), peer: u64, way: Way) {
        self.ever.entry(slab).or_default().insert(peer);
        self.now += 1;
        let cache = self.caches.entry((peer, way)).or_default();
        let Some(gone) = cache.uses(slab, bytes, self.limit, self.now) else { return };
        *self.mapped.entry(slab).or_default() += 1;
        gone.into_iter().for_each(|slab| self.unmapped(slab));
    }

    fn unmapped(&mut self, slab: SlabNumber) {
        if let Some(count) = self.mapped.get_mut(&slab) {
            *count -= 1;
            if *count == 0 {
                self.mapped.remove(&slab);
            }
        }
    }

    /// Records that another process has ended, and its mappings with it.
    pub(super) fn lost(&mut self, peer: u64) {
        self.names.remove(&peer);
        self.beyond.remove(&peer);
        for way in [Way::Sent, Way::Received] {
            let cache = self.caches.remove(&(peer, way)).unwrap_or_default();
            cache.last_use.into_keys().for_each(|slab| self.unmapped(slab));
        }
        for readers in self.ever.values_mut() {
            readers.remove(&peer);
        }
        for freed in &mut self.freed {
            freed.readers.remove(&peer);
        }
        self.freed.retain(|freed| !freed.readers.is_empty());
    }

    /// Records that nothing is in use in a slab. A peer that has it mapped alone, because it is
    /// longer than the limit, keeps it until it maps another.
    pub(super) fn idle(&mut self, slab: SlabNumber, bytes: u64) {
        if self.limit.is_some_and(|limit| bytes > limit) {
            let has = |cache: &Cache| cache.last_use.contains_key(&slab);
            let peers =
                self.caches.iter().filter(|(_, cache)| has(cache)).map(|((peer, _), _)| peer);
            self.beyond.extend(peers.copied());
        }
    }

    /// Whether [`Self::take_beyond`] has any.
    pub(super) fn is_beyond(&self) -> bool {
        !self.beyond.is_empty()
    }

    /// The peers that are to map something short, so that they let go of what is free again; each
    /// is told once.
    pub(super) fn take_beyond(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.beyond).into_iter().collect()
    }

    /// Whether more than the limit is free, given back, and yet in use on the device. A peer that
    /// mapped it while a pebble was on its way, or the other way round, has kept both.
    pub(super) fn stays(&self) -> bool {
        self.freed.iter().any(|freed| self.is_to_go(freed))
    }

    fn is_to_go(&self, freed: &Freed) -> bool {
        let is_beyond = self.limit.is_some_and(|limit| freed.bytes > limit);
        is_beyond && freed.is_seen && !freed.is_told
    }

    /// Has [`Self::take_beyond`] return those who may keep what [stays](Self::stays), once.
    pub(super) fn tell_again(&mut self) {
        let mut freed = std::mem::take(&mut self.freed);
        for freed in &mut freed {
            if self.is_to_go(freed) {
                freed.is_told = true;
                self.beyond.extend(&freed.readers);
            }
        }
        self.freed = freed;
    }

    /// Records that a slab is given back to the driver.
    pub(super) fn freed(&mut self, slab: SlabNumber, bytes: u64) {
        if self.limit.is_none() {
            // It would stay for ever.
            self.caches.values_mut().for_each(|cache| cache.forget(slab));
            self.mapped.remove(&slab);
        }
        let readers = self.ever.remove(&slab).unwrap_or_default();
        if !readers.is_empty() {
            self.freed.push(Freed { bytes, readers, is_seen: false, is_told: false });
        }
    }

    /// Records that no more than this can be freed and still mapped: the device has no more in use
    /// besides the pool. What was freed first was unmapped first.
    pub(super) fn at_most(&mut self, bytes: u64) {
        let mut left = bytes;
        for freed in self.freed.iter_mut().rev() {
            freed.bytes = freed.bytes.min(left);
            freed.is_seen = true;
            left -= freed.bytes;
        }
        self.freed.retain(|freed| freed.bytes > 0);
    }

    /// Whether a slab is probably mapped, so that its memory would not become free.
    pub(super) fn has(&self, slab: SlabNumber) -> bool {
        self.mapped.contains_key(&slab)
    }

    /// Bytes that are probably mapped, once for each peer.
    pub(super) fn bytes(&self) -> u64 {
        let slabs = self.caches.iter().flat_map(|((peer, _), cache)| {
            cache.by_use.values().map(move |(slab, bytes)| ((*peer, *slab), *bytes))
        });
        slabs.collect::<BTreeMap<_, _>>().into_values().sum()
    }

    /// Bytes that were given back to the driver, but that peers may still have mapped.
    pub(super) fn freed_bytes(&self) -> u64 {
        self.freed.iter().map(|freed| freed.bytes).sum()
    }

    /// The names of the peers that may have them.
    pub(super) fn keepers(&self) -> Vec<String> {
        let all: BTreeSet<u64> =
            self.freed.iter().flat_map(|freed| freed.readers.iter().copied()).collect();
        all.iter().filter_map(|peer| self.names.get(peer).cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_limit(limit: u64) -> Mappings {
        Mappings { limit: Some(limit), ..Mappings::default() }
    }

    #[test]
    fn what_a_peer_used_the_longest_ago_it_unmaps_for_a_new_one() {
        let mut mappings = with_limit(8);
        for slab in [0, 1, 0, 2] {
            mappings.exchanged((slab, 4), 7, Way::Sent);
        }
        assert_eq!([0, 1, 2].map(|slab| mappings.has(slab)), [true, false, true]);
        mappings.exchanged((1, 4), 8, Way::Sent);
        assert!(mappings.has(1), "another peer has it");
        mappings.exchanged((3, 64), 7, Way::Sent);
        assert_eq!((mappings.bytes(), mappings.has(0)), (68, false), "one beyond the limit");
        mappings.lost(8);
        assert_eq!((mappings.bytes(), mappings.has(1)), (64, false));
    }

    #[test]
    fn each_peer_counts_once_whichever_way_and_goes_with_its_process() {
        let mut mappings = with_limit(8);
        for peer in [7, 8] {
            mappings.exchanged((0, 4), peer, Way::Sent);
            mappings.exchanged((0, 4), peer, Way::Received);
        }
        mappings.exchanged((1, 8), 7, Way::Sent);
        assert_eq!(mappings.bytes(), 8 + 4 + 4, "as if UCX mapped for the other way, too");
        mappings.lost(7);
        assert_eq!(mappings.bytes(), 4);
        assert!(!mappings.has(1));
    }

    #[test]
    fn what_is_freed_may_be_mapped_until_its_readers_have_ended_or_the_device_has_no_more_in_use() {
        let mut mappings = with_limit(8);
        mappings.found(7, "gpu7");
        for slab in 0..4 {
            mappings.exchanged((slab, 8), 7 + slab % 2, Way::Sent);
            mappings.freed(slab, 8);
        }
        mappings.freed(9, 8);
        assert_eq!(mappings.freed_bytes(), 32, "nobody had the last one");
        mappings.at_most(20);
        assert_eq!(mappings.freed_bytes(), 20);
        assert_eq!(mappings.keepers(), ["gpu7"]);
        mappings.lost(7);
        assert_eq!(
            (mappings.freed_bytes(), mappings.keepers()),
            (12, vec![]),
            "8 of slab 3, and 4"
        );
        mappings.at_most(0);
        assert_eq!(mappings.freed_bytes(), 0);
    }

    #[test]
    fn who_keeps_more_than_the_limit_of_what_is_free_again_is_to_let_go() {
        let mut mappings = with_limit(8);
        for (slab, bytes) in [(0, 8), (1, 64), (2, 32)] {
            mappings.exchanged((slab, bytes), 7 + slab, Way::Sent);
            mappings.exchanged((slab, bytes), 7 + slab, Way::Received);
        }
        mappings.idle(0, 8);
        assert!(!mappings.is_beyond(), "within the limit it may stay");
        mappings.idle(1, 64);
        mappings.idle(2, 32);
        mappings.lost(9);
        assert_eq!(mappings.take_beyond(), [8]);
        assert!(!mappings.is_beyond(), "told once");
        for way in [Way::Sent, Way::Received] {
            mappings.exchanged((3, 2), 8, way);
        }
        assert_eq!((mappings.has(1), mappings.bytes()), (false, 8 + 2), "it has let go");
        mappings.idle(1, 64);
        assert!(!mappings.is_beyond(), "nobody has it any more");
    }

    #[test]
    fn who_has_kept_what_is_given_back_is_told_once_more_to_let_go() {
        let mut mappings = with_limit(8);
        for slab in [0, 1] {
            mappings.exchanged((slab, 64), 7 + slab, Way::Sent);
            mappings.freed(slab, 64);
        }
        assert!(!mappings.stays(), "it may be free");
        mappings.at_most(70);
        assert!(mappings.stays());
        mappings.tell_again();
        assert_eq!(mappings.take_beyond(), [8], "6 of slab 0 are within the limit");
        assert!(!mappings.stays());
        mappings.at_most(70);
        assert!(!mappings.stays());
    }

    #[test]
    fn without_a_limit_nothing_grows_for_ever() {
        let mut mappings = Mappings::default();
        for slab in 0..100 {
            mappings.exchanged((slab, 8), 7, Way::Sent);
            mappings.exchanged((slab, 8), 7, Way::Received);
            mappings.freed(slab, 8);
        }
        assert_eq!((mappings.freed_bytes(), mappings.bytes()), (800, 0));
        let cached: usize = mappings.caches.values().map(|cache| cache.last_use.len()).sum();
        assert_eq!((cached, mappings.mapped.len(), mappings.ever.len()), (0, 0, 0));
        mappings.at_most(8);
        assert_eq!(mappings.freed.len(), 1);
    }
}
