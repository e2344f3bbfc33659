//! Which workers there are, which peers each must know, and when the cluster is complete.
//!
//! Pure: events in, messages out. Does not read sockets.
//!
//! *Invariant:* any two registered workers have been told of each other; a name belongs to at
//! most one registered worker.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::native::connection::ConnectionId;
use crate::wire::native::ToWorker;
use crate::wire::peer::Member;

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
    /// Every planned worker has been connected once.
    Complete,
}

struct Worker {
    member: Member,
    address: Vec<u8>,
    connected: bool,
    leaving: bool,
}

/// The scheduler's view of the cluster.
pub(super) struct Core {
    planned: BTreeSet<String>,
    workers: BTreeMap<ConnectionId, Worker>,
    complete: bool,
}

impl Core {
    /// A cluster that is to have these workers.
    pub(super) fn new(planned: impl IntoIterator<Item = String>) -> Self {
        Self { planned: planned.into_iter().collect(), workers: BTreeMap::new(), complete: false }
    }

    /// Decides what to do about an event.
    pub(super) fn handle(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Registered { connection, member, address } => {
                self.register(connection, member, address, &mut actions);
            }
            Event::Connected { connection } => {
                if let Some(worker) = self.workers.get_mut(&connection) {
                    worker.connected = true;
                }
                if !self.complete && self.all_planned_are_connected() {
                    self.complete = true;
                    actions.push(Action::Complete);
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
        let names = self.expected_by(&member.name);
        actions.push(send(connection, ToWorker::Expect { names }));
        for (&other, worker) in &self.workers {
            let (newcomer, present) = (
                ToWorker::Peer { member: member.clone(), address: address.clone() },
                ToWorker::Peer { member: worker.member.clone(), address: worker.address.clone() },
            );
            actions.extend([send(other, newcomer), send(connection, present)]);
        }
        let worker = Worker { member, address, connected: false, leaving: false };
        self.workers.insert(connection, worker);
    }

    fn forget(&mut self, connection: ConnectionId, actions: &mut Vec<Action>) {
        let Some(gone) = self.workers.remove(&connection) else { return };
        for (&to, worker) in &self.workers {
            let message = ToWorker::Lost { member: gone.member.clone(), left: gone.leaving };
            actions.push(Action::Send { to, message });
            // Before the cluster is complete, the workers wait for the successor of a lost one.
            if self.complete && !worker.connected {
                let names = self.expected_by(&worker.member.name);
                actions.push(Action::Send { to, message: ToWorker::Expect { names } });
            }
        }
    }

    /// The peers that a worker must reach. At the start, that is every planned worker; a worker
    /// that joins later must reach those that are present.
    fn expected_by(&self, name: &str) -> Vec<String> {
        let others = |other: &&String| *other != name;
        if self.complete {
            let connected = self.workers.values().filter(|worker| worker.connected);
            connected.map(|worker| &worker.member.name).filter(others).cloned().collect()
        } else {
            self.planned.iter().filter(others).cloned().collect()
        }
    }

    fn all_planned_are_connected(&self) -> bool {
        self.planned.iter().all(|name| {
            self.workers.values().any(|worker| worker.connected && worker.member.name == *name)
        })
    }
}

#[cfg(test)]
mod tests {
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
        let mut core = Core::new(["gpu0", "gpu1"].map(str::to_owned));
        for (connection, name) in [(0, "gpu0"), (1, "gpu1")] {
            core.handle(registered(connection, name));
        }
        core
    }

    #[test]
    fn the_cluster_is_complete_when_every_planned_worker_is_connected() {
        let mut core = cluster_of_two();
        assert_eq!(core.handle(Event::Connected { connection: 0 }), []);
        assert_eq!(core.handle(Event::Connected { connection: 1 }), [Action::Complete]);
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
    fn a_worker_that_rejoins_does_not_wait_for_one_that_stays_away() {
        let mut core = cluster_of_two();
        core.handle(Event::Connected { connection: 0 });
        core.handle(Event::Connected { connection: 1 });
        core.handle(Event::Gone { connection: 0 });
        let actions = core.handle(registered(2, "gpu0"));
        assert_eq!(expects(&actions, 2), Some(vec!["gpu1".to_owned()]));
        let actions = core.handle(Event::Gone { connection: 1 });
        assert_eq!(expects(&actions, 2), Some(vec![]));
    }

    proptest! {
        /// Random lives of four workers; afterwards each knows exactly those that are present.
        #[test]
        fn all_registered_workers_know_of_each_other(
            steps in proptest::collection::vec((0usize..4, any::<bool>()), 0..40),
        ) {
            let mut core = Core::new((0..4).map(|i| format!("gpu{i}")));
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
                        _ => {}
                    }
                }
                for me in present.values() {
                    let others: BTreeSet<_> =
                        present.values().filter(|other| *other != me).cloned().collect();
                    prop_assert_eq!(&known[&me.incarnation], &others);
                }
            }
        }
    }
}
