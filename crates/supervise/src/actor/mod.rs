//! Turns what happens into events for `core`, and carries out the resulting actions.
//!
//! Makes no decisions.
//!
//! *Invariant:* events of a process reach `core` in the order in which they happened: its start
//! before its messages, and those before its end.

mod aftermath;
mod contact;
mod directory;
mod journal;
mod meeting;
mod teardown;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use contact::Contact;
use directory::InitialFiles;
use journal::Journal;
use meeting::{NextStart, prepared};

use super::control::Control;
use super::core::{Action, Core, Event, SlotNumber, Subject};
use super::gpu::GpuWatch;
use super::handle::{
    ControlRequest, Handle, Input, Meet, Options, OutputPipe, RequestError, StartError,
};
use super::record::What;
use super::state::ClusterState;
use super::{
    ClusterPhase, Escalation, Launch, MARK_VARIABLE, Outcome, PROCESS_VARIABLE, ProcessSpec,
    RUN_DIRECTORY_VARIABLE, ReadyWhen, Record,
};
use cuda_cluster_machine::os::argument;
use cuda_cluster_machine::os::exhausted::Exhausted;
use cuda_cluster_machine::os::guardian::{Guardian, Report, Start};
use cuda_cluster_machine::os::owners::{Identity, Owners};
use cuda_cluster_machine::os::presence::Presence;
use cuda_cluster_machine::os::run_directory::{Paths, RunDirectory};
use cuda_cluster_machine::os::shared_memory;
use cuda_cluster_machine::os::shim::Instructions;
use cuda_cluster_model::text;
use cuda_cluster_wire::process::Key;

/// How long to wait for the last messages of a process that has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Delay before a removed run directory is created again, so that the removal can finish.
const REMOVAL: Duration = Duration::from_millis(200);

/// How many records a slow subscriber may lag behind.
const BACKLOG: usize = 1024;

/// A running supervisor.
pub(super) struct Actor {
    core: Core,
    launch: Launch,
    guardian: Arc<Guardian>,
    /// The helper, as the first argument of processes that are this program.
    helper: String,
    directory: Option<RunDirectory>,
    paths: Paths,
    mark: String,
    began: Instant,
    requests: mpsc::UnboundedReceiver<ControlRequest>,
    inner: (mpsc::Sender<Event>, mpsc::Receiver<Event>),
    /// Status pipes of processes whose start has not been reported yet, and when it was requested;
    /// they are not read before.
    unheard: BTreeMap<Key, (UnixStream, SystemTime)>,
    contacts: BTreeMap<Key, Contact>,
    /// Requests that wait for the state after a check.
    onlookers: Vec<oneshot::Sender<()>>,
    /// Requests that wait for the processes' answers.
    askers: Vec<oneshot::Sender<()>>,
    state: watch::Sender<ClusterState>,
    /// The state that the control API shares.
    handle: Handle,
    journal: Journal,
    initial_files: InitialFiles,
    presence: Option<Presence>,
    gpus: Option<Arc<dyn GpuWatch>>,
    /// Processes that already used a process's GPU memory when it was started.
    gpu_others: Arc<Mutex<BTreeMap<SlotNumber, BTreeSet<u32>>>>,
    /// Crash bundles being written.
    bundles: JoinSet<()>,
    /// When to check the processes' memory, if any has a limit.
    look_at: Option<Instant>,
    /// Whether to stop waiting for the guardian.
    abandoned: bool,
    /// When to check whether the run directory is complete.
    restore_at: Option<Instant>,
    /// What of the run directory could not be restored, as it was told.
    not_back: Option<String>,
    control: Control,
    /// Whether to keep the logs, because the cluster has failed.
    keep: bool,
    /// The signal that asks processes to end.
    stop_signal: i32,
    /// The reader of the workers' output.
    output: Option<OutputPipe>,
    /// Standard input for a worker that has not been started yet.
    input: Option<Input>,
    /// Tells workers of each other before they start again together.
    meeting: Option<Arc<dyn Meet>>,
    /// Who reads the run directory to the end.
    reader: Option<watch::Receiver<()>>,
    /// The programs of the next start, as they are being prepared.
    next_start: Option<NextStart>,
}

