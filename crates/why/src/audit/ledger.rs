//! The bytes of a job's TCP connections, from the kernel's counters of each socket.
//!
//! Reads nothing itself.
//!
//! *Invariant:* a byte is counted once: from the counter of the end that sent it, or, if that end
//! is not one of the job's or was not seen, from the one that received it. Sockets of which no end
//! is the job's are not counted.

use core::net::SocketAddr;
use std::collections::{BTreeMap, BTreeSet};

/// The two addresses of a socket, its own first.
pub type Addresses = (SocketAddr, SocketAddr);

/// What the kernel says of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// The kernel's name for it, which no other socket ever has.
    pub cookie: u64,
    /// 0 once it is closed.
    pub inode: u64,
    pub addresses: Addresses,
    pub listens: bool,
    /// Bytes that the other end has confirmed, and that have come from there.
    pub sent: u64,
    pub received: u64,
}

/// Who is at an end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Party {
    /// A rank, or a process that it has started.
    Rank(String),
    /// Another process of this machine, which was not seen or is not the job's.
    Here,
    /// Another machine, by its address.
    Host(String),
}

/// All connections of a job so far.
#[derive(Debug, Default)]
pub struct Ledger {
    open: BTreeMap<u64, Entry>,
    /// Which rank listens at an address; the address may stand for all of its machine.
    listeners: BTreeMap<SocketAddr, String>,
    /// Bytes of connections that are over.
    past: BTreeMap<(Party, Party), u64>,
}

#[derive(Debug)]
struct Entry {
    counter: Counter,
    owner: Option<String>,
    /// For how many readings it has been closed.
    closed_for: Option<u32>,
}

/// The kernel counts the begin and the end of a stream as a byte each.
const SIGNS: u64 = 2;

/// Readings after which both ends of a closed connection have been heard of.
const SETTLED: u32 = 2;

impl Ledger {
    /// Takes the sockets that are open now, with the owners of their inodes.
    ///
    /// One that is missing is closed: its last counter stays.
    pub fn read(&mut self, counters: &[Counter], owners: &BTreeMap<u64, String>) {
        let mut seen = BTreeSet::new();
        self.listeners.clear();
        for counter in counters {
            let owner = owners.get(&counter.inode).cloned();
            if counter.listens {
                if let Some(owner) = owner {
                    self.listeners.insert(counter.addresses.0, owner);
                }
                continue;
            }
            seen.insert(counter.cookie);
            self.keep(*counter, owner);
        }
        for (cookie, entry) in &mut self.open {
            if let Some(readings) = &mut entry.closed_for {
                *readings += 1;
            } else if !seen.contains(cookie) {
                entry.closed_for = Some(0);
            }
        }
        self.settle();
    }

    /// Takes the last counter of a socket that is closed now.
    pub fn closed(&mut self, counter: Counter) {
        // One that never was connected has nobody at its other end.
        if counter.listens || counter.addresses.1.port() == 0 {
            return;
        }
        // One that was never seen open is its listener's.
        let known = self.open.get(&counter.cookie).and_then(|entry| entry.owner.clone());
        let owner = known.or_else(|| self.listener(counter.addresses.0));
        self.keep(counter, owner);
        if let Some(entry) = self.open.get_mut(&counter.cookie) {
            entry.closed_for.get_or_insert(0);
        }
    }

    fn keep(&mut self, counter: Counter, owner: Option<String>) {
        let entry = self.open.entry(counter.cookie).or_insert(Entry {
            counter,
            owner: None,
            closed_for: None,
        });
        // A counter never falls; a socket that has been shut down has lost its inode.
        let (sent, received) = (entry.counter.sent, entry.counter.received);
        entry.counter.sent = sent.max(counter.sent);
        entry.counter.received = received.max(counter.received);
        entry.owner = owner.or(entry.owner.take());
    }

    fn listener(&self, own: SocketAddr) -> Option<String> {
        let is_it = |address: &SocketAddr| {
            address.port() == own.port()
                && (address.ip() == own.ip() || address.ip().is_unspecified())
        };
        let found = self.listeners.iter().find(|(address, _)| is_it(address));
        found.map(|(_, rank)| rank.clone())
    }

