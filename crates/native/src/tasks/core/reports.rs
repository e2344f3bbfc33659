//! What workers report of tasks and objects: done, failed, gained, not to be had.
//!
//! Does not know which connection a report came over.
//!
//! *Invariant:* a report about a task counts only from the worker that has the task.

use super::record::Presence;
use super::{
    Action, Core, INLINE_LIMIT, ObjectId, ObjectKey, Product, Ran, TaskError, TaskKey, WorkerId,
};

/// A task fails when its inputs could not be fetched this often, so that a worker that reaches no
/// peer does not keep the others computing forever.
const MISSES_ALLOWED: u16 = 100;

/// A copy that could not be fetched this often is considered lost.
const MISSES_BORNE: u16 = 2;

impl Core {
    /// Stores an object that is small enough to live here.
    pub(super) fn take_inline(&mut self, key: ObjectKey, bytes: Vec<u8>) {
        self.held_bytes += bytes.len() as u64;
        self.objects[key].bytes = bytes.len() as u64;
        let waiters = self.objects[key].take_waiters();
        self.objects[key].presence = Presence::Inline(bytes.into());
        self.became_available(key, waiters);
    }

    /// Records that a worker has a copy of an object.
    pub(super) fn gained(&mut self, worker: WorkerId, id: ObjectId, bytes: u64) {
        let useful = self.objects.key(id).filter(|key| {
            let object = &self.objects[*key];
            object.is_needed() && object.error().is_none() && object.inline().is_none()
        });
        let (Some(key), Some(holder)) = (useful, self.workers.get_mut(&worker)) else {
            self.actions.push(Action::Free { worker, object: id });
            return;
        };
        self.coming.remove(&key);
        holder.objects.insert(key);
        self.arrivals.remove(key, worker);
        self.crowd.note_change();
        let object = &mut self.objects[key];
        object.bytes = bytes;
        if let Some(waiters) = object.add_replica(worker) {
            self.became_available(key, waiters);
        }
    }

    pub(super) fn done(
        &mut self,
        worker: WorkerId,
        id: ObjectId,
        products: Vec<Product>,
        ran: Ran,
    ) {
        let Some(key) = self.take_back(worker, id) else { return };
        self.learn_duration(key, worker, ran.micros);
        let failed = products.len() != self.tasks[key].products.len();
        self.note_ran(key, worker, ran, failed);
        if failed {
            let worker = self.worker_name(worker);
            let message = format!("{} outputs instead of the promised number", products.len());
            return self.ended_badly(key, TaskError::Failed { task: id, worker, message });
        }
        for (at, product) in products.into_iter().enumerate() {
            let output = self.tasks[key].products[at];
            match product {
                Product::Inline(bytes) if bytes.len() <= INLINE_LIMIT => {
                    let object = &self.objects[output];
                    if object.error().is_none() && !object.is_available() {
                        self.take_inline(output, bytes);
                    }
                }
                product => {
                    let object = self.objects[output].id;
                    self.gained(worker, object, product.bytes());
                }
            }
        }
        (self.tasks[key].deaths, self.tasks[key].misses) = (0, 0);
        self.retire(key);
    }

    pub(super) fn task_failed(
        &mut self,
        worker: WorkerId,
        id: ObjectId,
        error: TaskError,
        ran: Ran,
    ) {
        if let Some(key) = self.take_back(worker, id) {
            self.note_ran(key, worker, ran, true);
            self.ended_badly(key, error);
        }
    }

    fn ended_badly(&mut self, key: TaskKey, error: TaskError) {
        if !self.is_wanted(key) {
            self.retire(key);
        } else if self.tasks[key].retries > 0 {
            self.tasks[key].retries -= 1;
            self.run_again(key);
        } else {
            self.fail(key, &error);
        }
    }

    /// Handles a worker's report that it could not get an input: an expected copy may be missing.
    pub(super) fn unreachable(
        &mut self,
        worker: WorkerId,
        task: ObjectId,
        object: ObjectId,
        source: Option<WorkerId>,
        missing: bool,
    ) {
        self.not_fetched(worker, object);
        let input = self.objects.key(object);
        let Some(key) = self.take_back(worker, task) else { return };
        let misses = self.tasks[key].misses.saturating_add(1);
        self.tasks[key].misses = misses;
        if let Some(input) = input {
            let object = &self.objects[input];
            // An unreachable copy is given up only if the object can be computed again.
            let given_up = missing || (misses > MISSES_BORNE && object.producer.is_some());
            let had = source.filter(|source| given_up && object.replicas().contains(source));
            if let Some(source) = had {
                self.drop_replica(source, input, key);
            }
        }
        if misses < MISSES_ALLOWED || !self.is_wanted(key) {
            return self.run_again(key);
        }
        let worker = self.worker_name(worker);
        let message = format!("input {object} could not be fetched, {misses} times");
        self.fail(key, &TaskError::Failed { task, worker, message });
    }

    /// Records that a copy does not come, whoever was to use it there.
    pub(super) fn not_fetched(&mut self, worker: WorkerId, object: ObjectId) {
        if let Some(key) = self.objects.key(object) {
            self.arrivals.remove(key, worker);
        }
    }

    fn drop_replica(&mut self, source: WorkerId, key: ObjectKey, asking: TaskKey) {
        let object = &mut self.objects[key];
        object.drop_replica(source);
        let is_gone = !object.is_available();
        self.actions.push(Action::Free { worker: source, object: object.id });
        let name = self.worker_name(source);
        if let Some(worker) = self.workers.get_mut(&source) {
            worker.objects.remove(&key);
        }
        if is_gone {
            self.objects_lost(&[key], &name, &[asking].into());
        }
    }

    pub(super) fn fetched(
        &mut self,
        worker: WorkerId,
        object: ObjectId,
        source: &str,
        bytes: u64,
        micros: Option<u64>,
    ) {
        let to = self.workers.get(&worker).map(|worker| worker.place);
        // What is read in place says nothing about the link.
        if let Some((to, micros)) = to.zip(micros) {
            let from = self.links.place(source);
            self.links.learn((from, to), bytes, micros, self.now);
        }
        self.gained(worker, object, bytes);
    }
}
