//! What depends on what, what is still needed, and what must be computed again.
//!
//! Does not choose workers.
//!
//! A task is *active* (waiting, ready, queued or sent) while its outputs are needed and not yet
//! available; an active task *uses* its inputs. An object is needed while a client holds it or an
//! active task uses it, and its bytes are freed when neither does. The record of a task outlives
//! its run for as long as one of its outputs is needed or is an input of another record: this is
//! the lineage from which lost objects are computed again.

use std::collections::BTreeSet;

use super::record::{Arguments, Presence, Waiters};
use super::{
    Action, Because, ClientId, Core, Object, ObjectId, ObjectKey, Outputs, Placed, Special, State,
    Task, TaskError, TaskKey, TaskSpec,
};

impl Core {
    pub(super) fn add_object(&mut self, id: ObjectId, producer: Option<TaskKey>) -> ObjectKey {
        self.objects.insert(Object {
            id,
            producer,
            bytes: 0,
            presence: Presence::default(),
            holders: Default::default(),
            uses: 0,
            lineage: 0,
        })
    }

    /// Adds a task whose specification has been checked.
    pub(super) fn add_task(&mut self, client: ClientId, spec: TaskSpec) {
        let inputs = spec.inputs.iter().filter_map(|input| self.objects.key(*input)).collect();
        let special = Special { on: spec.wishes.on, resources: spec.wishes.resources };
        let is_special = special.on.is_some() || !special.resources.is_empty();
        let function = self.function(spec.function);
        self.held_bytes += spec.arguments.len() as u64;
        let key = self.tasks.insert(Task {
            id: spec.id,
            sequence: self.next_sequence,
            stamp: 0,
            state: State::Idle,
            function,
            missing: 0,
            priority: spec.wishes.priority,
            retries: spec.wishes.retries,
            deaths: 0,
            misses: 0,
            retracting: false,
            inputs,
            arguments: Arguments::from_slice(&spec.arguments),
            products: Outputs::new(),
            special: is_special.then(|| Box::new(special)),
            placed: Placed::default(),
        });
        self.next_sequence += 1;
        let outputs = (0..spec.outputs).map(|at| {
            let output = self.add_object(spec.id.plus(at), Some(key));
            self.objects[output].holders.push(client);
            output
        });
        self.tasks[key].products = outputs.collect();
        for at in 0..self.tasks[key].inputs.len() {
            let input = self.tasks[key].inputs[at];
            self.objects[input].lineage += 1;
        }
        self.activate(key);
    }

    /// Activates an idle task, and the idle tasks that it depends on.
    pub(super) fn activate(&mut self, first: TaskKey) {
        let mut todo = vec![first];
        while let Some(key) = todo.pop() {
            if self.tasks[key].state != State::Idle {
                continue;
            }
            // It has been placed before, so it has run before.
            let again = self.tasks[key].placed.because != Because::Nothing;
            self.recomputed += u64::from(again);
            let mut forgotten = Vec::new();
            for &input in &self.tasks[key].inputs {
                let object = &mut self.objects[input];
                object.uses += 1;
                if object.is_available() || object.error().is_some() {
                    continue;
                }
                match object.producer {
                    Some(task) if self.tasks[task].state != State::Failed => todo.push(task),
                    _ if self.coming.contains_key(&input) => {}
                    _ => forgotten.push(input),
                }
            }
            for input in forgotten {
                let object = self.objects[input].id;
                self.fail_object(input, &TaskError::Forgotten { object });
            }
            self.functions[self.tasks[key].function as usize].active += 1;
            self.settle(key);
        }
    }

    /// Checks which inputs of an active task are available, and makes it waiting, ready or failed.
    fn settle(&mut self, key: TaskKey) {
        self.next_stamp = self.next_stamp.wrapping_add(1);
        let stamp = self.next_stamp;
        let mut missing = 0;
        let mut error = None;
        for &input in &self.tasks[key].inputs {
            let object = &mut self.objects[input];
            if let Some(cause) = object.error() {
                error = Some(cause.clone());
                break;
            }
            if !object.is_available() {
                missing += 1;
                object.wait(key, stamp);
            }
        }
        let task = &mut self.tasks[key];
        (task.stamp, task.missing, task.state) = (stamp, missing, State::Waiting);
        if let Some(error) = error {
            self.fail(key, &error);
        } else if missing == 0 {
            self.make_ready(key);
        }
    }

