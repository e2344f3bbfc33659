//! Counts the memory of each owner, and decides whether one that found no room may wait.
//!
//! A *consumer* is a task or a fetch while it may hold memory. It asks for more while it holds
//! some, so consumers can deadlock. When all of them wait, and no memory is about to be free, the
//! youngest is refused: it gives everything back and tries again, alone.
//!
//! Pure: it counts; [`super`] blocks threads and wakes them.
//!
//! *Invariant:* the bytes charged are the sum of what consumers and objects hold, what is being
//! moved, and what is about to be free; and when every consumer waits, one is refused or memory is
//! about to be free.

use std::collections::{BTreeMap, VecDeque};

/// Two amounts of bytes: of the device and of the host.
pub(super) type Pair = [u64; 2];

/// The owner of a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A task or a fetch.
    Consumer(u64),
    /// An object.
    Object,
    /// A copy of an object that is being made.
    Copy,
    /// No owner: it is about to be free.
    Released,
}

/// What a consumer does that has found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Something has changed: try again.
    Again,
    /// Wait until something changes.
    Wait,
    /// Give everything back.
    Refused,
}

#[derive(Default)]
struct Consumer {
    held: Pair,
    /// The version of the counts at which it found no room.
    waits_since: Option<u64>,
    refused: bool,
}

/// The counts.
#[derive(Default)]
pub(super) struct Accounts {
    charged: Pair,
    kept: Pair,
    moving: Pair,
    consumers: BTreeMap<u64, Consumer>,
    /// The queue of those that are to run alone. The first stays in it until it ends.
    alone: VecDeque<u64>,
    next: u64,
    /// Threads that are making room, and readers that end without waiting for memory.
    reclaimers: u32,
    /// Increases whenever there may be more room.
    version: u64,
}

impl Accounts {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Records that there may be more room.
    pub(super) fn changed(&mut self) {
        self.version += 1;
    }

    pub(super) fn charged(&self) -> Pair {
        self.charged
    }

    /// Whether any consumer exists.
    pub(super) fn is_working(&self) -> bool {
        !self.consumers.is_empty()
    }

    /// Bytes without an owner that are not free yet.
    pub(super) fn pending(&self) -> Pair {
        [0, 1].map(|at: usize| {
            let held: u64 = self.consumers.values().map(|consumer| consumer.held[at]).sum();
            self.charged[at] - self.kept[at] - self.moving[at] - held
        })
    }

    /// Bytes that belong to neither an object nor memory about to be free.
    pub(super) fn transient(&self) -> Pair {
        let pending = self.pending();
        [0, 1].map(|at: usize| self.charged[at] - self.kept[at] - pending[at])
    }

    /// Admits a consumer, unless another runs alone or waits to.
    pub(super) fn enter(&mut self) -> Option<u64> {
        self.alone.is_empty().then(|| self.admit())
    }

    fn admit(&mut self) -> u64 {
        self.next += 1;
        self.consumers.insert(self.next, Consumer::default());
        self.next
    }

    /// Adds a place to the queue of those that are to run alone.
    pub(super) fn queue(&mut self) -> u64 {
        self.next += 1;
        self.alone.push_back(self.next);
        self.next
    }

    /// Whether the one in this place is alone now.
    pub(super) fn enter_alone(&mut self, place: u64) -> bool {
        let first = self.alone.front() == Some(&place) && self.consumers.is_empty();
        if first {
            self.consumers.insert(place, Consumer::default());
        }
        first
    }

    /// Ends a consumer. What it still holds is about to be free.
    pub(super) fn leave(&mut self, consumer: u64) {
        self.consumers.remove(&consumer);
        self.alone.retain(|place| *place != consumer);
        self.changed();
    }

    pub(super) fn begin_reclaim(&mut self) {
        self.reclaimers += 1;
    }

    pub(super) fn end_reclaim(&mut self) {
        self.reclaimers = self.reclaimers.saturating_sub(1);
        self.changed();
    }

    /// The count of an owner, for owners that are counted individually.
    fn share(&mut self, owner: Owner) -> Option<&mut Pair> {
        match owner {
            Owner::Consumer(consumer) => {
                self.consumers.get_mut(&consumer).map(|consumer| &mut consumer.held)
            }
            Owner::Object => Some(&mut self.kept),
            Owner::Copy => Some(&mut self.moving),
            Owner::Released => None,
        }
    }