impl Actor {
    /// Starts the guardian and the control API.
    pub(super) async fn prepare(
        launch: Launch,
        directory: RunDirectory,
        options: Options,
    ) -> Result<(Self, Handle), StartError> {
        let token = random_token();
        let mark = format!("{MARK_VARIABLE}={token}");
        let label = format!("{}-{}-{}", launch.name, std::process::id(), &token[..8]);
        let label = options.control_groups.then_some(label.as_str());
        let output = options.output.as_ref().map(|output| output.pipe.as_fd());
        let guardian = Guardian::start(&options.helper, &directory, label, mark.clone(), output)
            .await
            .map_err(StartError::Guardian)?;
        let paths = directory.paths().clone();
        let owners = Owners {
            guardian: Identity::of(guardian.pid()),
            mark: Some(mark),
            ..Owners::this_process()
        };
        directory.write_owners(&owners).map_err(StartError::RunDirectory)?;
        if let Some(group) = guardian.cgroup() {
            let path = group.path().display().to_string();
            directory
                .write_private(&paths.cgroup(), path.as_bytes())
                .map_err(StartError::RunDirectory)?;
        }
        if let Some(path) = &launch.supervision.pid_file {
            std::fs::write(path, format!("{}\n", std::process::id()))
                .map_err(|source| StartError::PidFile { path: path.clone(), source })?;
        }
        let began = SystemTime::now();
        let first = ClusterState::initial(
            &launch,
            guardian.pid(),
            guardian.containment(),
            paths.root(),
            |process| paths.log(process),
            began,
        );
        let core = Core::new(&launch, first.clone(), began, seed());
        let (request_sender, requests) = mpsc::unbounded_channel();
        let (state, state_receiver) = watch::channel(first);
        let (records, _) = broadcast::channel(BACKLOG);
        let handle = Handle { requests: request_sender, state: state_receiver, records };
        let control = Control::begin(&paths, handle.clone(), &launch, options.gpus.clone(), began)?;
        let actor = Self {
            core,
            launch,
            guardian: Arc::new(guardian),
            helper: argument::encoded(options.helper.as_os_str()),
            // Without the journal, which grows.
            initial_files: InitialFiles::of(&paths),
            journal: Journal::open(&paths),
            presence: Presence::watch(paths.root()),
            directory: Some(directory),
            paths,
            mark: token,
            began: Instant::now(),
            requests,
            inner: mpsc::channel(256),
            unheard: BTreeMap::new(),
            contacts: BTreeMap::new(),
            onlookers: Vec::new(),
            askers: Vec::new(),
            state,
            handle: handle.clone(),
            gpus: options.gpus,
            gpu_others: Arc::default(),
            bundles: JoinSet::new(),
            look_at: None,
            restore_at: None,
            not_back: None,
            abandoned: false,
            control,
            keep: false,
            stop_signal: libc::SIGTERM,
            output: options.output,
            input: options.input,
            meeting: options.meeting,
            reader: options.reader,
            next_start: None,
        };
        Ok((actor, handle))
    }

    /// The guardian, for callers that must be able to end everything at any time.
    pub(super) fn guardian(&self) -> Arc<Guardian> {
        Arc::clone(&self.guardian)
    }

    /// Runs until the cluster has ended.
    pub(super) async fn run(mut self) -> Outcome {
        self.save_state();
        let mut event = Event::Begin;
        loop {
            let actions = self.core.handle(event, self.began.elapsed());
            self.show();
            for action in actions {
                if let Some(outcome) = self.act(action) {
                    self.show();
                    // What nobody here has asked for is to be explained afterwards.
                    self.keep |= !outcome.is_good() || self.core.ended_from_elsewhere();
                    return self.finish(outcome).await;
                }
            }
            let answered = !self.core.awaits_answers();
            let askers = self.askers.extract_if(.., |_| answered);
            for waiting in self.onlookers.drain(..).chain(askers) {
                // The requester may have gone.
                let _ = waiting.send(());
            }
            event = self.next().await;
        }
    }

    /// Waits for the next event that concerns `core`.
    async fn next(&mut self) -> Event {
        loop {
            let deadline = self.core.next_deadline().map(|at| self.began + at);
            let (look_at, restore_at) = (self.look_at, self.restore_at);
            tokio::select! {
                report = self.guardian.report() => match report {
                    None => return Event::GuardianLost,
                    Some(report) => if let Some(event) = self.hear(report) { return event },
                },
                Some(event) = self.inner.1.recv() => return event,
                Some(request) = self.requests.recv() => {
                    if let Some(event) = self.weigh(request) { return event }
                }
                () = sleep_until(deadline) => return Event::Tick,
                (members, programs) = prepared(&mut self.next_start) => {
                    return self.take_programs(&members, programs);
                }
                () = disturbed(self.presence.as_ref()) => {
                    self.restore_at = Some(Instant::now() + REMOVAL);
                }
                () = sleep_until(restore_at) => {
                    if let Some(event) = self.restore_directory() { return event }
                }
                () = sleep_until(look_at) => {
                    if let Some(event) = self.look_at_memory() { return event }
                }
            }
        }
    }

