//! Which pairs of workers of different machines are measured, and in which order.
//!
//! Pure.
//!
//! *Invariant:* a sample has each machine with each other in both directions, and each planned NIC
//! at least once as the receiver's; no pair is in it twice.

use std::collections::{BTreeMap, BTreeSet};

use super::{Way, order};
use cuda_cluster_wire::links::between::End;

/// A sender and a receiver, by their places among all ends.
pub(super) type Pair = (usize, usize);

/// The ends by their machines, in the order in which these come first.
struct Machines<'a> {
    names: Vec<&'a str>,
    ends: BTreeMap<&'a str, Vec<usize>>,
}

impl<'a> Machines<'a> {
    fn of(ends: &'a [End]) -> Self {
        let mut machines = Self { names: Vec::new(), ends: BTreeMap::new() };
        for (at, end) in ends.iter().enumerate() {
            let machine = end.machine.as_str();
            if !machines.ends.contains_key(machine) {
                machines.names.push(machine);
            }
            machines.ends.entry(machine).or_default().push(at);
        }
        machines
    }

    fn ends(&self, machine: &str) -> &[usize] {
        self.ends.get(machine).map_or(&[], Vec::as_slice)
    }

    /// Each machine with each other, near and distant ones in turn, so that all are seen alike when
    /// the time does not suffice.
    fn ways(&self) -> Vec<Way> {
        let to = |from: &&str| {
            let others = self.names.iter().filter(|to| *to != from).map(|to| (*to).to_owned());
            others.map(|to| ((*from).to_owned(), to)).collect::<Vec<_>>()
        };
        let all: Vec<Way> = self.names.iter().flat_map(to).collect();
        order::passes(&all, &self.names).into_iter().flatten().collect()
    }
}

/// All ordered pairs of different machines, those of distinct machines in turn.
pub(super) fn all(ends: &[End]) -> Vec<Pair> {
    let machines = Machines::of(ends);
    let pairs = |(from, to): &Way| -> Vec<Pair> {
        let to = machines.ends(to);
        machines.ends(from).iter().flat_map(|from| to.iter().map(|to| (*from, *to))).collect()
    };
    machines.ways().iter().flat_map(pairs).collect()
}

/// So few of them that each machine receives from each other, and each planned NIC receives.
pub(super) fn some(ends: &[End]) -> Vec<Pair> {
    let machines = Machines::of(ends);
    let mut chosen = Chosen { ends, pairs: Vec::new(), received: BTreeSet::new() };
    for (turn, (from, to)) in machines.ways().iter().enumerate() {
        let receivers = machines.ends(to);
        let next = receivers.iter().find(|at| chosen.is_new(**at));
        let Some(to) = next.or_else(|| receivers.get(turn % receivers.len().max(1))) else {
            continue;
        };
        chosen.add(machines.ends(from), *to, turn);
    }
    for (place, machine) in machines.names.iter().enumerate() {
        for (turn, to) in machines.ends(machine).iter().enumerate() {
            // Another machine for each, so that none sends to all.
            let step = 1 + turn % machines.names.len().saturating_sub(1).max(1);
            let from = machines.names[(place + step) % machines.names.len()];
            if chosen.is_new(*to) && from != *machine {
                chosen.add(machines.ends(from), *to, turn);
            }
        }
    }
    chosen.pairs
}

struct Chosen<'a> {
    ends: &'a [End],
    pairs: Vec<Pair>,
    /// Machines and their NICs that receive already.
    received: BTreeSet<(&'a str, &'a str)>,
}

impl Chosen<'_> {
    /// Whether a worker has a NIC that does not receive yet.
    fn is_new(&self, at: usize) -> bool {
        let end = &self.ends[at];
        end.nics.iter().any(|nic| !self.received.contains(&(end.machine.as_str(), nic.as_str())))
    }

    /// Takes a receiver, with the sender of the same place there, or else one in turn.
    fn add(&mut self, senders: &[usize], to: usize, turn: usize) {
        let end = &self.ends[to];
        let same = senders.iter().find(|at| self.ends[**at].place == end.place);
        let Some(from) = same.or_else(|| senders.get(turn % senders.len().max(1))) else { return };
        self.received.extend(end.nics.iter().map(|nic| (end.machine.as_str(), nic.as_str())));
        self.pairs.push((*from, to));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends(machines: &[(usize, bool)]) -> Vec<End> {
        let of = |(at, (workers, has_nics)): (usize, &(usize, bool))| {
            let worker = move |number: usize| End {
                name: format!("host{at}-gpu{number}"),
                host: "host".to_owned(),
                machine: format!("machine{at}"),
                place: format!("gpu{number}"),
                nics: if *has_nics { vec![format!("mlx5_{number}:1")] } else { Vec::new() },
            };
            (0..*workers).map(worker).collect::<Vec<_>>()
        };
        machines.iter().enumerate().flat_map(of).collect()
    }

    #[test]
    fn two_machines_of_eight_nics_are_sixteen_pairs_of_128_on_one_rail_each() {
        let ends = ends(&[(8, true), (8, true)]);
        assert_eq!(all(&ends).len(), 128);
        let some = some(&ends);
        assert_eq!(some.len(), 16);
        assert!(some.iter().all(|(from, to)| ends[*from].place == ends[*to].place), "{some:?}");
    }

    #[test]
    fn machines_without_nics_are_one_pair_each_way() {
        assert_eq!(some(&ends(&[(1, false), (2, false)])).len(), 2);
        assert_eq!(some(&ends(&[(4, false), (4, false), (4, false)])).len(), 6);
        assert_eq!(some(&ends(&[(4, true)])), []);
    }

    proptest! {
        #[test]
        fn each_machine_receives_from_each_other_and_each_nic_does(
            machines in proptest::collection::vec((1usize..5, any::<bool>()), 2..6)
        ) {
            let ends = ends(&machines);
            let (all, some) = (all(&ends), some(&ends));
            let every: BTreeSet<Pair> = all.iter().copied().collect();
            let once: BTreeSet<Pair> = some.iter().copied().collect();
            prop_assert_eq!(once.len(), some.len(), "none twice");
            prop_assert!(once.is_subset(&every));
            let machine = |at: usize| ends[at].machine.as_str();
            let hosts: BTreeSet<_> = some.iter().map(|(from, to)| (machine(*from), machine(*to))).collect();
            prop_assert_eq!(hosts.len(), machines.len() * (machines.len() - 1));
            let received: BTreeSet<usize> = some.iter().map(|(_, to)| *to).collect();
            for (at, end) in ends.iter().enumerate() {
                prop_assert!(end.nics.is_empty() || received.contains(&at), "{}", end.name);
            }
        }
    }
}