    pub(super) fn charge(&mut self, owner: Owner, at: usize, bytes: u64) {
        self.charged[at] += bytes;
        if let Some(share) = self.share(owner) {
            share[at] += bytes;
        }
    }

    pub(super) fn free(&mut self, owner: Owner, at: usize, bytes: u64) {
        if let Some(share) = self.share(owner) {
            share[at] -= bytes;
        }
        self.charged[at] -= bytes;
        self.changed();
    }

    pub(super) fn pass(&mut self, from: Owner, to: Owner, at: usize, bytes: u64) {
        if let Some(share) = self.share(from) {
            share[at] -= bytes;
        }
        if let Some(share) = self.share(to) {
            share[at] += bytes;
        }
        self.changed();
    }

    /// Decides what a consumer does that found no room when the counts had version `seen`.
    pub(super) fn stuck(&mut self, consumer: u64, seen: u64) -> Outcome {
        let version = self.version;
        let Some(this) = self.consumers.get_mut(&consumer) else { return Outcome::Refused };
        if this.refused {
            return Outcome::Refused;
        }
        if seen != version {
            return Outcome::Again;
        }
        this.waits_since = Some(version);
        let all_wait =
            self.consumers.values().all(|consumer| consumer.waits_since == Some(version));
        if !all_wait || self.reclaimers > 0 || self.pending() != [0, 0] {
            return Outcome::Wait;
        }
        match self.consumers.last_entry() {
            Some(mut youngest) if *youngest.key() != consumer => {
                youngest.get_mut().refused = true;
                Outcome::Wait
            }
            _ => Outcome::Refused,
        }
    }