    /// Whether the outputs of a task are still needed.
    pub(super) fn is_wanted(&self, key: TaskKey) -> bool {
        self.tasks[key].products.iter().any(|output| {
            let object = &self.objects[*output];
            object.error().is_none() && object.is_needed()
        })
    }

    /// Settles an active task that its worker no longer has.
    pub(super) fn run_again(&mut self, key: TaskKey) {
        if self.is_wanted(key) { self.settle(key) } else { self.retire(key) }
    }

    /// Makes an active task idle, if no worker has it.
    pub(super) fn retire(&mut self, key: TaskKey) {
        self.unqueue(key);
        self.tasks[key].state = State::Idle;
        self.functions[self.tasks[key].function as usize].active -= 1;
        self.drop_uses(key);
        self.garbage.extend_from_slice(&self.tasks[key].products);
    }

    fn drop_uses(&mut self, key: TaskKey) {
        for &input in &self.tasks[key].inputs {
            let object = &mut self.objects[input];
            object.uses -= 1;
            if !object.is_needed() {
                self.garbage.push(input);
            }
        }
    }

    /// Frees and forgets whatever is no longer needed.
    pub(super) fn sweep(&mut self) {
        while let Some(key) = self.garbage.pop() {
            let Some(object) = self.objects.get(key) else { continue };
            if object.is_needed() {
                continue;
            }
            let (producer, lineage) = (object.producer, object.lineage);
            self.free_replicas(key);
            if let Some(task) = producer {
                self.unneeded_output(task);
            } else if lineage == 0 {
                self.forget_object(key);
            }
        }
    }

    fn unneeded_output(&mut self, key: TaskKey) {
        match self.tasks[key].state {
            State::Waiting | State::Ready | State::Queued if !self.is_wanted(key) => {
                self.retire(key);
            }
            State::Sent if !self.is_wanted(key) => {
                self.retract(self.tasks[key].placed.worker, key, true);
            }
            _ => {}
        }
        let forgettable = |output: &ObjectKey| {
            let object = &self.objects[*output];
            object.lineage == 0 && !object.is_needed()
        };
        let task = &self.tasks[key];
        if matches!(task.state, State::Idle | State::Failed)
            && task.products.iter().all(forgettable)
        {
            self.forget_task(key);
        }
    }

    fn forget_task(&mut self, key: TaskKey) {
        let task = self.tasks.remove(key);
        self.held_bytes -= task.arguments.len() as u64;
        for &input in &task.inputs {
            let object = &mut self.objects[input];
            object.lineage -= 1;
            if !object.is_needed() {
                self.garbage.push(input);
            }
        }
        for output in task.products {
            self.free_replicas(output);
            self.forget_object(output);
        }
    }

    fn forget_object(&mut self, key: ObjectKey) {
        let object = self.objects.remove(key);
        self.held_bytes -= object.inline().map_or(0, |bytes| bytes.len() as u64);
        self.askers.remove(&key);
        self.coming.remove(&key);
        self.arrivals.forget(key);
    }

