//! Chooses the worker for each task: the one that is estimated to finish first.
//!
//! Does not know why a task is needed.
//!
//! A ready task is placed only when some worker has room, so that the choice uses the latest
//! information. The chosen worker may be a busy one that has the data; then the task waits in that
//! worker's queue here, where an idle worker may still take it. A worker is sent a little more than
//! it can run at once, so that computation hides messages and transfers.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::{
    Action, Because, Core, Entry, Function, Input, ObjectId, ObjectKey, Placed, Placement, State,
    TaskKey, Worker, WorkerId,
};

/// Seconds of computation sent to a worker per thread, in addition to one waiting task.
const SECONDS_AHEAD: f64 = 0.05;

/// Most tasks that are sent to a worker.
const TASKS_AHEAD: usize = 2048;

/// Weight of the newest run of a function.
const WEIGHT: f64 = 0.2;

impl Worker {
    pub(super) fn has_room(&self) -> bool {
        let threads = self.threads as usize;
        !self.alone
            && (self.sent.len() <= threads
                || (self.sent_seconds < SECONDS_AHEAD * f64::from(self.threads)
                    && self.sent.len() < TASKS_AHEAD))
    }

    /// Seconds until it would begin another task.
    pub(super) fn wait(&self) -> f64 {
        (self.sent_seconds + self.queued_seconds) / f64::from(self.threads)
    }
}

impl Core {
    pub(super) fn function(&mut self, name: String) -> u32 {
        if let Some(function) = self.function_names.get(&name) {
            return *function;
        }
        let function = u32::try_from(self.functions.len()).unwrap_or(u32::MAX);
        let new = Function { name: name.clone(), seconds: None, runs: 0, active: 0, failed: 0 };
        self.functions.push(new);
        self.function_names.insert(name, function);
        function
    }

    pub(super) fn worker_name(&self, id: WorkerId) -> String {
        self.workers.get(&id).map_or_else(String::new, |worker| worker.name.clone())
    }

