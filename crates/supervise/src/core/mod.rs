//! Decides which processes to start, stop, kill and restart, and when.
//!
//! Pure: takes events and the time, returns actions, and has no other inputs or effects. The actor
//! creates the events and carries out the actions. Time is measured from the start of the
//! supervisor; [`Core::next_deadline`] says when the actor must call again without an event.
//!
//! *Invariant:* a process is started only in an empty slot, signals go only to living processes,
//! the cluster is READY only while every wanted process is and answers, and no action follows
//! [`Action::End`].

mod deaths;
mod ending;
mod event;
mod joined;
#[cfg(test)]
mod laws;
mod liveness;
mod questions;
mod requests;
mod slot;
#[cfg(test)]
mod tests;
mod together;
#[cfg(test)]
mod world;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::record::What;
use super::{
    Cause, ClusterState, Escalation, Launch, Outcome, ProcessPhase, ProcessState, ReadyWhen,
    Record, Stall,
};
use cuda_cluster_model::plan::Supervision;
use cuda_cluster_model::units::HumanBytes;
use cuda_cluster_wire::process::{Exit, Key};
use cuda_cluster_wire::status::Status;
pub(super) use event::{Action, Event, GpuFinding, Subject};
use liveness::Liveness;
use slot::{AfterStop, Slot};
use together::Together;

/// Time since the supervisor started.
pub(super) type Moment = Duration;

/// Identifies a process by its position in [`Core::state`]; the scheduler is first, if there is
/// one.
pub(super) type SlotNumber = usize;

/// The state of the decisions for one cluster.
#[derive(Clone, Debug)]
pub(super) struct Core {
    policy: Supervision,
    run_to_completion: bool,
    scheduler_stays: bool,
    workers_wait: bool,
    first_alone: bool,
    /// The workers that are started together; `None`: each for itself.
    together: Option<Together>,
    /// Whether READY waits for [`Event::Verified`].
    unverified: bool,
    /// The scheduler first, if there is one; then the workers, then the hosts.
    slots: Vec<Slot>,
    workers_from: usize,
    hosts_from: usize,
    state: ClusterState,
    /// Time of the last event.
    now: Moment,
    /// Deadline of the first start.
    ready_by: Moment,
    /// When to ask all processes for an answer next.
    ask_at: Moment,
    /// What is known about the guardian's answers.
    guardian: Liveness,
    /// What is wrong with these, which is also among the state's notes.
    lasting: BTreeMap<Subject, String>,
    /// The outcome, once the end has begun.
    ending: Option<Outcome>,
    /// Whether a scheduler elsewhere has ended it.
    from_elsewhere: bool,
    over: bool,
    next_key: u64,
    began: SystemTime,
    random: fastrand::Rng,
    actions: Vec<Action>,
}

impl Core {
    /// Creates the core for a launch, whose processes are in `state` in the same order.
    ///
    /// `began` is the time of day at [`Moment::ZERO`]; `seed` is for jitter.
    pub(super) fn new(launch: &Launch, state: ClusterState, began: SystemTime, seed: u64) -> Self {
        let shown = state.processes();
        let slots = launch.processes().zip(shown);
        let kill_percent = launch.supervision.kill_percent;
        let slots = slots.map(|(spec, shown)| Slot::new(spec.ready, kill_percent, shown.clone()));
        let mut slots: Vec<Slot> = slots.collect();
        let workers_from = usize::from(launch.scheduler.is_some());
        let hosts_from = workers_from + launch.workers.len();
        let first_idle = hosts_from - launch.standby;
        for slot in &mut slots[first_idle..hosts_from] {
            slot.wanted = false;
            slot.shown.state = ProcessPhase::Stopped;
        }
        let together = launch
            .together
            .map(|restarts| Together::new(restarts, (workers_from..first_idle).collect()));
        Self {
            policy: launch.supervision.clone(),
            run_to_completion: launch.run_to_completion,
            scheduler_stays: launch.scheduler_stays && launch.scheduler.is_some(),
            workers_wait: launch.workers_wait,
            first_alone: launch.first_alone,
            unverified: launch.to_be_verified,
            slots,
            workers_from,
            hosts_from,
            together,
            state,
            now: Moment::ZERO,
            ready_by: Moment::ZERO,
            ask_at: Moment::ZERO,
            guardian: Liveness::default(),
            lasting: BTreeMap::new(),
            ending: None,
            from_elsewhere: false,
            over: false,
            next_key: 0,
            began,
            random: fastrand::Rng::with_seed(seed),
            actions: Vec::new(),
        }
    }