    /// Adds up the connections whose last word is known, and forgets them.
    fn settle(&mut self) {
        let by_addresses = self.by_addresses();
        let is_over = |cookie: &u64| {
            let entry = self.open.get(cookie);
            entry.is_none_or(|entry| entry.closed_for.is_some_and(|for_| for_ >= SETTLED))
        };
        let over: Vec<[Vec<u64>; 2]> =
            by_addresses.into_values().filter(|ends| ends.iter().flatten().all(is_over)).collect();
        for ends in over {
            for (pair, bytes) in self.connection(&ends) {
                *self.past.entry(pair).or_default() += bytes;
            }
            for cookie in ends.iter().flatten() {
                self.open.remove(cookie);
            }
        }
    }

    /// The sockets of each pair of addresses, by the end: the lower address first. Addresses may be
    /// used again, so that there are several of one end.
    fn by_addresses(&self) -> BTreeMap<Addresses, [Vec<u64>; 2]> {
        let mut found: BTreeMap<Addresses, [Vec<u64>; 2]> = BTreeMap::new();
        for (cookie, entry) in &self.open {
            let (own, other) = entry.counter.addresses;
            let is_second = own > other;
            let key = if is_second { (other, own) } else { (own, other) };
            found.entry(key).or_default()[usize::from(is_second)].push(*cookie);
        }
        found
    }

    /// The bytes of a connection both ways, if an end is the job's.
    fn connection(&self, ends: &[Vec<u64>; 2]) -> Vec<((Party, Party), u64)> {
        let entries = ends.each_ref().map(|end| -> Vec<&Entry> {
            end.iter().filter_map(|cookie| self.open.get(cookie)).collect()
        });
        let owners = entries.each_ref().map(|end| end.iter().find_map(|entry| entry.owner.clone()));
        if owners.iter().all(Option::is_none) {
            return Vec::new();
        }
        let address = |at: usize| {
            let own = entries[at].first().map(|entry| entry.counter.addresses.0);
            own.or_else(|| entries[1 - at].first().map(|entry| entry.counter.addresses.1))
        };
        let party = |at: usize| match (&owners[at], address(at)) {
            (Some(rank), _) => Party::Rank(rank.clone()),
            (None, Some(address)) if entries[at].is_empty() && !address.ip().is_loopback() => {
                Party::Host(address.ip().to_string())
            }
            (None, _) => Party::Here,
        };
        let sum = |at: usize, of: fn(&Counter) -> u64| -> u64 {
            entries[at].iter().map(|entry| of(&entry.counter)).sum()
        };
        let way = |from: usize| {
            let bytes = sum(from, |end| end.sent).max(sum(1 - from, |end| end.received));
            ((party(from), party(1 - from)), bytes)
        };
        [way(0), way(1)].into_iter().filter(|(_, bytes)| *bytes > SIGNS).collect()
    }