    pub(super) fn learn_duration(&mut self, key: TaskKey, worker: WorkerId, micros: u64) {
        let seconds = micros as f64 * 1e-6;
        let function = &mut self.functions[self.tasks[key].function as usize];
        let known = function.seconds.unwrap_or(seconds);
        function.seconds = Some(known + WEIGHT * (seconds - known));
        function.runs += 1;
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.finished += 1;
        }
    }

    fn entry(&self, key: TaskKey) -> Entry {
        let task = &self.tasks[key];
        Entry { priority: Reverse(task.priority), sequence: task.sequence, task: key }
    }

    /// Whether a task needs resources or must run alone.
    pub(super) fn is_needy(&self, key: TaskKey) -> bool {
        let task = &self.tasks[key];
        task.deaths > 0 || task.special.as_ref().is_some_and(|s| !s.resources.is_empty())
    }

    /// Queues a task whose inputs are all available.
    pub(super) fn make_ready(&mut self, key: TaskKey) {
        self.tasks[key].state = State::Ready;
        self.ready.insert(self.entry(key));
    }

    /// Removes a task from the queue that it is in.
    pub(super) fn unqueue(&mut self, key: TaskKey) {
        let entry = self.entry(key);
        match self.tasks[key].state {
            State::Ready => {
                if !self.ready.remove(&entry) {
                    self.parked.remove(&key);
                }
            }
            State::Queued => {
                let id = self.tasks[key].placed.worker;
                let seconds = f64::from(self.tasks[key].placed.compute);
                if let Some(worker) = self.workers.get_mut(&id) {
                    if !worker.queue.remove(&entry) {
                        worker.needy.remove(&entry);
                    }
                    worker.queued_seconds = (worker.queued_seconds - seconds).max(0.0);
                    let transfer = f64::from(self.tasks[key].placed.transfer);
                    let incoming = worker.queued_incoming_seconds - transfer;
                    worker.queued_incoming_seconds = incoming.max(0.0);
                    if worker.queue.is_empty() && worker.needy.is_empty() {
                        // Discard rounding errors.
                        (worker.queued_seconds, worker.queued_incoming_seconds) = (0.0, 0.0);
                    }
                }
                self.note(id);
            }
            State::Waiting | State::Sent | State::Idle | State::Failed => return,
        }
        self.tasks[key].state = State::Waiting;
    }

    /// Gives work to every worker that has room.
    pub(super) fn dispatch(&mut self) {
        self.drain_all();
        while !self.crowd.roomy.is_empty()
            && let Some(entry) = self.ready.pop_first()
        {
            self.place(entry);
        }
        self.drain_all();
        if self.ready.is_empty() && self.settings.placement == Placement::EstimatedFinish {
            self.steal();
        }
    }

    fn drain_all(&mut self) {
        let awaited: SmallVec<[WorkerId; 16]> = self.crowd.awaited.iter().copied().collect();
        for id in awaited {
            self.drain(id);
        }
    }

    /// Sends a worker the tasks that wait for it, as far as it has room.
    fn drain(&mut self, id: WorkerId) {
        while let Some(worker) = self.workers.get(&id) {
            if !worker.has_room() {
                return;
            }
            let needy = worker.needy.first().copied();
            let plain = worker.queue.first().copied();
            let first = match (needy, plain) {
                (Some(needy), _) if self.tasks[needy.task].deaths > 0 => {
                    // It must be alone, so let the worker become empty first.
                    worker.sent.is_empty().then_some(needy)
                }
                (Some(needy), plain) if self.fits(worker, needy.task) => {
                    Some(plain.map_or(needy, |plain| plain.min(needy)))
                }
                (_, plain) => plain,
            };
            let Some(entry) = first else { return };
            let urgent = self.ready.first().is_some_and(|other| other.priority < entry.priority);
            if urgent {
                return;
            }
            self.unqueue(entry.task);
            self.send(id, entry.task);
        }
    }

    fn fits(&self, worker: &Worker, key: TaskKey) -> bool {
        self.tasks[key].special.as_ref().is_none_or(|special| {
            special.resources.iter().all(|(name, amount)| worker.free.get(name) >= Some(amount))
        })
    }

    /// Whether a worker could ever run a task.
    pub(super) fn may_run(&self, worker: &Worker, key: TaskKey) -> bool {
        self.tasks[key].special.as_ref().is_none_or(|special| {
            special.on.as_ref().is_none_or(|name| worker.name == *name)
                && special.resources.iter().all(|(name, n)| worker.resources.get(name) >= Some(n))
        })
    }

    /// Chooses a worker for a task that was just taken from the ready queue.
    fn place(&mut self, entry: Entry) {
        let key = entry.task;
        let Some(placed) = self.choose(key) else {
            self.parked.insert(key, self.now);
            return;
        };
        let id = placed.worker;
        self.tasks[key].placed = placed;
        let is_needy = self.is_needy(key);
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if !is_needy && worker.queue.is_empty() && worker.needy.is_empty() && worker.has_room() {
            self.send(id, key);
            return;
        }
        let queue = if is_needy { &mut worker.needy } else { &mut worker.queue };
        queue.insert(entry);
        worker.queued_seconds += f64::from(placed.compute);
        worker.queued_incoming_seconds += f64::from(placed.transfer);
        self.tasks[key].state = State::Queued;
        self.note(id);
        self.drain(id);
    }

    fn choose(&mut self, key: TaskKey) -> Option<Placed> {
        if self.settings.placement == Placement::RoundRobin {
            return self.next_in_turn(key);
        }
        let origins = self.origins(key);
        let mut best: Option<Placed> = None;
        let mut candidates = 0;
        for (&id, worker) in &self.workers {
            if !self.may_run(worker, key) {
                continue;
            }
            candidates += 1;
            let estimate = self.estimate(key, &origins, id, worker);
            best = Some(match best {
                Some(best) if best.finish <= estimate.finish => {
                    if estimate.finish < best.other_finish { best.after(&estimate) } else { best }
                }
                Some(best) => estimate.after(&best),
                None => estimate,
            });
        }
        let pinned = self.tasks[key].special.as_ref().is_some_and(|special| special.on.is_some());
        if pinned {
            return best.map(|best| Placed { because: Because::Pinned, ..best });
        }
        if candidates > 1 && best.is_some_and(|b| b.other().is_some()) && self.has_transfers(key) {
            let probed = self.links.wants_probe().then(|| self.stalest(key)).flatten();
            return probed.or(best);
        }
        best
    }

    fn next_in_turn(&mut self, key: TaskKey) -> Option<Placed> {
        let able: Vec<WorkerId> =
            self.workers.iter().filter(|(_, w)| self.may_run(w, key)).map(|(id, _)| *id).collect();
        let at = usize::try_from(self.turn).unwrap_or_default() % able.len().max(1);
        let id = *able.get(at)?;
        self.turn += 1;
        let estimate = self.estimate(key, &self.origins(key), id, &self.workers[&id]);
        Some(Placed { because: Because::Turn, ..estimate })
    }

    fn has_transfers(&self, key: TaskKey) -> bool {
        self.tasks[key].inputs.iter().any(|input| self.objects[*input].inline().is_none())
    }

    /// The worker whose link from the task's data has not been measured for the longest time.
    fn stalest(&self, key: TaskKey) -> Option<Placed> {
        let input =
            self.tasks[key].inputs.iter().find(|i| !self.objects[**i].replicas().is_empty());
        let object = &self.objects[*input?];
        let source = self.workers.get(object.replicas().first()?)?.place;
        let elsewhere = |id: &&WorkerId| !object.replicas().contains(id);
        let able = self.workers.keys().filter(elsewhere);
        let able = able.filter(|id| self.may_run(&self.workers[id], key));
        let id = *able.min_by_key(|id| self.links.measured((source, self.workers[id].place)))?;
        let estimate = self.estimate(key, &self.origins(key), id, &self.workers[&id]);
        Some(Placed { because: Because::Probe, ..estimate })
    }

    fn input(&mut self, key: ObjectKey, id: WorkerId) -> Input {
        let object = &self.objects[key];
        if let Some(bytes) = object.inline() {
            return Input::Inline(bytes.to_vec());
        }
        let bytes = object.bytes;
        match self.best_source(key, id, &self.workers[&id]) {
            None => Input::Here,
            Some((source, _)) => {
                self.arrivals.insert(key, id);
                Input::At { worker: source, bytes }
            }
        }
    }

    /// Sends a task to a worker.
    pub(super) fn send(&mut self, id: WorkerId, key: TaskKey) {
        let mut inputs = Vec::with_capacity(self.tasks[key].inputs.len());
        for at in 0..self.tasks[key].inputs.len() {
            let input = self.tasks[key].inputs[at];
            let name = self.objects[input].id;
            inputs.push((name, self.input(input, id)));
        }
        let order = self.next_order;
        self.next_order += 1;
        let task = &mut self.tasks[key];
        task.state = State::Sent;
        let Some(worker) = self.workers.get_mut(&id) else { return };
        worker.sent.insert(order, key);
        worker.order_of.insert(key, (order, self.now));
        worker.sent_seconds += f64::from(task.placed.compute);
        worker.incoming_seconds += f64::from(task.placed.transfer);
        worker.alone = task.deaths > 0;
        for (name, amount) in task.special.iter().flat_map(|special| &special.resources) {
            if let Some(free) = worker.free.get_mut(name) {
                *free = free.saturating_sub(*amount);
            }
        }
        self.actions.push(Action::Run {
            worker: id,
            task: task.id,
            outputs: u32::try_from(task.products.len()).unwrap_or(u32::MAX),
            function: self.functions[task.function as usize].name.clone(),
            arguments: task.arguments.to_vec(),
            inputs,
        });
        self.note(id);
    }

    /// Removes a task from a worker. `None` if the worker does not have it.
    pub(super) fn take_back(&mut self, id: WorkerId, task: ObjectId) -> Option<TaskKey> {
        let key = self.objects[self.objects.key(task)?].producer?;
        let record = &mut self.tasks[key];
        if (record.state, record.placed.worker, record.id) != (State::Sent, id, task) {
            return None;
        }
        let worker = self.workers.get_mut(&id)?;
        let (order, _) = worker.order_of.remove(&key)?;
        worker.sent.remove(&order);
        worker.alone = false;
        worker.retracting -= u32::from(record.retracting);
        worker.sent_seconds = (worker.sent_seconds - f64::from(record.placed.compute)).max(0.0);
        let incoming = worker.incoming_seconds - f64::from(record.placed.transfer);
        worker.incoming_seconds = incoming.max(0.0);
        if worker.sent.is_empty() {
            // Discard rounding errors.
            (worker.sent_seconds, worker.incoming_seconds) = (0.0, 0.0);
        }
        for (name, amount) in record.special.iter().flat_map(|special| &special.resources) {
            *worker.free.entry(name.clone()).or_default() += amount;
        }
        record.retracting = false;
        record.state = State::Waiting;
        self.note(id);
        Some(key)
    }

    /// Asks a worker to return a task, or to end it if nobody wants its outputs any more.
    pub(super) fn retract(&mut self, id: WorkerId, key: TaskKey, unwanted: bool) {
        let task = &mut self.tasks[key];
        let again = std::mem::replace(&mut task.retracting, true);
        if again && !unwanted {
            return;
        }
        if let (Some(worker), false) = (self.workers.get_mut(&id), again) {
            worker.retracting += 1;
        }
        self.actions.push(Action::Retract { worker: id, task: task.id, unwanted });
    }

    /// Has more workers fetch a copy.
    pub(super) fn replicate(&mut self, id: ObjectId, copies: u32) {
        let Some(key) = self.objects.key(id) else { return };
        let object = &self.objects[key];
        if object.replicas().is_empty() || !object.is_needed() {
            return;
        }
        let lacks = |(id, _): &(&WorkerId, &Worker)| {
            !object.replicas().contains(id) && !self.arrivals.contains(key, **id)
        };
        let mut others: Vec<(usize, WorkerId)> =
            self.workers.iter().filter(lacks).map(|(id, w)| (w.objects.len(), *id)).collect();
        others.sort_unstable();
        let have = self.workers.len() - others.len();
        for (_, worker) in others.into_iter().take((copies as usize).saturating_sub(have)) {
            if let Input::At { worker: source, bytes } = self.input(key, worker) {
                self.actions.push(Action::Fetch { worker, object: id, source, bytes });
            }
        }
    }
}
