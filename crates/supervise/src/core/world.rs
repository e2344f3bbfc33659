//! A simulated environment for the core that checks every action and state against its invariants.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::time::SystemTime;

use super::{Action, Core, Event, GpuFinding, Moment};
use crate::record::What;
use crate::{
    ClusterPhase, ClusterState, Launch, Outcome, ProcessGpu, ProcessPhase, ProcessSpec,
    ProcessState, ReadyWhen, Record, Stall,
};
use cuda_cluster_model::cpuset::{CpuSet, NodeSet};
use cuda_cluster_model::plan::{EngineKind, Program, RestartWhen, Supervision};
use cuda_cluster_model::units::Span;
use cuda_cluster_wire::process::{Containment, Exit, Key};
use cuda_cluster_wire::status::{Condition, Status};

pub(super) fn spec(name: &str, gpu: bool) -> ProcessSpec {
    ProcessSpec {
        name: name.to_owned(),
        program: Program::default(),
        ready: ReadyWhen::Said,
        memory_limit_bytes: None,
        gpu: gpu.then_some(ProcessGpu { index: 0, uuid: None, pci: None }),
        host: None,
        fork_server: None,
    }
}

pub(super) fn policy() -> Supervision {
    let mut policy = Supervision::default();
    policy.limit = 3;
    policy.window = Span::secs(10);
    policy.backoff = Span::millis(100);
    policy.backoff_max = Span::secs(2);
    policy.healthy_after = Span::secs(5);
    policy.ready_within = Span::secs(3);
    policy.grace = Span::secs(1);
    // So long that no process is asked in tests of other subjects.
    policy.answer_within = Span::secs(1 << 30);
    policy
}

pub(super) fn stall() -> Stall {
    let (text, evidence) = ("stalled: gpu1 waits for a lock".to_owned(), None);
    Stall { text, processes: vec!["gpu1".to_owned()], evidence }
}

pub(super) fn launch(scheduler: bool, workers: usize, gpus: bool) -> Launch {
    Launch {
        name: "test".parse().expect("a name"),
        engine: EngineKind::Native,
        simulated: false,
        supervision: policy(),
        strict: false,
        scheduler: scheduler.then(|| spec("scheduler", false)),
        workers: (0..workers).map(|at| spec(&format!("gpu{at}"), gpus)).collect(),
        hosts: Vec::new(),
        standby: 0,
        run_to_completion: false,
        scheduler_stays: false,
        workers_wait: false,
        output_dir: None,
        to_be_verified: false,
        first_alone: false,
        together: None,
        notes: Vec::new(),
    }
}

pub(super) fn core(launch: &Launch) -> Core {
    let (began, log) = (SystemTime::UNIX_EPOCH, |_: &str| PathBuf::new());
    let state = ClusterState::initial(launch, 1, Containment::Subreaper, Path::new(""), log, began);
    Core::new(launch, state, began, 7)
}

/// Simulates the guardian: tracks living processes, and checks every action and state.
pub(super) struct World {
    pub(super) launch: Launch,
    pub(super) core: Core,
    pub(super) now: Moment,
    pub(super) living: BTreeMap<Key, usize>,
    pub(super) told: BTreeMap<Key, Moment>,
    pub(super) killed: BTreeSet<Key>,
    pub(super) starts: BTreeMap<usize, u32>,
    /// Times of each slot's unrequested restarts, except those after a death while READY.
    pub(super) restarts: BTreeMap<usize, Vec<Moment>>,
    /// Processes that were READY.
    worked: BTreeSet<Key>,
    /// Processes that have begun a task while READY.
    pub(super) busy: BTreeSet<Key>,
    /// Slots whose last process died while READY.
    died_at_work: BTreeSet<usize>,
    /// Slots whose GPU is lost.
    lost: BTreeSet<usize>,
    /// Slots whose process ended as requested, and how often such slots were started again.
    stopped: BTreeSet<usize>,
    filled: BTreeMap<usize, u32>,
    pub(super) awaited: BTreeSet<usize>,
    /// Unanswered questions.
    pub(super) asked: BTreeSet<Key>,
    pub(super) logs_read: Vec<usize>,
    pub(super) guardian_asked: bool,
    /// Slots whose processes do not answer.
    pub(super) hung: BTreeSet<usize>,
    pub(super) guardian_hung: bool,
    pub(super) records: Vec<What>,
    pub(super) outcome: Option<Outcome>,
    pub(super) stop_asked: bool,
    pub(super) person_asked: bool,
    /// Whether a scheduler has said that it forks workers.
    forks: bool,
    /// Whether what the workers are told is being made.
    pub(super) meeting: bool,
}

