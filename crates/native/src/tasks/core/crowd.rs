//! Which workers need a look, among many: those that have room, are idle, or can be sent what
//! waits.
//!
//! Does not decide what to send.
//!
//! *Invariant:* after [`Core::note`] of each worker that changed, each set holds exactly the
//! workers that it names.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::{Core, ObjectKey, WorkerId};

/// Workers by what they could do now.
#[derive(Default)]
pub(super) struct Crowd {
    /// Those that have room.
    pub(super) roomy: BTreeSet<WorkerId>,
    /// Those among them for which tasks wait.
    pub(super) awaited: BTreeSet<WorkerId>,
    /// Those that have nothing to do.
    pub(super) idle: BTreeSet<WorkerId>,
    /// Whether anything changed by which an idle worker may take over a task.
    changed: bool,
    /// Inputs that were looked at for a task that no idle worker took, less what was paid since.
    debt: usize,
}

/// So many of them each later event pays for: a task with thousands of inputs, which nobody takes,
/// would cost each event a look at all of them.
const PAID: usize = 16;

impl Crowd {
    pub(super) fn note_change(&mut self) {
        self.changed = true;
    }

    /// Whether something has changed since the last call, and the last look is paid for.
    pub(super) fn is_worth_a_look(&mut self) -> bool {
        let is_paid = self.debt == 0;
        self.debt = self.debt.saturating_sub(PAID);
        std::mem::take(&mut self.changed) && is_paid
    }

    /// Nobody took a task of so many inputs.
    pub(super) fn note_refusal(&mut self, inputs: usize) {
        self.debt = inputs;
    }
}

fn set(of: &mut BTreeSet<WorkerId>, id: WorkerId, belongs: bool) {
    if belongs {
        of.insert(id)
    } else {
        of.remove(&id)
    };
}

impl Core {
    /// Looks at a worker whose tasks have changed, or that is gone.
    pub(super) fn note(&mut self, id: WorkerId) {
        let worker = self.workers.get(&id);
        let has_room = worker.is_some_and(super::Worker::has_room);
        let is_awaited = worker.is_some_and(|w| !(w.queue.is_empty() && w.needy.is_empty()));
        let is_idle = worker.is_some_and(|w| w.sent.is_empty()) && !is_awaited;
        set(&mut self.crowd.roomy, id, has_room);
        set(&mut self.crowd.awaited, id, has_room && is_awaited);
        set(&mut self.crowd.idle, id, is_idle);
        self.crowd.note_change();
    }
}

/// Objects that workers have been told to fetch.
#[derive(Default)]
pub(super) struct Arrivals(BTreeSet<(ObjectKey, WorkerId)>);

impl Arrivals {
    pub(super) fn insert(&mut self, object: ObjectKey, at: WorkerId) {
        self.0.insert((object, at));
    }

    pub(super) fn remove(&mut self, object: ObjectKey, at: WorkerId) {
        self.0.remove(&(object, at));
    }

    pub(super) fn contains(&self, object: ObjectKey, at: WorkerId) -> bool {
        self.0.contains(&(object, at))
    }

    /// The workers that are to fetch it.
    pub(super) fn of(&self, object: ObjectKey) -> impl Iterator<Item = WorkerId> {
        self.0.range((object, 0)..=(object, WorkerId::MAX)).map(|(_, at)| *at)
    }

    pub(super) fn forget(&mut self, object: ObjectKey) {
        let all: SmallVec<[WorkerId; 4]> = self.of(object).collect();
        for at in all {
            self.remove(object, at);
        }
    }

    pub(super) fn forget_worker(&mut self, gone: WorkerId) {
        self.0.retain(|(_, at)| *at != gone);
    }
}