    /// Whether a waiting consumer must try again, or is refused.
    pub(super) fn is_called(&self, consumer: u64, seen: u64) -> bool {
        self.version != seen
            || self.consumers.get(&consumer).is_none_or(|consumer| consumer.refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn of_two_that_wait_for_each_other_the_younger_gives_way() {
        let mut accounts = Accounts::default();
        let (first, second) = (accounts.enter().expect("open"), accounts.enter().expect("open"));
        accounts.charge(Owner::Consumer(first), 1, 50);
        accounts.charge(Owner::Consumer(second), 1, 50);
        let seen = accounts.version();
        assert_eq!(accounts.stuck(first, seen), Outcome::Wait);
        assert_eq!(accounts.stuck(second, seen), Outcome::Refused);
        accounts.leave(second);
        assert!(accounts.is_called(first, seen));
        assert_eq!(accounts.pending(), [0, 50], "what it held is about to be free");
        assert_eq!(accounts.stuck(first, accounts.version()), Outcome::Wait);
        accounts.free(Owner::Released, 1, 50);
        assert_eq!(
            accounts.stuck(first, accounts.version()),
            Outcome::Refused,
            "nobody else is there"
        );
    }

    #[test]
    fn nobody_enters_while_somebody_is_to_be_alone() {
        let mut accounts = Accounts::default();
        let first = accounts.enter().expect("open");
        let place = accounts.queue();
        assert_eq!(accounts.enter(), None);
        assert!(!accounts.enter_alone(place));
        accounts.leave(first);
        assert!(accounts.enter_alone(place));
        assert_eq!(accounts.enter(), None);
        accounts.leave(place);
        assert!(accounts.enter().is_some());
    }

    /// A task that takes several pieces of memory and then ends, in a host of limited size.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Stage {
        Outside,
        Queued(u64),
        Inside(u64),
        Waits(u64, u64),
        Ended,
        Failed,
    }

    struct Task {
        pieces: Vec<u64>,
        held: Vec<u64>,
        stage: Stage,
        alone: bool,
    }

    /// Tasks, and memory of ended tasks that transfers still read.
    struct World {
        accounts: Accounts,
        capacity: u64,
        tasks: Vec<Task>,
        late: Vec<u64>,
    }

    impl World {
        /// One step of a task, if it can make one.
        fn step(&mut self, at: usize) -> bool {
            let (stage, alone) = (self.tasks[at].stage, self.tasks[at].alone);
            match stage {
                Stage::Ended | Stage::Failed => return false,
                Stage::Outside if alone => {
                    self.tasks[at].stage = Stage::Queued(self.accounts.queue());
                }
                Stage::Outside => match self.accounts.enter() {
                    Some(consumer) => self.tasks[at].stage = Stage::Inside(consumer),
                    None => return false,
                },
                Stage::Queued(place) => {
                    if !self.accounts.enter_alone(place) {
                        return false;
                    }
                    self.tasks[at].stage = Stage::Inside(place);
                }
                Stage::Inside(consumer) => return self.ask(at, consumer),
                Stage::Waits(consumer, seen) => {
                    if !self.accounts.is_called(consumer, seen) {
                        return false;
                    }
                    return self.ask(at, consumer);
                }
            }
            true
        }

        fn ask(&mut self, at: usize, consumer: u64) -> bool {
            let task = &mut self.tasks[at];
            let Some(&piece) = task.pieces.get(task.held.len()) else {
                task.stage = Stage::Ended;
                self.leave(at, consumer);
                return true;
            };
            let seen = self.accounts.version();
            if self.accounts.charged()[1] + piece <= self.capacity {
                self.accounts.charge(Owner::Consumer(consumer), 1, piece);
                self.tasks[at].held.push(piece);
                self.tasks[at].stage = Stage::Inside(consumer);
                return true;
            }
            match self.accounts.stuck(consumer, seen) {
                Outcome::Again => {}
                Outcome::Wait => self.tasks[at].stage = Stage::Waits(consumer, seen),
                Outcome::Refused => {
                    self.leave(at, consumer);
                    let task = &mut self.tasks[at];
                    task.stage = if task.alone { Stage::Failed } else { Stage::Outside };
                    task.alone = true;
                }
            }
            true
        }

        /// Ends a consumer; its memory is free a little later.
        fn leave(&mut self, at: usize, consumer: u64) {
            self.late.append(&mut self.tasks[at].held);
            self.accounts.leave(consumer);
        }

        fn check(&self) -> Result<(), TestCaseError> {
            let held: u64 = self.tasks.iter().flat_map(|task| &task.held).sum();
            let late: u64 = self.late.iter().sum();
            prop_assert_eq!(self.accounts.charged()[1], held + late);
            prop_assert_eq!(self.accounts.pending()[1], late);
            prop_assert!(held + late <= self.capacity);
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn every_task_ends_and_fails_only_if_it_would_not_fit_alone(
            needs in proptest::collection::vec(proptest::collection::vec(1u64..60, 0..5), 1..8),
            choices in proptest::collection::vec(0usize..1000, 50..300),
        ) {
            let task = |pieces| Task { pieces, held: vec![], stage: Stage::Outside, alone: false };
            let tasks: Vec<Task> = needs.into_iter().map(task).collect();
            let mut world = World { accounts: Accounts::default(), capacity: 100, tasks, late: vec![] };
            let mut idle = 0;
            for choice in choices.into_iter().cycle() {
                let at = choice % (world.tasks.len() + 1);
                let went = if at == world.tasks.len() {
                    // A transfer ends.
                    let bytes = world.late.pop();
                    bytes.map(|bytes| world.accounts.free(Owner::Released, 1, bytes)).is_some()
                } else {
                    world.step(at)
                };
                world.check()?;
                // All in turn, so that no task is idle only because it was not chosen.
                idle = if went { 0 } else { idle + 1 };
                if idle > 50 {
                    let mut any = world.late.pop().map(|bytes| {
                        world.accounts.free(Owner::Released, 1, bytes);
                    }).is_some();
                    for at in 0..world.tasks.len() {
                        any |= world.step(at);
                        world.check()?;
                    }
                    if !any {
                        break;
                    }
                    idle = 0;
                }
            }
            for task in &world.tasks {
                let fits = task.pieces.iter().sum::<u64>() <= 100;
                let expected = if fits { Stage::Ended } else { Stage::Failed };
                prop_assert_eq!(task.stage, expected, "{:?}", task.pieces);
            }
            prop_assert_eq!(world.accounts.charged(), [0, 0]);
        }
    }
}