impl World {
    pub(super) fn new(launch: Launch) -> Self {
        let mut world = Self {
            core: core(&launch),
            launch,
            now: Moment::ZERO,
            living: BTreeMap::new(),
            told: BTreeMap::new(),
            killed: BTreeSet::new(),
            starts: BTreeMap::new(),
            restarts: BTreeMap::new(),
            worked: BTreeSet::new(),
            busy: BTreeSet::new(),
            died_at_work: BTreeSet::new(),
            lost: BTreeSet::new(),
            stopped: BTreeSet::new(),
            filled: BTreeMap::new(),
            awaited: BTreeSet::new(),
            asked: BTreeSet::new(),
            logs_read: Vec::new(),
            guardian_asked: false,
            hung: BTreeSet::new(),
            guardian_hung: false,
            records: Vec::new(),
            outcome: None,
            stop_asked: false,
            person_asked: false,
            forks: false,
            meeting: false,
        };
        world.tell(Event::Begin);
        world
    }

    pub(super) fn tell(&mut self, event: Event) {
        self.stop_asked |= matches!(event, Event::Stop(_));
        self.person_asked |= matches!(event, Event::Restart(_) | Event::Scale(_));
        match &event {
            Event::Exited { key, .. } | Event::NotStarted { key, .. } => {
                if let Some(slot) = self.living.remove(key) {
                    match self.is_worker(slot) && self.worked.contains(key) {
                        true => self.died_at_work.insert(slot),
                        false => self.died_at_work.remove(&slot),
                    };
                }
                self.asked.remove(key);
                self.told.remove(key);
                self.killed.remove(key);
            }
            Event::Gpu { slot, finding } => {
                self.awaited.remove(slot);
                if matches!(finding, GpuFinding::Lost(_)) {
                    self.lost.insert(*slot);
                }
            }
            Event::Said { key, status: Status::Forks } => {
                self.forks |= self.living.get(key).is_some_and(|slot| !self.is_worker(*slot));
            }
            Event::Verified => self.launch.to_be_verified = false,
            Event::Met(_) => self.meeting = false,
            _ => {}
        }
        if let Event::Said { key, status: Status::Working } = &event
            && self.worked.contains(key)
        {
            self.busy.insert(*key);
        }
        let of_a_task = match &event {
            Event::Exited { key, .. } | Event::NotStarted { key, .. } => self.busy.contains(key),
            _ => false,
        };
        let over = self.outcome.is_some();
        let actions = self.core.handle(event, self.now);
        for action in actions.iter().filter(|_| of_a_task) {
            if let Action::Record(Record { what: What::Restarting { in_ms, .. }, .. }) = action {
                assert_eq!(*in_ms, 0, "work waits for it");
            }
        }
        assert!(!over || actions.is_empty(), "nothing follows the end: {actions:?}");
        for action in actions {
            self.check_action(action);
        }
        self.check_state();
    }

