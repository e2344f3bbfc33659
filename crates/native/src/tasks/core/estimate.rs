//! How long a task would take on a worker, transfers of its inputs included.
//!
//! Does not choose a worker.

use smallvec::SmallVec;

use super::links::{Many, SizeClass};
use super::{Because, Core, ObjectKey, Placed, TaskKey, Worker, WorkerId};

/// Assumed run time of a function that has not run yet, in seconds.
const UNKNOWN_SECONDS: f64 = 0.02;

/// The lowest estimate, in seconds: the cost of a message.
const LEAST_SECONDS: f64 = 5e-6;

/// From so many inputs on, those that lie together are estimated together.
const FEW: usize = 16;

/// Inputs of one size class that lie on the same worker and on no other.
struct Together {
    source: WorkerId,
    class: SizeClass,
    all: Many,
    /// How many of them are on their way to each of these workers.
    coming: SmallVec<[(WorkerId, Many); 1]>,
}

/// Where a task's inputs are. Computed once for all workers that may run it.
#[derive(Default)]
pub(super) struct Origins {
    /// Inputs that lie on one worker each.
    together: SmallVec<[Together; 2]>,
    /// The others that may have to move.
    others: SmallVec<[ObjectKey; 4]>,
}

impl Core {
    pub(super) fn compute_seconds(&self, key: TaskKey) -> f64 {
        let function = &self.functions[self.tasks[key].function as usize];
        function.seconds.unwrap_or(UNKNOWN_SECONDS).max(LEAST_SECONDS)
    }

    /// Where the inputs of a task are that do not live in the scheduler.
    pub(super) fn origins(&self, key: TaskKey) -> Origins {
        let mut origins = Origins::default();
        let inputs = &self.tasks[key].inputs;
        let mut alone: Vec<(WorkerId, SizeClass, Option<WorkerId>, u64)> = Vec::new();
        for &input in inputs {
            let object = &self.objects[input];
            match *object.replicas() {
                [] => {}
                [source] if inputs.len() > FEW => {
                    let ways = self.arrivals.of(input).map(Some).chain([None]);
                    let class = SizeClass::of(object.bytes);
                    alone.extend(ways.map(|to| (source, class, to, object.bytes)));
                }
                _ => origins.others.push(input),
            }
        }
        alone.sort_unstable();
        for same in alone.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (source, class, ..) = same[0];
            let mut together =
                Together { source, class, all: Many::default(), coming: SmallVec::new() };
            for to in same.chunk_by(|a, b| a.2 == b.2) {
                let bytes = to.iter().map(|(.., bytes)| bytes).sum();
                let many = Many { count: to.len() as u64, bytes };
                match to[0].2 {
                    None => together.all = many,
                    Some(worker) => together.coming.push((worker, many)),
                }
            }
            origins.together.push(together);
        }
        origins
    }

    #[allow(clippy::cast_possible_truncation, reason = "estimates need no more digits")]
    pub(super) fn estimate(
        &self,
        key: TaskKey,
        origins: &Origins,
        id: WorkerId,
        worker: &Worker,
    ) -> Placed {
        let compute = self.compute_seconds(key);
        let others = origins.others.iter().filter_map(|input| self.best_source(*input, id, worker));
        let together = origins.together.iter().filter(|together| together.source != id);
        let together = together.filter_map(|Together { source, class, all, coming }| {
            let pair = (self.workers.get(source)?.place, worker.place);
            let comes = coming.iter().find(|(to, _)| *to == id).map(|(_, many)| *many);
            let comes = comes.unwrap_or_default();
            let many = Many { count: all.count - comes.count, bytes: all.bytes - comes.bytes };
            Some(self.links.seconds(pair, *class, many))
        });
        let transfer = others.map(|(_, seconds)| seconds).sum::<f64>() + together.sum::<f64>();
        let before = worker.incoming_seconds + worker.queued_incoming_seconds;
        let arrival = if transfer > 0.0 { before + transfer } else { 0.0 };
        let finish = worker.wait().max(arrival) + compute;
        Placed {
            worker: id,
            finish: finish as f32,
            transfer: transfer as f32,
            compute: compute as f32,
            because: Because::Estimate,
            ..Placed::default()
        }
    }

    /// The source from which a worker gets an object soonest, and the seconds that takes. `None` if
    /// the worker has the object, or will have it.
    pub(super) fn best_source(
        &self,
        key: ObjectKey,
        id: WorkerId,
        worker: &Worker,
    ) -> Option<(WorkerId, f64)> {
        let object = &self.objects[key];
        if object.replicas().is_empty()
            || object.replicas().contains(&id)
            || self.arrivals.contains(key, id)
        {
            return None;
        }
        let one = Many { count: 1, bytes: object.bytes };
        let seconds = |source: &WorkerId| {
            let pair = (self.workers.get(source)?.place, worker.place);
            Some((*source, self.links.seconds(pair, SizeClass::of(object.bytes), one)))
        };
        let ways = object.replicas().iter().filter_map(seconds);
        ways.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}