    /// Frees the workers' copies of an object. A copy in the scheduler itself is small, and stays
    /// for the lineage.
    fn free_replicas(&mut self, key: ObjectKey) {
        let object = &mut self.objects[key];
        for id in object.take_replicas() {
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.objects.remove(&key);
            }
            self.actions.push(Action::Free { worker: id, object: object.id });
        }
    }

    /// Fails an active task that no worker has.
    pub(super) fn fail(&mut self, first: TaskKey, error: &TaskError) {
        let mut todo = vec![first];
        while let Some(key) = todo.pop() {
            if matches!(self.tasks[key].state, State::Failed | State::Idle | State::Sent) {
                continue;
            }
            self.unqueue(key);
            self.drop_uses(key);
            let task = &mut self.tasks[key];
            task.state = State::Failed;
            let function = &mut self.functions[task.function as usize];
            (function.active, function.failed) = (function.active - 1, function.failed + 1);
            for input in std::mem::take(&mut task.inputs) {
                self.objects[input].lineage -= 1;
                self.garbage.push(input);
            }
            for at in 0..self.tasks[key].products.len() {
                let output = self.tasks[key].products[at];
                todo.extend(self.mark_failed(output, error));
                self.garbage.push(output);
            }
        }
    }

    /// Fails an object, and everything that waits for it.
    pub(super) fn fail_object(&mut self, key: ObjectKey, error: &TaskError) {
        for task in self.mark_failed(key, error) {
            self.fail(task, error);
        }
        self.garbage.push(key);
    }

    /// Sets an object's error, and returns the tasks that wait for it. An object that is available
    /// (its task runs again for the sake of another output) stays so.
    fn mark_failed(&mut self, key: ObjectKey, error: &TaskError) -> Vec<TaskKey> {
        let object = &mut self.objects[key];
        if object.error().is_some() || object.is_available() {
            return Vec::new();
        }
        let waiters = object.take_waiters();
        object.presence = Presence::Failed(Box::new(error.clone()));
        let mut told: Vec<ClientId> = object.holders.to_vec();
        told.extend(self.askers.remove(&key).unwrap_or_default());
        told.dedup();
        for client in told {
            let (object, error) = (object.id, error.clone());
            self.actions.push(Action::Unavailable { client, object, error });
        }
        let waits = |(task, stamp): &(TaskKey, u32)| self.waits(*task, *stamp);
        waiters.into_iter().filter(waits).map(|(task, _)| task).collect()
    }

    pub(super) fn waits(&self, task: TaskKey, stamp: u32) -> bool {
        self.tasks.get(task).is_some_and(|task| task.state == State::Waiting && task.stamp == stamp)
    }

    /// Continues the tasks that waited for an object, which is now available, and the clients.
    pub(super) fn became_available(&mut self, key: ObjectKey, waiters: Waiters) {
        for (task, stamp) in waiters {
            if self.waits(task, stamp) {
                self.tasks[task].missing -= 1;
                if self.tasks[task].missing == 0 {
                    self.make_ready(task);
                }
            }
        }
        let object = &self.objects[key];
        let Some(product) = object.product() else { return };
        for &client in &object.holders {
            let (object, product) = (object.id, product.clone());
            self.actions.push(Action::Available { client, object, product });
        }
        for client in self.askers.remove(&key).unwrap_or_default() {
            self.send_location(client, key);
        }
    }

    /// Handles the loss of the last copies of objects. The tasks in `apart` are handled elsewhere.
    pub(super) fn objects_lost(
        &mut self,
        gone: &[ObjectKey],
        worker: &str,
        apart: &BTreeSet<TaskKey>,
    ) {
        let needed = |key: &&ObjectKey| self.objects[**key].is_needed();
        let lost: BTreeSet<ObjectKey> = gone.iter().filter(needed).copied().collect();
        if lost.is_empty() {
            return;
        }
        let affected: Vec<TaskKey> = self
            .tasks
            .iter()
            .filter(|(key, task)| {
                let waits = matches!(task.state, State::Waiting | State::Ready | State::Queued);
                waits && !apart.contains(key) && task.inputs.iter().any(|i| lost.contains(i))
            })
            .map(|(key, _)| key)
            .collect();
        for &key in &lost {
            let object = &self.objects[key];
            match object.producer {
                Some(task) if self.tasks[task].state != State::Failed => self.activate(task),
                _ => {
                    let error = TaskError::Lost { object: object.id, worker: worker.to_owned() };
                    self.fail_object(key, &error);
                }
            }
        }
        for key in affected {
            if !matches!(self.tasks[key].state, State::Failed) {
                self.unqueue(key);
                self.settle(key);
            }
        }
    }
}
