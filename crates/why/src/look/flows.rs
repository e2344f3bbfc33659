//! Follows the TCP connections of a job's ranks, reading by reading.
//!
//! *Invariant:* what could not be counted is said.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;

use super::counters::Counters;
use super::ends::sockets_of;
use super::members;
use crate::audit::Party;
use crate::audit::ledger::Ledger;
use crate::evidence::Rank;

/// The connections of a job so far.
#[derive(Debug)]
pub struct Flows {
    counters: Counters,
    ledger: Ledger,
    unseen: BTreeSet<String>,
}

impl Flows {
    /// Begins to count.
    pub fn begin() -> Self {
        let counters = Counters::begin();
        let mut unseen = BTreeSet::new();
        if !counters.hears() {
            let text = "what connections moved in the second before they closed: this kernel does \
                        not tell of it";
            unseen.insert(text.to_owned());
        }
        Self { counters, ledger: Ledger::default(), unseen }
    }

    /// What becomes readable when connections have closed, after which [`Flows::hear`] is due.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.counters.descriptor()
    }

    /// Takes the news of closed connections.
    pub fn hear(&mut self) {
        let Self { counters, ledger, unseen } = self;
        if !counters.closed(|counter| ledger.closed(counter)) {
            unseen.insert("some connections: too many closed at once".to_owned());
        }
    }

    /// Reads the connections that are there, and whose they are.
    pub fn read(&mut self, ranks: &[Rank]) {
        self.hear();
        // A socket that was opened between the two has no owner until the next reading.
        let owners: BTreeMap<u64, String> = members(ranks)
            .into_iter()
            .flat_map(|(pid, rank)| sockets_of(pid).map(move |inode| (inode, rank.clone())))
            .collect();
        match self.counters.open() {
            Ok(open) => self.ledger.read(&open, &owners),
            Err(why) => drop(self.unseen.insert(format!("connections: {why}"))),
        }
    }

    /// The bytes that each party has sent to each other.
    pub fn totals(&self) -> BTreeMap<(Party, Party), u64> {
        self.ledger.totals()
    }

    /// What could not be counted.
    pub fn unseen(&self) -> impl Iterator<Item = &str> {
        self.unseen.iter().map(String::as_str)
    }
}