    /// Handles an event, and returns the resulting actions.
    pub(super) fn handle(&mut self, event: Event, now: Moment) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        self.forgive_own_absence(now);
        self.now = now;
        self.apply(event, now);
        self.proceed(now);
        self.settle(now);
        std::mem::take(&mut self.actions)
    }

    /// When to send [`Event::Tick`], if no other event occurs before.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let mut deadlines: Vec<Moment> = self.liveness_deadlines();
        deadlines.extend(self.together.as_ref().and_then(|one| one.deadline(self.now)));
        for slot in &self.slots {
            deadlines.extend(slot.kill_at);
            if slot.phase() == ProcessPhase::Starting {
                deadlines.extend(slot.ready_by);
            }
            // One that is already due waits for another process, and so for an event.
            let waits = slot.phase() == ProcessPhase::Restarting && slot.not_before > self.now;
            deadlines.extend(waits.then_some(slot.not_before));
        }
        // The cluster ends when the last living process is given up.
        let living = || self.slots.iter().filter(|slot| slot.is_alive());
        if self.ending.is_some() && living().all(|slot| slot.give_up_at.is_some()) {
            deadlines.extend(living().filter_map(|slot| slot.give_up_at).max());
        }
        deadlines.into_iter().min().filter(|_| !self.over)
    }

    /// The current state.
    pub(super) fn state(&self) -> ClusterState {
        let mut state = self.state.clone();
        let since = |liveness: &Liveness| liveness.silent_since.map(|at| self.time_of_day(at));
        state.guardian_not_answering_since = since(&self.guardian);
        let mut shown = self.slots.iter().map(|slot| {
            let silent = slot.phase() == ProcessPhase::Unresponsive;
            let not_answering_since = since(&slot.liveness).filter(|_| silent);
            let starts_at = (slot.phase() == ProcessPhase::Restarting)
                .then(|| self.time_of_day(slot.not_before));
            ProcessState { not_answering_since, starts_at, ..slot.shown.clone() }
        });
        state.scheduler = (self.workers_from == 1).then(|| shown.next()).flatten();
        state.workers = shown.by_ref().take(self.hosts_from - self.workers_from).collect();
        state.hosts = shown.collect();
        state
    }

    /// The key of a slot's living process.
    pub(super) fn key_of(&self, slot: SlotNumber) -> Option<Key> {
        self.slots.get(slot)?.key
    }

    /// A worker's rank in its present start, if ranks start together, and how many starts there
    /// were before.
    pub(super) fn rank_and_restart(&self, slot: SlotNumber) -> (Option<u32>, u32) {
        let shown = self.slots.get(slot).map(|slot| &slot.shown);
        let restarts = shown.map_or(0, |shown| shown.restarts);
        let together = self.together.as_ref().map(Together::restarts);
        (shown.and_then(|shown| shown.rank), together.unwrap_or(restarts))
    }

    /// The percentage of its memory limit at which a slot's process is killed; `None` for never.
    pub(super) fn kill_percent(&self, slot: SlotNumber) -> Option<f64> {
        self.slots.get(slot)?.kill_percent
    }

    /// Whether a scheduler elsewhere has ended the cluster.
    pub(super) fn ended_from_elsewhere(&self) -> bool {
        self.from_elsewhere
    }

    /// The slot with this name.
    pub(super) fn slot_named(&self, name: &str) -> Option<SlotNumber> {
        self.slots.iter().position(|slot| slot.shown.name == name)
    }

    fn slot_of(&self, key: Key) -> Option<SlotNumber> {
        self.slots.iter().position(|slot| slot.key == Some(key))
    }

    fn apply(&mut self, event: Event, now: Moment) {
        match event {
            Event::Begin => {
                self.ready_by = now + self.policy.ready_within.0;
                self.ask_at = now + self.ask_every();
                self.record(now, None, What::Cluster { state: self.state.state, cause: None });
            }
            Event::Started { key, pid } => self.started(key, pid, now),
            Event::NotStarted { key, reason } => self.not_started(key, &reason, now),
            Event::Said { key, status } => self.said(key, status, now),
            Event::StatusClosed { key } => self.status_closed(key, now),
            Event::Gone { key } => self.gone(key, now),
            Event::Looked { stopped, guardian_stopped } => {
                self.looked(&stopped, guardian_stopped, now);
            }
            Event::AskAll => self.ask_all(now),
            Event::GuardianAlive => self.guardian_answered(now),
            Event::LogRead { slot, log_tail } => self.log_read(slot, &log_tail),
            Event::Exited { key, exit, log_tail, starved } => {
                self.exited(key, exit, log_tail, starved, now);
            }
            Event::MemoryReached { key, resident_bytes, limit_bytes } => {
                self.memory_reached(key, resident_bytes, limit_bytes, now);
            }
            Event::Gpu { slot, finding } => self.gpu_found(slot, finding, now),
            Event::Bundled { slot, at, path, gpu_errors } => {
                self.bundled(slot, &at, path, gpu_errors, now);
            }
            Event::NotCopied { key, path, reason } => self.not_copied(key, path, reason, now),
            Event::Noted { about, text, lasts } => {
                self.note(about, lasts.then(|| text.clone()));
                self.record(now, None, What::Note { text });
            }
            Event::Stalled(stall) => self.stalled(stall, now),
            Event::Stop(how) => self.stop(how, now),
            Event::Restart(slot) => self.restart(slot, now),
            Event::Scale(wanted) => self.scale(wanted, now),
            Event::Verified => self.unverified = false,
            Event::Met(met) => self.met(met, now),
            Event::GuardianLost => {
                let text = "the guardian process has ended; nothing holds the processes together \
                            any more";
                let cause = Cause::of_cluster(text);
                self.end_at_once(Outcome::Failed(cause), now);
            }
            Event::Broken { reason } => {
                let cause = Cause::of_cluster(reason);
                self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
            }
            Event::Tick => {}
        }
    }

    fn not_copied(&mut self, key: Key, path: PathBuf, reason: String, now: Moment) {
        self.state.notes.push(format!("{} is not written any more: {reason}", path.display()));
        self.record(now, self.slot_of(key), What::NotCopied { path, reason });
    }

    /// Shows this about a subject in place of what was shown before.
    fn note(&mut self, about: Subject, text: Option<String>) {
        if let Some(before) = self.lasting.remove(&about) {
            self.state.notes.retain(|note| *note != before);
        }
        if let Some(text) = text {
            self.lasting.insert(about, text.clone());
            self.state.notes.push(text);
        }
    }

    fn stalled(&mut self, stall: Option<Stall>, now: Moment) {
        // What was seen may be of a time before the last restart.
        let stall = stall.filter(|_| self.state.state.is_at_work());
        let known = stall.is_some() || self.lasting.contains_key(&Subject::Progress);
        if self.ending.is_some() || !known {
            return;
        }
        self.note(Subject::Progress, stall.as_ref().map(|stall| stall.text.clone()));
        let Some(stall) = stall else { return self.record(now, None, What::GoesOn) };
        let (text, process) = (stall.text.clone(), stall.processes.first().cloned());
        self.record(now, None, What::Stalled(stall));
        if self.policy.end_when_stalled {
            let cause = Cause { process, stalled: true, ..Cause::of_cluster(text) };
            self.begin_end(Outcome::Failed(cause), Escalation::Graceful, now);
        }
    }

    // ---- messages from processes

    fn started(&mut self, key: Key, pid: u32, now: Moment) {
        let Some(slot) = self.slot_of(key) else { return };
        self.slots[slot].shown.pid = Some(pid);
        let restarts = self.slots[slot].shown.restarts;
        self.record(now, Some(slot), What::Started { pid, restarts });
    }

    /// A shim that could not be started counts as a process that ended at once.
    fn not_started(&mut self, key: Key, reason: &str, now: Moment) {
        let Some(slot) = self.slot_of(key) else { return };
        self.slots[slot].blame = Some(format!("could not be started: {reason}"));
        let exit = Exit { code: None, signal: None, core_dumped: false };
        self.exited(key, exit, Vec::new(), false, now);
    }

    fn said(&mut self, key: Key, status: Status, now: Moment) {
        let Some(number) = self.slot_of(key) else { return };
        self.heard_of(number);
        let slot = &mut self.slots[number];
        match status {
            Status::Bound { cpus, mems, notes } => {
                slot.shown.timings.bound_ms = Some(millis(now - slot.started));
                slot.shown.cpus = Some(cpus);
                slot.shown.mems = (!mems.is_empty()).then_some(mems);
                slot.shown.notes.clone_from(&notes);
                for text in notes {
                    self.record(now, Some(number), What::Note { text });
                }
            }
            Status::Step { step } => {
                slot.shown.step = Some(step.clone());
                self.record(now, Some(number), What::Step { step });
            }
            // They wait for the scheduler themselves.
            Status::Forks => self.workers_wait |= number < self.workers_from,
            Status::Ready { address, peers, ucx, condition } => {
                slot.shown.address = address;
                slot.shown.ucx = ucx;
                slot.shown.peers = peers;
                slot.reports(condition);
                self.ready(number, now);
            }
            Status::KilledAt { percent } => slot.kill_percent = percent,
            Status::Working => slot.has_worked = slot.ready.is_some(),
            Status::Alive { condition } => {
                slot.reports(condition);
                self.answered(number, now);
            }
            Status::Dashboard { link } => slot.shown.dashboard = Some(link),
            Status::Note { text } => {
                slot.shown.notes.push(text.clone());
                self.record(now, Some(number), What::Note { text });
            }
            Status::Joined { worker } => self.joined(worker, now),
            Status::Parted { name, lost, reason } => self.parted(&name, lost, &reason, now),
            Status::Leaving { then, reason, lost } => {
                // One that has not started when the cluster does has failed to.
                let counts = slot.ready.is_some() || !self.state.state.is_first();
                slot.leaving = counts.then_some(then);
                slot.farewell = counts.then(|| (reason.clone(), lost));
                self.record(now, Some(number), What::Note { text: format!("leaves: {reason}") });
            }
            Status::Failed { reason } => {
                let what = if slot.ready.is_some() { "go on" } else { "start" };
                slot.blame = Some(format!("could not {what}: {reason}"));
            }
        }
    }

    fn status_closed(&mut self, key: Key, now: Moment) {
        let Some(number) = self.slot_of(key) else { return };
        self.cannot_be_asked(number);
        let slot = &self.slots[number];
        let executed = slot.ready_when == ReadyWhen::Executed
            && slot.shown.timings.bound_ms.is_some()
            && slot.blame.is_none();
        if executed {
            self.ready(number, now);
        }
    }

    fn ready(&mut self, number: SlotNumber, now: Moment) {
        let slot = &mut self.slots[number];
        if slot.phase() != ProcessPhase::Starting {
            return;
        }
        slot.ready = Some(now);
        slot.ready_by = None;
        slot.shown.step = None;
        slot.shown.state = ProcessPhase::Ready;
        let after_ms = millis(now - slot.started);
        slot.shown.timings.ready_ms = Some(after_ms);
        self.record(now, Some(number), What::Ready { after_ms });
        self.look_again(now);
    }

    fn memory_reached(&mut self, key: Key, resident: u64, limit: u64, now: Moment) {
        let Some(number) = self.slot_of(key) else { return };
        if !self.slots[number].is_at_work() {
            return;
        }
        let Some(percent) = self.slots[number].kill_percent else { return };
        let (resident, limit) = (HumanBytes(resident), HumanBytes(limit));
        let reason =
            format!("reached {percent} % of its memory limit of {limit:#} ({resident} in use)");
        self.slots[number].blame = Some(reason.clone());
        self.slots[number].then = AfterStop::CountAsDeath;
        // Asked to end, it could go on allocating. Besides, its scheduler would not count the end
        // against the task that filled the memory, and the task would be tried for ever.
        self.kill(number, &reason, now);
    }

    // ---- deadlines

    /// Starts processes that may start, and kills those whose time is over.
    fn proceed(&mut self, now: Moment) {
        self.keep_deadlines(now);
        if self.ending.is_some() || self.over {
            return;
        }
        // They reach their machines meanwhile, and wait for the scheduler themselves.
        if self.state.state.is_first() {
            self.start_those_that_may(self.hosts_from..self.slots.len(), now);
        }
        if self.workers_from == 1 {
            let workers = &self.slots[1..self.hosts_from];
            let workers_gone = workers.iter().all(|slot| !slot.is_alive());
            if workers_gone && self.may_start(0, now) {
                self.start(0, now);
            }
            let scheduler = &self.slots[0];
            let beside = self.workers_wait
                && self.state.state.is_first()
                && scheduler.phase() == ProcessPhase::Starting
                && scheduler.shown.last_exit.is_none();
            if scheduler.phase() != ProcessPhase::Ready && !beside {
                return;
            }
        }
        if !self.may_gather(now) {
            return;
        }
        let first = self.workers_from;
        let is_ready = |slot: &Slot| slot.phase() == ProcessPhase::Ready;
        let alone = self.first_alone
            && self.state.state.is_first()
            && !self.slots.get(first).is_some_and(is_ready);
        let until = if alone { first + 1 } else { self.slots.len() };
        self.start_those_that_may(first..until, now);
    }

    fn start_those_that_may(&mut self, numbers: Range<SlotNumber>, now: Moment) {
        for number in numbers {
            if self.may_start(number, now) {
                self.start(number, now);
            }
        }
    }

    fn may_start(&self, number: SlotNumber, now: Moment) -> bool {
        let slot = &self.slots[number];
        let due = match slot.phase() {
            ProcessPhase::Waiting => slot.wanted,
            ProcessPhase::Restarting => slot.not_before <= now,
            _ => false,
        };
        due && !slot.gpu_pending
    }

    fn start(&mut self, number: SlotNumber, now: Moment) {
        let key = Key(self.next_key);
        self.next_key += 1;
        let first = self.state.state.is_first() && self.ready_by > now;
        let ready_by = if first { self.ready_by } else { now + self.policy.ready_within.0 };
        let slot = &mut self.slots[number];
        slot.take(key, now, ready_by);
        self.actions.push(Action::Start { slot: number, key });
    }

    fn record(&mut self, now: Moment, slot: Option<SlotNumber>, what: What) {
        let process = slot.map(|number| self.slots[number].shown.name.clone());
        let record = Record { at: self.time_of_day(now), process, what };
        self.actions.push(Action::Record(record));
    }

    fn time_of_day(&self, now: Moment) -> String {
        humantime::format_rfc3339_millis(self.began + now).to_string()
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