    /// The bytes that each party has sent to each other so far. Within a rank nothing is counted.
    pub fn totals(&self) -> BTreeMap<(Party, Party), u64> {
        let mut totals = self.past.clone();
        for ends in self.by_addresses().values() {
            for (pair, bytes) in self.connection(ends) {
                *totals.entry(pair).or_default() += bytes;
            }
        }
        totals.retain(|(from, to), _| from != to);
        totals
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn socket(cookie: u64, ports: [u16; 2], bytes: [u64; 2]) -> Counter {
        Counter {
            cookie,
            inode: cookie,
            addresses: (at(ports[0]), at(ports[1])),
            listens: ports[1] == 0,
            sent: bytes[0],
            received: bytes[1],
        }
    }

    fn owners<const N: usize>(of: [(u64, &str); N]) -> BTreeMap<u64, String> {
        of.into_iter().map(|(inode, rank)| (inode, rank.to_owned())).collect()
    }

    fn rank(name: &str) -> Party {
        Party::Rank(name.to_owned())
    }

    #[test]
    fn both_ends_of_a_connection_count_once() {
        let mut ledger = Ledger::default();
        let both = owners([(1, "gpu0"), (2, "gpu1")]);
        // The receiver is ahead of what the sender knows to be there.
        ledger.read(&[socket(1, [10, 20], [90, 7]), socket(2, [20, 10], [7, 100])], &both);
        let totals = ledger.totals();
        assert_eq!(totals[&(rank("gpu0"), rank("gpu1"))], 100);
        assert_eq!(totals[&(rank("gpu1"), rank("gpu0"))], 7);
        assert_eq!(totals.len(), 2);
    }

    #[test]
    fn the_last_word_of_a_closed_socket_counts_and_it_is_forgotten() {
        let mut ledger = Ledger::default();
        let both = owners([(1, "gpu0"), (2, "gpu1")]);
        ledger.read(&[socket(1, [10, 20], [5, 0]), socket(2, [20, 10], [0, 5])], &both);
        ledger.closed(Counter { inode: 0, ..socket(1, [10, 20], [50, 0]) });
        ledger.closed(Counter { inode: 0, ..socket(2, [20, 10], [0, 50]) });
        for _ in 0..=SETTLED {
            ledger.read(&[], &both);
        }
        assert!(ledger.open.is_empty());
        // The same addresses again, by another connection.
        ledger.read(&[socket(3, [10, 20], [9, 0])], &owners([(3, "gpu0")]));
        assert_eq!(ledger.totals()[&(rank("gpu0"), rank("gpu1"))], 50);
        assert_eq!(ledger.totals()[&(rank("gpu0"), Party::Here)], 9);
    }

    #[test]
    fn a_connection_that_was_never_seen_open_is_its_listeners() {
        let mut ledger = Ledger::default();
        ledger.read(&[socket(9, [20, 0], [0, 0])], &owners([(9, "gpu1")]));
        ledger.closed(Counter { inode: 0, ..socket(1, [10, 20], [50, 0]) });
        ledger.closed(Counter { inode: 0, ..socket(2, [20, 10], [0, 50]) });
        assert_eq!(ledger.totals(), BTreeMap::from([((Party::Here, rank("gpu1")), 50)]));
        // One of strangers is nobody's here.
        ledger.closed(Counter { inode: 0, ..socket(3, [11, 21], [50, 0]) });
        assert_eq!(ledger.totals().len(), 1);
    }

    #[test]
    fn another_machine_is_known_by_its_address() {
        let mut ledger = Ledger::default();
        let there = SocketAddr::from(([192, 0, 2, 7], 80));
        let counter = Counter { addresses: (at(10), there), ..socket(1, [10, 80], [5, 6]) };
        ledger.read(&[counter], &owners([(1, "gpu0")]));
        let host = Party::Host("192.0.2.7".to_owned());
        let expected = [((rank("gpu0"), host.clone()), 5), ((host, rank("gpu0")), 6)];
        assert_eq!(ledger.totals(), BTreeMap::from(expected));
    }

    /// The two ends of a connection that has sent so much.
    fn ends(number: u16, sent: u64) -> [Counter; 2] {
        let (cookie, ports) = (u64::from(number) * 2, [100 + number, 200 + number]);
        let there = socket(cookie + 1, [ports[1], ports[0]], [0, sent]);
        [socket(cookie, ports, [sent, 0]), there]
    }

    proptest! {
        /// Whatever is read when, and whoever is heard of last: no byte is lost or counted twice.
        #[test]
        fn what_was_sent_is_what_is_counted(
            steps in proptest::collection::vec((0..4u16, 0..1000u64, 0..3u8), 0..60),
        ) {
            let mut ledger = Ledger::default();
            let owner = |inode: u64| if inode.is_multiple_of(2) { "a" } else { "b" };
            let owners = (0..8).map(|inode| (inode, owner(inode).to_owned())).collect();
            let mut open: BTreeMap<u16, u64> = (0..4).map(|number| (number, 10)).collect();
            let mut over = 0;
            let now = |open: &BTreeMap<u16, u64>| -> Vec<Counter> {
                open.iter().flat_map(|(number, sent)| ends(*number, *sent)).collect()
            };
            ledger.read(&now(&open), &owners);
            for (number, bytes, step) in steps {
                match step {
                    0 => open.get_mut(&number).into_iter().for_each(|sent| *sent += bytes),
                    1 => ledger.read(&now(&open), &owners),
                    _ => {
                        if let Some(sent) = open.remove(&number) {
                            over += sent;
                            for end in ends(number, sent) {
                                ledger.closed(Counter { inode: 0, ..end });
                            }
                        }
                    }
                }
            }
            ledger.read(&now(&open), &owners);
            let counted: u64 = ledger.totals().values().sum();
            prop_assert_eq!(counted, over + open.values().sum::<u64>());
        }
    }
}
