//! Which workers there are, and which peers each must know and reach.
//!
//! Pure: events in, messages out. Does not read sockets.
//!
//! A worker must reach workers that registered before it: up to [`ALL_PAIRS`] workers all of
//! them. So of any two, the later one proves the connection between them, and no worker waits for
//! one that may never come: which workers are wanted, and so when the cluster is complete, only
//! the supervisor knows. With more workers, whose pairs grow with the square, a worker must reach
//! those that came 1, 2, 4, 8, … before it: each has proved that it can send and be reached. The
//! other pairs connect on first use.
//!
//! *Invariant:* any two registered workers have been told of each other; a name belongs to at
//! most one registered worker; a worker waits only for workers that registered before it and are
//! still registered.

use std::collections::BTreeMap;

use crate::connection::ConnectionId;
use cuda_cluster_wire::native::{ALL_PAIRS, ToWorker};
use cuda_cluster_wire::peer::Member;

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A worker registered over a proven connection.
    Registered { connection: ConnectionId, member: Member, address: Vec<u8> },
    /// A worker has reached all peers that it was told to expect.
    Connected { connection: ConnectionId },
    /// A worker reports that it leaves.
    Leaving { connection: ConnectionId },
    /// A connection ended.
    Gone { connection: ConnectionId },
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A message to a worker.
    Send { to: ConnectionId, message: ToWorker },
    /// Close a worker's connection, because its successor has registered.
    Close { connection: ConnectionId },
}

struct Worker {
    member: Member,
    address: Vec<u8>,
    /// The peers that it must reach; empty once it has.
    expects: Vec<String>,
    leaving: bool,
}

/// The scheduler's view of the cluster.
#[derive(Default)]
pub(super) struct Core {
    workers: BTreeMap<ConnectionId, Worker>,
}

