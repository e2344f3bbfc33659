//! What idle workers take over from busy ones.
//!
//! Does not choose a worker for a task that has none; [`super::placement`] does.

use super::estimate::Origins;
use super::{Because, Core, Entry, Placed, TaskKey, Worker, WorkerId};

/// Seconds of waiting above which it pays to ask a worker to return a task.
const WORTH_STEALING: f64 = 0.005;

impl Core {
    /// Lets idle workers take tasks from busy ones if they would finish them sooner.
    pub(super) fn steal(&mut self) {
        // With nothing changed, nobody takes what nobody took before.
        if self.crowd.idle.is_empty() || !self.crowd.is_worth_a_look() {
            return;
        }
        while let Some((victim, worker)) = self.busiest() {
            let taken = match worker.queue.last().copied() {
                Some(entry) => self.take_over(victim, entry),
                None => return self.ask_back(victim),
            };
            if !taken {
                return;
            }
        }
    }

    /// The worker with the most to do, if that is worth stealing.
    fn busiest(&self) -> Option<(WorkerId, &Worker)> {
        let all = self.workers.iter().map(|(id, worker)| (*id, worker));
        let busiest = all.max_by(|(_, a), (_, b)| a.wait().total_cmp(&b.wait()))?;
        (busiest.1.wait() > WORTH_STEALING).then_some(busiest)
    }

    /// The first idle worker that would finish a task before its worker begins it.
    fn sooner(&mut self, key: TaskKey, victim: WorkerId) -> Option<Placed> {
        let wait = self.workers.get(&victim)?.wait();
        if self.compute_seconds(key) >= wait {
            return None;
        }
        let origins = self.origins(key);
        let mut idle = self.crowd.idle.iter();
        let first = idle.find_map(|id| self.is_sooner(key, &origins, *id, victim, wait));
        if first.is_none() {
            self.crowd.note_refusal(self.tasks[key].inputs.len());
        }
        first
    }

    fn is_sooner(
        &self,
        key: TaskKey,
        origins: &Origins,
        thief: WorkerId,
        victim: WorkerId,
        wait: f64,
    ) -> Option<Placed> {
        let to = self.workers.get(&thief)?;
        if !self.may_run(to, key) {
            return None;
        }
        let estimate = self.estimate(key, origins, thief, to);
        let before = Placed { worker: victim, ..self.tasks[key].placed };
        let placed = Placed { because: Because::Stolen, ..estimate.after(&before) };
        (f64::from(estimate.finish) < wait).then_some(placed)
    }

    /// Whether an idle worker has taken a task that waits for a busy one.
    fn take_over(&mut self, victim: WorkerId, entry: Entry) -> bool {
        let Some(placed) = self.sooner(entry.task, victim) else { return false };
        self.unqueue(entry.task);
        self.tasks[entry.task].placed = placed;
        self.stolen += 1;
        self.send(placed.worker, entry.task);
        true
    }

    /// Asks for the youngest task that the victim cannot have begun, unless another was asked for.
    fn ask_back(&mut self, victim: WorkerId) {
        let worker = &self.workers[&victim];
        if worker.retracting > 0 || worker.sent.len() <= worker.threads as usize {
            return;
        }
        let Some(&key) = worker.sent.values().next_back() else { return };
        if !self.is_needy(key) && self.sooner(key, victim).is_some() {
            self.retract(victim, key, false);
        }
    }
}
