//! Why a task does not run, or why it ran where it did, in words.

use std::fmt::Write as _;

use super::{Because, Core, ObjectId, State, Task, WorkerId};

/// So many tasks that go before one are counted.
const COUNTED: usize = 10_000;

impl Core {
    /// One or two sentences on the state of a task.
    pub(crate) fn explain(&self, id: ObjectId) -> String {
        let Some(object) = self.objects.key(id).map(|key| &self.objects[key]) else {
            return format!("{id} is not known: it was never submitted, or everybody released it");
        };
        let Some(key) = object.producer else {
            let replicas = object.replicas().len();
            let have = if replicas == 1 { "worker has" } else { "workers have" };
            return format!("{id} was put, not computed; {replicas} {have} it");
        };
        let task = &self.tasks[key];
        let what = &self.functions[task.function as usize].name;
        let mut text = format!("{id} ({what}) ");
        match task.state {
            State::Waiting => self.explain_waiting(task, &mut text),
            State::Ready if self.parked.contains_key(&key) => {
                text.push_str("could run, but no present worker may run it");
                self.explain_wishes(task, &mut text);
            }
            State::Ready => {
                let before = self.ready.iter().take(COUNTED + 1);
                let before = before.take_while(|entry| entry.task != key).count();
                let more = if before > COUNTED { "more than " } else { "" };
                let go = if before == 1 { "task goes" } else { "tasks go" };
                let _ = write!(
                    text,
                    "could run; {more}{} {go} before it, no worker has room",
                    before.min(COUNTED)
                );
            }
            State::Queued => {
                let _ = write!(
                    text,
                    "waits for {}, which is busy; ",
                    self.worker_name(task.placed.worker)
                );
                self.explain_choice(task, &mut text);
            }
            State::Sent => {
                let _ = write!(text, "is with {}; ", self.worker_name(task.placed.worker));
                self.explain_choice(task, &mut text);
            }
            State::Idle => {
                text.push_str("has run; ");
                self.explain_choice(task, &mut text);
            }
            State::Failed => {
                let error = object.error().map(ToString::to_string).unwrap_or_default();
                let _ = write!(text, "has failed: {error}");
            }
        }
        text
    }

    fn explain_waiting(&self, task: &Task, text: &mut String) {
        let missing: Vec<String> = task
            .inputs
            .iter()
            .filter(|input| !self.objects[**input].is_available())
            .take(4)
            .map(|input| self.objects[*input].id.to_string())
            .collect();
        let inputs = if task.missing == 1 {
            "an input".to_owned()
        } else {
            format!("{} inputs", task.missing)
        };
        let _ = write!(text, "waits for {inputs}: {}", missing.join(", "));
        if task.missing as usize > missing.len() {
            text.push_str(", …");
        }
    }

    pub(super) fn explain_wishes(&self, task: &Task, text: &mut String) {
        let Some(special) = &task.special else { return };
        if let Some(name) = &special.on {
            let _ = write!(text, ": it must run on {name}");
        }
        for (name, amount) in &special.resources {
            let most = self.workers.values().filter_map(|w| w.resources.get(name)).max();
            let most = most.copied().unwrap_or(0);
            let _ = write!(text, ": it needs {name}={amount}, and the most is {most}");
        }
    }

    fn explain_choice(&self, task: &Task, text: &mut String) {
        let placed = &task.placed;
        let name = |id: WorkerId| {
            let name = self.worker_name(id);
            if name.is_empty() { "a worker that is gone".to_owned() } else { name }
        };
        let _ = write!(text, "{} was chosen ", name(placed.worker));
        let reason = match placed.because {
            Because::Nothing => "without an estimate",
            Because::Estimate => "as the first to finish",
            Because::Turn => "as the next in turn",
            Because::Pinned => "as requested",
            Because::Probe => "to measure a link that was idle",
            Because::Stolen => "because it was idle",
        };
        let _ = write!(
            text,
            "{reason}: {:.6} s until the end, {:.6} of it transfer and {:.6} computation",
            placed.finish, placed.transfer, placed.compute
        );
        if let Some((other, finish)) = placed.other() {
            let _ = write!(text, "; next best was {} with {finish:.6} s", name(other));
        }
    }
}