    pub(super) fn check_action(&mut self, action: Action) {
        assert!(self.outcome.is_none(), "the end is the last action: {action:?}");
        match action {
            Action::Start { slot, key } => {
                assert!(!self.living.values().any(|other| *other == slot), "an empty slot");
                assert!(!self.stop_asked, "nothing is started once the end was asked for");
                let scheduler = self.launch.scheduler.is_some();
                if scheduler && slot > 0 {
                    let scheduler = self.core.state().scheduler.expect("a scheduler");
                    let beside =
                        (self.launch.workers_wait || self.forks) && self.starts.get(&0) == Some(&1);
                    let ready = scheduler.state == ProcessPhase::Ready;
                    let starting = scheduler.state == ProcessPhase::Starting;
                    // Hosts ask for its address themselves.
                    let is_host = slot > self.launch.workers.len();
                    let may = ready || (beside || is_host) && starting;
                    assert!(may, "workers follow the scheduler");
                }
                assert!(!self.awaited.contains(&slot), "not before its GPU is free");
                assert!(
                    !self.is_worker(slot) || !self.meeting,
                    "not before it is told of the others"
                );
                self.living.insert(key, slot);
                let starts = self.starts.entry(slot).or_default();
                *starts += 1;
                let again = *starts > 1;
                self.lost.remove(&slot);
                if self.stopped.remove(&slot) && again {
                    *self.filled.entry(slot).or_default() += 1;
                } else if again && !self.died_at_work.contains(&slot) {
                    self.restarts.entry(slot).or_default().push(self.now);
                }
            }
            Action::Terminate { key } => {
                assert!(self.living.contains_key(&key), "signals go to the living");
                assert!(self.told.insert(key, self.now).is_none(), "told once");
            }
            Action::Kill { key } => {
                assert!(self.living.contains_key(&key), "signals go to the living");
                self.killed.insert(key);
            }
            Action::Ask { key } => {
                assert!(self.living.contains_key(&key), "questions go to the living");
                assert!(self.asked.insert(key), "one question at a time");
            }
            Action::AskGuardian => {
                assert!(!std::mem::replace(&mut self.guardian_asked, true), "one at a time");
            }
            Action::Look => {}
            Action::ReadLog { slot } => {
                assert!(self.living.values().any(|other| *other == slot), "it hangs, so it lives");
                self.logs_read.push(slot);
            }
            Action::AwaitGpu { slot } => drop(self.awaited.insert(slot)),
            Action::Meet { members, .. } => {
                let alive = self.living.values().filter(|slot| self.is_worker(**slot));
                assert_eq!(alive.count(), 0, "all have ended");
                assert!(!std::mem::replace(&mut self.meeting, true), "one at a time");
                assert!(!members.is_empty());
            }
            Action::Bundle { .. } => {}
            Action::Record(record) => self.records.push(record.what),
            Action::End(outcome) => self.outcome = Some(outcome),
        }
    }

    fn is_worker(&self, slot: usize) -> bool {
        slot > 0 || self.launch.scheduler.is_none()
    }

    pub(super) fn check_state(&mut self) {
        let next = self.core.next_deadline();
        assert!(next.is_none_or(|next| next > self.now), "a deadline that is past was dealt with");
        let state = self.core.state();
        let slots: Vec<&ProcessState> = state.processes().collect();
        for (number, slot) in slots.iter().enumerate() {
            let lives = self.living.values().any(|other| *other == number);
            let active = matches!(
                slot.state,
                ProcessPhase::Starting
                    | ProcessPhase::Ready
                    | ProcessPhase::Unresponsive
                    | ProcessPhase::Stopping
            );
            if self.outcome.is_none() {
                assert_eq!(active, lives, "{}: {:?}", slot.name, slot.state);
            }
            let starts = self.starts.get(&number).copied().unwrap_or_default();
            let filled = self.filled.get(&number).copied().unwrap_or_default();
            assert_eq!(slot.restarts, starts.saturating_sub(1) - filled, "{}", slot.name);
            let gives_up = self.launch.supervision.restart == RestartWhen::Never
                || self.launch.supervision.limit_at_work.is_some()
                || self.launch.together.is_some()
                || self.core.ending.is_some()
                || self.lost.contains(&number);
            let failed = slot.state == ProcessPhase::Failed;
            let at_work = self.died_at_work.contains(&number);
            assert!(gives_up || !(failed && at_work), "{}: its work ended it", slot.name);
            let living = self.living.iter().find(|(_, other)| **other == number);
            if let (Some((key, _)), ProcessPhase::Ready) = (living, slot.state) {
                self.worked.insert(*key);
            }
            if slot.state == ProcessPhase::Stopped {
                self.stopped.insert(number);
            }
            let silent = slot.state == ProcessPhase::Unresponsive;
            assert_eq!(silent, slot.not_answering_since.is_some(), "{}", slot.name);
        }
        let ready = state.ready_after_ms.is_some();
        assert!(!ready || !self.launch.to_be_verified, "READY, but not verified");
        if matches!(state.state, ClusterPhase::Ready | ClusterPhase::Verifying) {
            for (slot, _) in slots.iter().zip(&self.core.slots).filter(|(_, own)| own.wanted) {
                let good = matches!(slot.state, ProcessPhase::Ready | ProcessPhase::Stopped);
                assert!(good, "READY, but {} is {:?}", slot.name, slot.state);
            }
            assert_eq!(state.guardian_not_answering_since, None, "READY without a guardian");
        }
        if state.state == ClusterPhase::Degraded || state.state == ClusterPhase::Failed {
            assert!(state.cause.is_some(), "a cause is kept");
        }
        for (key, told) in &self.told {
            let farther = Duration::from_secs(if self.launch.hosts.is_empty() { 0 } else { 10 });
            let patience = self.launch.supervision.grace.0 + farther;
            let patient = self.now < *told + patience || self.killed.contains(key);
            assert!(patient || self.outcome.is_some(), "what was told to end is killed in time");
        }
        if !self.person_asked && self.outcome.is_none() {
            self.check_limit();
        }
    }

