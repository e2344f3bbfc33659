//! The scheduler's invariants, as code.

use std::collections::BTreeMap;

use super::{Core, ObjectId, ObjectKey, State, TaskKey, WorkerId};

impl Core {
    /// Panics with a sentence if an invariant does not hold.
    pub(crate) fn sanity_check(&self) {
        self.check_tasks();
        self.check_objects();
        self.check_workers();
    }

    /// Whether a copy of an object may be dropped: the object is not needed, or there is another
    /// copy.
    pub(crate) fn may_spare(&self, id: ObjectId) -> bool {
        let object = self.objects.key(id).map(|key| &self.objects[key]);
        object.is_none_or(|object| {
            !object.is_needed() || object.is_available() || object.error().is_some()
        })
    }

    fn check_tasks(&self) {
        let mut active_of = vec![0; self.functions.len()];
        for (key, task) in self.tasks.iter() {
            let id = task.id;
            let missing = |task: &super::Task| {
                task.inputs.iter().filter(|i| !self.objects[**i].is_available()).count()
            };
            match task.state {
                State::Waiting => {
                    assert_eq!(task.missing as usize, missing(task), "{id} counts wrongly");
                    assert!(task.missing > 0, "{id} waits for nothing");
                    for &input in &task.inputs {
                        self.check_comes(key, input);
                    }
                }
                State::Ready => {
                    assert_eq!(missing(task), 0, "{id} is ready without its inputs");
                    let queued = self.ready.iter().any(|entry| entry.task == key);
                    assert!(queued != self.parked.contains_key(&key), "{id} is lost");
                }
                State::Queued => {
                    assert_eq!(missing(task), 0, "{id} is queued without its inputs");
                    let worker = &self.workers[&task.placed.worker];
                    let entries = worker.queue.iter().chain(&worker.needy);
                    assert_eq!(entries.filter(|e| e.task == key).count(), 1, "{id} is lost");
                }
                State::Sent => {
                    let worker =
                        self.workers.get(&task.placed.worker).expect("no dead worker has a task");
                    assert_eq!(worker.sent.values().filter(|sent| **sent == key).count(), 1);
                }
                State::Idle | State::Failed => {}
            }
            let active = !matches!(task.state, State::Idle | State::Failed);
            let waits = active && !matches!(task.state, State::Sent);
            assert!(!waits || self.is_wanted(key), "{id} is active, but nobody wants it");
            assert!(!task.products.is_empty(), "{id} has no outputs");
            active_of[task.function as usize] += u64::from(active);
        }
        let counted = self.functions.iter().map(|function| function.active);
        assert!(counted.eq(active_of), "the active tasks of a function are miscounted");
    }

    /// Every input that a task waits for is being computed or moved.
    fn check_comes(&self, key: TaskKey, input: ObjectKey) {
        let object = &self.objects[input];
        if object.is_available() {
            return;
        }
        let task = &self.tasks[key];
        let registered = object.waiters().contains(&(key, task.stamp));
        assert!(registered, "{} is not told when {} comes", task.id, object.id);
        assert!(object.error().is_none(), "{} waits for the failed {}", task.id, object.id);
        if let Some(producer) = object.producer {
            let state = self.tasks[producer].state;
            let comes = !matches!(state, State::Idle | State::Failed);
            assert!(comes, "nobody computes {}, which {} needs", object.id, task.id);
        }
    }

    fn check_objects(&self) {
        let mut uses: BTreeMap<ObjectKey, u32> = BTreeMap::new();
        let mut lineage: BTreeMap<ObjectKey, u32> = BTreeMap::new();
        for (_, task) in self.tasks.iter() {
            for &input in &task.inputs {
                *lineage.entry(input).or_default() += 1;
                if !matches!(task.state, State::Idle | State::Failed) {
                    *uses.entry(input).or_default() += 1;
                }
            }
        }
        assert_eq!(self.objects.names(), self.objects.len(), "a name has no object");
        let arguments = self.tasks.iter().map(|(_, task)| task.arguments.len());
        let inline = self.objects.iter().filter_map(|(_, object)| object.inline());
        let held: usize = arguments.sum::<usize>() + inline.map(|bytes| bytes.len()).sum::<usize>();
        assert_eq!(self.held_bytes, held as u64, "bytes are counted wrongly");
        for (key, object) in self.objects.iter() {
            let id = object.id;
            assert_eq!(self.objects.key(id), Some(key), "{id} is lost");
            assert_eq!(uses.get(&key).copied().unwrap_or_default(), object.uses, "uses of {id}");
            let known = lineage.get(&key).copied().unwrap_or_default();
            assert_eq!(known, object.lineage, "lineage of {id}");
            for worker in object.replicas() {
                let worker = self.workers.get(worker).expect("no dead worker has an object");
                assert!(worker.objects.contains(&key), "a worker does not know of its {id}");
            }
            assert!(object.is_needed() || object.replicas().is_empty(), "{id} is kept for nobody");
            assert!(object.error().is_none() || !object.is_available(), "{id} is there and failed");
            if let Some(producer) = object.producer {
                let state = self.tasks[producer].state;
                let comes = object.is_available() || object.error().is_some();
                let lost = object.is_needed() && !comes && state == State::Idle;
                assert!(!lost, "{id} is needed, and nobody computes it");
            } else {
                assert!(object.is_needed() || object.lineage > 0, "{id} is remembered for nobody");
            }
        }
    }

    fn check_crowd(&self, id: WorkerId) {
        let worker = self.workers.get(&id);
        let (room, waits, works) = worker.map_or((false, false, true), |w| {
            let waits = !(w.queue.is_empty() && w.needy.is_empty());
            (w.has_room(), waits, waits || !w.sent.is_empty())
        });
        assert_eq!(self.crowd.roomy.contains(&id), room, "room of {id}");
        assert_eq!(self.crowd.awaited.contains(&id), room && waits, "queues of {id}");
        assert_eq!(self.crowd.idle.contains(&id), !works, "work of {id}");
    }

    fn check_workers(&self) {
        let all = self.workers.keys().chain(&self.crowd.roomy);
        for id in all.chain(&self.crowd.awaited).chain(&self.crowd.idle) {
            self.check_crowd(*id);
        }
        for (id, worker) in &self.workers {
            assert_eq!(worker.sent.len(), worker.order_of.len());
            for key in worker.sent.values() {
                let task = &self.tasks[*key];
                let at = (task.state, task.placed.worker);
                assert_eq!(at, (State::Sent, *id), "{} twice", worker.name);
            }
            for key in &worker.objects {
                assert!(self.objects[*key].replicas().contains(id), "{} is forgotten", worker.name);
            }
            let mut free = worker.free.clone();
            for key in worker.sent.values() {
                let special = self.tasks[*key].special.iter();
                for (name, amount) in special.flat_map(|special| &special.resources) {
                    *free.entry(name.clone()).or_default() += amount;
                }
            }
            assert_eq!(free, worker.resources, "resources of {} leak", worker.name);
            let rest = worker.queue.len() + worker.needy.len();
            assert!(!worker.sent.is_empty() || rest == 0, "{} sits on its queue", worker.name);
            let room = !(self.ready.is_empty() || worker.alone) && worker.sent.is_empty();
            assert!(!room, "{} is idle although there is work", worker.name);
        }
    }
}