    fn hear(&mut self, report: Report) -> Option<Event> {
        match report {
            Report::Watching | Report::Unable { .. } => None,
            Report::Alive => Some(Event::GuardianAlive),
            Report::Started { key, pid } => {
                let (pipe, since) = match self.unheard.remove(&key) {
                    Some((pipe, since)) => (Some(pipe), since),
                    None => (None, SystemTime::UNIX_EPOCH),
                };
                let contact = Contact::new(key, pid, (pipe, since), &self.inner.0);
                self.contacts.insert(key, contact);
                Some(Event::Started { key, pid })
            }
            Report::NotStarted { key, reason } => {
                self.unheard.remove(&key);
                Some(Event::NotStarted { key, reason })
            }
            Report::NotCopied { key, path, reason } => Some(Event::NotCopied { key, path, reason }),
            Report::Exited { key, exit } => {
                self.report_end(key, exit);
                None
            }
        }
    }

    pub(super) fn slot(&self, key: Key) -> Option<&ProcessSpec> {
        let numbered = self.launch.processes().enumerate();
        let of = numbered.filter(|(slot, _)| self.core.key_of(*slot) == Some(key));
        of.map(|(_, spec)| spec).next()
    }

    /// Turns a request into an event, or rejects it.
    fn weigh(&mut self, request: ControlRequest) -> Option<Event> {
        let ending = matches!(self.state.borrow().state, ClusterPhase::Stopping);
        let (event, answer) = match request {
            ControlRequest::Stop { how, signal } => {
                self.abandoned |= how == Escalation::Abandon;
                if let Some(signal) = signal.filter(|_| self.launch.run_to_completion) {
                    self.stop_signal = signal;
                }
                return Some(Event::Stop(how));
            }
            ControlRequest::Signalled(name) => {
                let tells = !ending && !self.launch.run_to_completion;
                return tells.then(|| Event::signalled(name));
            }
            ControlRequest::Verified => return Some(Event::Verified),
            ControlRequest::Fail { reason } => return Some(Event::Broken { reason }),
            ControlRequest::Stalled(stall) => return Some(Event::Stalled(stall)),
            ControlRequest::Unseen(why) => return Some(Event::unseen(why)),
            ControlRequest::Look { answer } => {
                self.onlookers.push(answer);
                return Some(self.look());
            }
            ControlRequest::Ask { answer } => {
                self.askers.push(answer);
                return Some(Event::AskAll);
            }
            ControlRequest::Restart { process, answer } => {
                let known = || self.launch.processes().map(|spec| spec.name.clone()).collect();
                let event = self.core.slot_named(&process).map(Event::Restart);
                let unknown = || RequestError::Unknown { name: process, known: known() };
                (event.ok_or_else(unknown), answer)
            }
            ControlRequest::Scale { workers, answer } => {
                let planned = self.launch.workers.len();
                let few = workers <= planned;
                let event = few.then_some(Event::Scale(workers));
                (event.ok_or(RequestError::TooMany { wanted: workers, planned }), answer)
            }
        };
        let event = if ending { Err(RequestError::Ending) } else { event };
        // The requester may have gone.
        let _ = answer.send(event.as_ref().map(drop).map_err(Clone::clone));
        event.ok()
    }

    /// Carries out an action; returns the outcome if it was the last one.
    fn act(&mut self, action: Action) -> Option<Outcome> {
        match action {
            Action::Start { slot, key } => self.start(slot, key),
            // A guardian that accepts no requests is detected when its reports end, or else when
            // the processes are given up; either way the teardown ends the processes itself.
            Action::Terminate { key } => drop(self.guardian.signal(key, self.stop_signal)),
            Action::Kill { key } => drop(self.guardian.kill(key)),
            Action::Ask { key } => {
                if let Some(contact) = self.contacts.get(&key) {
                    contact.ask();
                }
            }
            // As above: without an answer the guardian counts as unresponsive.
            Action::AskGuardian => drop(self.guardian.ask()),
            Action::Look => self.tell_later(self.look()),
            Action::ReadLog { slot } => {
                if let Some(log_tail) = self.core.key_of(slot).map(|key| self.log_excerpt(key)) {
                    self.tell_later(Event::LogRead { slot, log_tail });
                }
            }
            Action::AwaitGpu { slot } => self.await_gpu(slot),
            Action::Meet { restart, members } => self.meet(restart, members),
            Action::Bundle { slot } => self.bundle(slot),
            Action::Record(record) => self.write(record),
            Action::End(outcome) => return Some(outcome),
        }
        None
    }

    /// Queues an event.
    fn tell_later(&self, event: Event) {
        let events = self.inner.0.clone();
        tokio::spawn(async move {
            // The receiver is gone when the cluster has ended.
            let _ = events.send(event).await;
        });
    }

