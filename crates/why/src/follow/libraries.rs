//! Waits that the library in which they are explains: pools of processes, Dask, databases.
//!
//! *Invariant:* a library's function is said to wait only for a thread that was seen to wait.

use super::Walk;
use crate::calls;
use crate::condition::{Condition, Kind};
use crate::evidence::{Process, State, Thread, Waits};

impl Walk<'_> {
    /// A pool's processes have nothing to do, and a result is wanted: a task went with its process.
    pub(super) fn lost_task(&self, process: &Process, thread: &Thread) -> Option<Condition> {
        if !calls::wants_a_result(thread) || process.threads.iter().any(calls::hands_out) {
            return None;
        }
        let children = self.children.get(&process.pid).into_iter().flatten();
        let alive = children.filter(|child| child.state != State::Zombie);
        let mains = alive.filter_map(|child| child.threads.first());
        let workers: Vec<(bool, &Thread)> =
            mains.filter_map(|main| Some((calls::pool_worker(main)?, main))).collect();
        if workers.is_empty() || workers.iter().any(|(idle, _)| !idle) {
            return None;
        }
        let lost = if process.threads.iter().any(calls::takes_results) {
            "the one that had the task is gone, perhaps killed"
        } else {
            "the pool's thread that takes results has ended"
        };
        let text = format!(
            "waits for a result of a pool, and all of its {} processes wait for tasks: {lost}",
            workers.len()
        );
        let since = workers.iter().map(|(_, main)| *main).chain([thread]);
        let for_ms = since.map(|one| one.asleep_for_ms).min().flatten();
        Some(Condition { for_ms, ..self.at(process, Some(thread), Kind::Child, text) })
    }

    /// A task waits for what it has asked Dask's scheduler for.
    pub(super) fn asked_dask(&self, process: &Process, thread: &Thread) -> Option<Condition> {
        let (function, result) = calls::asks_dask(thread)?;
        let waits = |one: &&Thread| calls::asks_dask(one).is_some_and(|(_, result)| result);
        let all = process.threads.iter().filter(waits).count();
        let text = match (result, all) {
            (true, 2..) => format!(
                "waits for the result of another task ({function}), as {all} of its threads do, \
                 which run no task meanwhile"
            ),
            (true, _) => format!(
                "waits for the result of another task ({function}) in a thread that runs no task \
                 meanwhile"
            ),
            (false, _) => {
                format!("is in {function} of distributed: waits for what others of the cluster do")
            }
        };
        Some(self.at(process, Some(thread), Kind::Lock, text))
    }

    /// A thread asks a database in a file again and again, of which another process has the lock.
    pub(super) fn asks_again(&self, process: &Process, thread: &Thread) -> Option<Condition> {
        let waits = thread.call.as_ref().map(|call| &call.waits);
        let sleeps = matches!(waits, None | Some(Waits::Time { .. })) && !self.runs(thread);
        let again = sleeps && thread.waits_begun > 1 && thread.same_frames;
        if !again || !calls::asks_a_database(thread) {
            return None;
        }
        let holder = |holder: u32| self.evidence.process(holder);
        let mut found = process.locked.iter().filter_map(|one| Some((one, holder(one.holder)?)));
        let (locked, holder) = found.next()?;
        let text = format!(
            "tries again and again to lock {}, which {} has locked",
            locked.path, holder.rank
        );
        let on: Vec<String> =
            if holder.rank == self.rank { Vec::new() } else { vec![holder.rank.clone()] };
        let kind = if on.is_empty() { Kind::FileLock } else { Kind::Peer };
        // It can't succeed before that one runs.
        let for_ms = holder.threads.first().and_then(|main| main.asleep_for_ms);
        Some(Condition { on, for_ms, ..self.at(process, Some(thread), kind, text) })
    }

    /// The children that have ended and of which a process has not asked how, in words.
    pub(super) fn forgotten(&self, process: &Process) -> String {
        let children = self.children.get(&process.pid).into_iter().flatten();
        let ended = children.filter(|child| child.state == State::Zombie);
        let ended: Vec<String> = ended.map(|child| child.pid.to_string()).collect();
        match ended.as_slice() {
            [] => String::new(),
            [one] => {
                format!("; its process {one} has ended, and is a zombie until it is waited for")
            }
            more => format!(
                "; its processes {} have ended, and are zombies until they are waited for",
                more.join(", ")
            ),
        }
    }
}