    /// No window has more restarts than the limit, except restarts of workers with their scheduler
    /// and after deaths while READY.
    pub(super) fn check_limit(&self) {
        if self.launch.together.is_some() {
            return;
        }
        let Supervision { limit, window, .. } = &self.launch.supervision;
        let schedulers = usize::from(self.launch.scheduler.is_some());
        for (slot, moments) in &self.restarts {
            if schedulers == 1 && *slot > 0 {
                continue;
            }
            for first in moments {
                let inside = moments.iter().filter(|at| *at >= first && **at - *first < window.0);
                // Healthy periods may restart the count within the window.
                let healthy = self.launch.supervision.healthy_after.0;
                let healthy_whiles = window.0.div_duration_f64(healthy);
                let allowed = f64::from(*limit) * (1.0 + healthy_whiles);
                assert!(inside.count() as f64 <= allowed, "slot {slot}: {moments:?}");
            }
        }
    }

    pub(super) fn key(&self, slot: usize) -> Key {
        self.core.key_of(slot).expect("alive")
    }

    pub(super) fn ready(&mut self, slot: usize) {
        let key = self.key(slot);
        self.tell(Event::Started { key, pid: 100 });
        let bound = Status::Bound { cpus: CpuSet::new(), mems: NodeSet::new(), notes: vec![] };
        self.tell(Event::Said { key, status: bound });
        let status = Status::Ready {
            address: None,
            peers: Vec::new(),
            ucx: None,
            condition: Condition::default(),
        };
        self.tell(Event::Said { key, status });
    }

    pub(super) fn die(&mut self, slot: usize, exit: Exit) {
        let key = self.key(slot);
        let log_tail = vec!["last line".to_owned()];
        self.tell(Event::Exited { key, exit, log_tail, starved: false });
    }

    /// Lets the processes answer that were asked and do not hang.
    pub(super) fn answer(&mut self) {
        let asked = std::mem::take(&mut self.asked);
        for key in asked {
            let status = Status::Alive { condition: Condition::default() };
            match self.living.get(&key) {
                Some(slot) if self.hung.contains(slot) => drop(self.asked.insert(key)),
                Some(_) => self.tell(Event::Said { key, status }),
                None => {}
            }
        }
        if self.guardian_asked && !self.guardian_hung {
            self.guardian_asked = false;
            self.tell(Event::GuardianAlive);
        }
    }

    /// Reports a check for stopped processes.
    pub(super) fn look(&mut self, stopped: &[usize]) {
        let stopped = stopped.iter().filter_map(|slot| self.core.key_of(*slot)).collect();
        self.tell(Event::Looked { stopped, guardian_stopped: false });
    }

    /// Lets time pass until the next deadline.
    pub(super) fn wait(&mut self) {
        self.now = self.core.next_deadline().expect("a deadline").max(self.now);
        self.tell(Event::Tick);
    }

    /// Waits for the restart of a dead worker, if it has not started yet.
    pub(super) fn wait_for_restart(&mut self, worker: usize) {
        if self.worker(worker).state == ProcessPhase::Restarting {
            self.wait();
        }
        assert_eq!(self.worker(worker).state, ProcessPhase::Starting);
    }

    pub(super) fn phase(&self) -> ClusterPhase {
        self.core.state().state
    }

    pub(super) fn worker(&self, number: usize) -> ProcessState {
        self.core.state().workers[number].clone()
    }
}

pub(super) fn up(launch: Launch) -> World {
    let workers = launch.workers.len() - launch.standby;
    let slots = usize::from(launch.scheduler.is_some()) + workers;
    let mut world = World::new(launch);
    for slot in 0..slots {
        world.ready(slot);
    }
    if world.launch.to_be_verified {
        world.tell(Event::Verified);
    }
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world
}