    fn start(&mut self, slot: usize, key: Key) {
        // The core starts only these.
        let input = self.input(slot);
        let Some(spec) = self.launch.processes().nth(slot) else { return };
        let start = Start {
            key,
            name: spec.name.clone(),
            log: self.paths.log(&spec.name),
            log_rotate_bytes: self.launch.supervision.log_rotate_bytes,
            log_keep: self.launch.supervision.log_keep,
            deliver_as: self.output.as_ref().and(self.rank(slot)),
            separate_streams: self.launch.output_dir.is_some()
                || self.output.as_ref().is_some_and(|output| output.separate_streams),
            copy: self.copy(slot),
            cgroup: None,
            // A forked process has the server's standard input.
            fork_server: spec.fork_server.clone().filter(|_| input.is_none()),
        };
        let since = SystemTime::now();
        match self.guardian.spawn(start, self.instructions(spec), input) {
            Ok(status) => {
                self.unheard.insert(key, (status, since));
                self.look_at = self.look_at.or(Some(Instant::now()));
                self.note_gpu_others(slot);
            }
            Err(error) => {
                self.tell_later(Event::NotStarted { key, reason: in_full(&error) });
            }
        }
    }

    /// The rank of a worker's slot.
    fn rank(&self, slot: SlotNumber) -> Option<u32> {
        let worker = slot.checked_sub(usize::from(self.launch.scheduler.is_some()))?;
        u32::try_from(worker).ok()
    }

    /// What a worker reads, which is nobody else's from now on.
    fn input(&mut self, slot: SlotNumber) -> Option<OwnedFd> {
        let worker = self.rank(slot)? as usize;
        let input = self.input.take_if(|input| input.worker == worker)?;
        // If it can't be duplicated, there is no descriptor for a pipe of its own either.
        Arc::try_unwrap(input.from).or_else(|shared| shared.try_clone()).ok()
    }

    /// Where a worker's output also goes. Each start has files of its own.
    fn copy(&self, slot: SlotNumber) -> Option<PathBuf> {
        let (directory, place) = (self.launch.output_dir.as_ref()?, self.rank(slot)?);
        let (rank, restart) = self.core.rank_and_restart(slot);
        let name = format!("rank{}", rank.unwrap_or(place));
        Some(match restart {
            0 => directory.join(name),
            restart => directory.join(format!("restart{restart}")).join(name),
        })
    }

    fn instructions(&self, spec: &ProcessSpec) -> Instructions {
        let mut program = spec.program.clone();
        let place = self.paths.shared_memory();
        if program.env.values().any(|value| *value == *place.to_string_lossy()) {
            // Otherwise the process says what it lacks.
            let _ = shared_memory::keep(&place);
        }
        let own = program.argv.first() == Some(&self.helper);
        let root = self.paths.root().display().to_string();
        program.env.extend([
            (RUN_DIRECTORY_VARIABLE.to_owned(), root),
            (PROCESS_VARIABLE.to_owned(), spec.name.clone()),
            (MARK_VARIABLE.to_owned(), self.mark.clone()),
        ]);
        Instructions {
            program,
            limits: self.launch.supervision.ulimits.clone(),
            cgroup: None,
            keep_status: spec.ready == ReadyWhen::Said,
            strict: self.launch.strict,
            own,
        }
    }

    fn write(&mut self, record: Record) {
        if let Some((text, lasts)) = self.journal.write(&record) {
            // A full queue has room again when the next record is lost or found.
            let _ = self.inner.0.try_send(Event::Noted { about: Subject::Journal, text, lasts });
        }
        if matches!(record.what, What::Cluster { .. }) {
            self.save_state();
        }
        // There may be no subscribers.
        let _ = self.handle.records.send(record);
    }

    /// Publishes the state, if it has changed.
    fn show(&self) {
        let state = self.core.state();
        self.state.send_if_modified(|shown| {
            let changed = *shown != state;
            if changed {
                *shown = state;
            }
            changed
        });
    }
}

async fn disturbed(presence: Option<&Presence>) {
    match presence {
        Some(presence) => presence.disturbed().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// An error with its causes on one line, and a hint if a resource has run out.
pub(super) fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let hint =
        Exhausted::behind(error).map_or_else(String::new, |what| format!("; {}", what.hint()));
    text::in_full(error) + &hint
}

/// A random number in hexadecimal. It need not be secret, only unique.
fn random_token() -> String {
    format!("{:016x}{:016x}", seed(), seed())
}

fn seed() -> u64 {
    // Without the system's randomness, the clock is unique enough.
    getrandom::u64().unwrap_or_else(|_| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        now.as_secs() ^ u64::from(now.subsec_nanos()) << 32
    })
}