impl Core {
    /// Decides what to do about an event.
    pub(super) fn handle(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Registered { connection, member, address } => {
                self.register(connection, member, address, &mut actions);
            }
            Event::Connected { connection } => {
                if let Some(worker) = self.workers.get_mut(&connection) {
                    worker.expects.clear();
                }
            }
            Event::Leaving { connection } => {
                if let Some(worker) = self.workers.get_mut(&connection) {
                    worker.leaving = true;
                }
            }
            Event::Gone { connection } => self.forget(connection, &mut actions),
        }
        actions
    }

    fn register(
        &mut self,
        connection: ConnectionId,
        member: Member,
        address: Vec<u8>,
        actions: &mut Vec<Action>,
    ) {
        let former = self.workers.iter().find(|(_, worker)| worker.member.name == member.name);
        if let Some((&former, _)) = former {
            actions.push(Action::Close { connection: former });
            self.forget(former, actions);
        }
        let send = |to, message| Action::Send { to, message };
        let expects = self.expected_next();
        actions.push(send(connection, ToWorker::Expect { names: expects.clone() }));
        for (&other, worker) in &self.workers {
            let (newcomer, present) = (
                ToWorker::Peer { member: member.clone(), address: address.clone() },
                ToWorker::Peer { member: worker.member.clone(), address: worker.address.clone() },
            );
            actions.extend([send(other, newcomer), send(connection, present)]);
        }
        let worker = Worker { member, address, expects, leaving: false };
        self.workers.insert(connection, worker);
    }

    /// Whom the next worker must reach.
    fn expected_next(&self) -> Vec<String> {
        let all = self.workers.len() < ALL_PAIRS;
        // Connections are numbered in the order in which they came.
        let before = self.workers.values().rev().enumerate();
        let wanted = before.filter(|(distance, _)| all || (distance + 1).is_power_of_two());
        wanted.map(|(_, worker)| worker.member.name.clone()).collect()
    }

    fn forget(&mut self, connection: ConnectionId, actions: &mut Vec<Action>) {
        let Some(gone) = self.workers.remove(&connection) else { return };
        for (&to, worker) in &mut self.workers {
            let message = ToWorker::Lost { member: gone.member.clone(), left: gone.leaving };
            actions.push(Action::Send { to, message });
            let before = worker.expects.len();
            worker.expects.retain(|name| *name != gone.member.name);
            // Its successor, if one comes, expects this worker instead.
            if worker.expects.len() < before {
                let names = worker.expects.clone();
                actions.push(Action::Send { to, message: ToWorker::Expect { names } });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    fn member(name: &str, incarnation: u64) -> Member {
        Member { name: name.to_owned(), incarnation }
    }

    fn registered(connection: ConnectionId, name: &str) -> Event {
        Event::Registered { connection, member: member(name, connection), address: vec![] }
    }

    fn expects(actions: &[Action], of: ConnectionId) -> Option<Vec<String>> {
        actions.iter().rev().find_map(|action| match action {
            Action::Send { to, message: ToWorker::Expect { names } } if *to == of => {
                Some(names.clone())
            }
            _ => None,
        })
    }

    fn cluster_of_two() -> Core {
        let mut core = Core::default();
        for (connection, name) in [(0, "gpu0"), (1, "gpu1")] {
            core.handle(registered(connection, name));
        }
        core
    }

    #[test]
    fn a_worker_waits_for_those_that_registered_before_it_and_for_no_others() {
        let mut core = Core::default();
        assert_eq!(expects(&core.handle(registered(0, "gpu0")), 0), Some(vec![]));
        let actions = core.handle(registered(1, "gpu1"));
        assert_eq!(expects(&actions, 1), Some(vec!["gpu0".to_owned()]));
        assert_eq!(expects(&actions, 0), None);
    }

    #[test]
    fn many_workers_each_reach_few_and_together_all() {
        let mut core = Core::default();
        let (workers, mut reached, mut pairs) = (128, BTreeSet::from([0]), 0);
        for connection in 0..workers {
            let actions = core.handle(registered(connection, &connection.to_string()));
            let names = expects(&actions, connection).expect("told");
            let numbers: Vec<u64> = names.iter().map(|name| name.parse().expect("one")).collect();
            let distances = numbers.iter().map(|other| connection - other);
            let all = connection < ALL_PAIRS as u64;
            assert!(distances.clone().all(|distance| all || distance.is_power_of_two()));
            assert_eq!(
                numbers.len() as u64,
                if all { connection } else { 1 + connection.ilog2() as u64 }
            );
            if numbers.iter().any(|other| reached.contains(other)) {
                reached.insert(connection);
            }
            pairs += numbers.len();
        }
        assert_eq!(reached.len() as u64, workers);
        assert!(pairs < 128 * 8, "{pairs}");
    }

    #[test]
    fn a_successor_replaces_its_predecessor_before_it_is_introduced() {
        let mut core = cluster_of_two();
        let actions = core.handle(registered(2, "gpu1"));
        assert_eq!(actions[0], Action::Close { connection: 1 });
        let lost = ToWorker::Lost { member: member("gpu1", 1), left: false };
        assert_eq!(actions[1], Action::Send { to: 0, message: lost });
        assert_eq!(expects(&actions, 2), Some(vec!["gpu0".to_owned()]));
        let peer = ToWorker::Peer { member: member("gpu1", 2), address: vec![] };
        assert!(actions.contains(&Action::Send { to: 0, message: peer }));
        // The end of the old connection changes nothing.
        assert_eq!(core.handle(Event::Gone { connection: 1 }), []);
    }

    #[test]
    fn a_worker_does_not_wait_for_one_that_goes_away() {
        let mut core = cluster_of_two();
        let actions = core.handle(Event::Gone { connection: 0 });
        assert_eq!(expects(&actions, 1), Some(vec![]));
        core.handle(registered(2, "gpu0"));
        core.handle(Event::Connected { connection: 2 });
        let actions = core.handle(Event::Gone { connection: 1 });
        assert_eq!(expects(&actions, 2), None, "it has reached its peers");
    }

    proptest! {
        /// Random lives of four workers; after each step, each knows exactly those that are
        /// present, and of any two the later one must reach the earlier one.
        #[test]
        fn all_registered_workers_know_of_each_other(
            steps in proptest::collection::vec((0usize..4, any::<bool>()), 0..40),
        ) {
            let mut core = Core::default();
            let mut awaited: BTreeMap<ConnectionId, BTreeSet<String>> = BTreeMap::new();
            let mut known: BTreeMap<ConnectionId, BTreeSet<Member>> = BTreeMap::new();
            let mut present: BTreeMap<String, Member> = BTreeMap::new();
            for (connection, (name, arrives)) in (0u64..).zip(steps) {
                let name = format!("gpu{name}");
                let event = if arrives {
                    present.insert(name.clone(), member(&name, connection));
                    known.insert(connection, BTreeSet::new());
                    registered(connection, &name)
                } else {
                    let Some(gone) = present.remove(&name) else { continue };
                    Event::Gone { connection: gone.incarnation }
                };
                for action in core.handle(event) {
                    match action {
                        Action::Send { to, message: ToWorker::Peer { member, .. } } => {
                            known.entry(to).or_default().insert(member);
                        }
                        Action::Send { to, message: ToWorker::Lost { member, .. } } => {
                            prop_assert!(known.entry(to).or_default().remove(&member));
                        }
                        Action::Send { to, message: ToWorker::Expect { names } } => {
                            awaited.insert(to, names.into_iter().collect());
                        }
                        _ => {}
                    }
                }
                for me in present.values() {
                    let others: BTreeSet<_> =
                        present.values().filter(|other| *other != me).cloned().collect();
                    prop_assert_eq!(&known[&me.incarnation], &others);
                    // Connections are numbered in the order of registration here.
                    let earlier = others.iter().filter(|one| one.incarnation < me.incarnation);
                    let earlier: BTreeSet<_> = earlier.map(|one| one.name.clone()).collect();
                    prop_assert_eq!(&awaited[&me.incarnation], &earlier);
                }
            }
        }
    }
}
