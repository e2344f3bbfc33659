//! What open pages are told of a cluster: its state, its lanes, events, and figures.
//!
//! One task for each cluster that is looked at, however many look. It hears of changes by the
//! supervisor's stream of events, and reads the state only then and every [`STATE_EVERY`].
//!
//! *Invariant:* nothing is read, measured or asked from [`LINGERS`] after the last page was closed;
//! the last that was known of a cluster is kept when it has ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::measure::{Figures, Meter, processes_of};
use crate::cluster::{
    self, Client, Control, FindError, Lines, Paths, recorded_audit, recorded_machine, recorded_plan,
};
use crate::ids::ClusterName;
use crate::plan::{EnginePlan, Plan};
use crate::supervise::{ClusterState, ProcessState};
use crate::topology::Topology;
use crate::wire::links;
use crate::wire::tasks::Overview;
use cuda_cluster_why::audit::Audit;

/// Time between two readings of the figures for pages.
const FIGURES_EVERY: Duration = Duration::from_secs(2);

/// Time between two requests for the state, if nothing happens.
const STATE_EVERY: Duration = Duration::from_secs(10);

/// How long events are collected before the state is read.
const SETTLE: Duration = Duration::from_millis(40);

/// Time from an event to the question what it has changed for the other processes.
const AFTERMATH: Duration = Duration::from_secs(1);

/// Number of readings that a new page gets: five minutes.
const HISTORY: usize = 150;

/// How long a cluster is measured while no page is open: a page that is opened then, or opened
/// again, shows what happened before.
const LINGERS: Duration = Duration::from_secs(300);

/// Number of messages that a slow page may be behind.
const BEHIND: usize = 256;

/// A message to a page: a server-sent event's name and its JSON.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) kind: &'static str,
    pub(super) text: Arc<str>,
}

impl Message {
    fn new(kind: &'static str, value: &impl serde::Serialize) -> Self {
        // Values of ours have only keys that are texts.
        Self { kind, text: serde_json::to_string(value).unwrap_or_default().into() }
    }
}

/// The feeds of all clusters that were looked at.
#[derive(Debug, Default)]
pub(super) struct Feeds(Mutex<BTreeMap<ClusterName, Arc<Feed>>>);

impl Feeds {
    /// The feeds of the clusters that run now, kept up to date from now on as if a page had just
    /// been closed. Needs an event loop.
    pub(super) fn of_running() -> Self {
        let feeds = Self::default();
        // A page says why if the clusters can't be found.
        for one in cluster::clusters().into_iter().flat_map(|found| found.running) {
            drop(feeds.of(&one.name).open());
        }
        feeds
    }

    /// The feed of a cluster.
    pub(super) fn of(&self, name: &ClusterName) -> Arc<Feed> {
        let mut feeds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Feed::new(name.clone(), FIGURES_EVERY, LINGERS));
        let feed = feeds.entry(name.clone()).or_insert_with(new);
        Arc::clone(feed)
    }
}

/// What is told of one cluster.
#[derive(Debug)]
pub(super) struct Feed {
    name: ClusterName,
    figures_every: Duration,
    /// How long it is kept up to date for nobody.
    lingers: Duration,
    sender: broadcast::Sender<Message>,
    known: Mutex<Known>,
}

/// What a new page is told first.
#[derive(Debug, Default)]
struct Known {
    /// Whether a task keeps this up to date.
    fed: bool,
    /// Since when nobody has looked.
    left_at: Option<Instant>,
    /// The last message of each kind: state, lanes, verification, end.
    last: BTreeMap<&'static str, Message>,
    figures: VecDeque<Message>,
}

impl Feed {
    /// The feed of a cluster, with this time between two readings of the figures; kept up to date
    /// for a time after the last receiver has gone.
    pub(super) fn new(name: ClusterName, figures_every: Duration, lingers: Duration) -> Self {
        let (sender, _) = broadcast::channel(BEHIND);
        Self { name, figures_every, lingers, sender, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known, and what will be. The feed is kept up to date while a receiver exists, and
    /// lingers.
    pub(super) fn open(self: &Arc<Self>) -> (Vec<Message>, broadcast::Receiver<Message>) {
        let mut known = self.known();
        let receiver = self.sender.subscribe();
        let first = known.last.values().chain(&known.figures).cloned().collect();
        if !std::mem::replace(&mut known.fed, true) {
            tokio::spawn(keep(Arc::clone(self)));
        }
        (first, receiver)
    }

    /// Whether the feeder may end: nobody looks. The next page starts another.
    fn is_left(&self) -> bool {
        let mut known = self.known();
        if self.sender.receiver_count() > 0 {
            known.left_at = None;
            return false;
        }
        let left = known.left_at.get_or_insert_with(Instant::now).elapsed() >= self.lingers;
        if left {
            (known.fed, known.left_at) = (false, None);
            known.figures.clear();
        }
        left
    }

    /// Tells all pages, and those to come, unless this is what they know.
    pub(super) fn tell(&self, kind: &'static str, value: &impl serde::Serialize) {
        let message = Message::new(kind, value);
        let mut known = self.known();
        if known.last.get(kind).is_some_and(|last| last.text == message.text) {
            return;
        }
        known.last.insert(kind, message.clone());
        drop(known);
        self.send(message);
    }

    fn forget(&self, kind: &'static str) {
        self.known().last.remove(kind);
    }

    fn send(&self, message: Message) {
        // Without pages there is nobody to tell.
        let _ = self.sender.send(message);
    }

    fn tell_figures(&self, figures: &Figures) {
        let message = Message::new("figures", figures);
        let mut known = self.known();
        known.figures.push_back(message.clone());
        if known.figures.len() > HISTORY {
            known.figures.pop_front();
        }
        drop(known);
        self.send(message);
    }
}

/// Keeps a feed up to date while anybody looks, over all clusters of its name.
async fn keep(feed: Arc<Feed>) {
    while Feeder::new(Arc::clone(&feed)).follow().await && another(&feed).await {}
}

/// Waits until a cluster of this name is started again; false if nobody looks.
async fn another(feed: &Feed) -> bool {
    while !feed.is_left() {
        if Paths::of(&feed.name).is_alive() {
            feed.forget("end");
            feed.send(Message::new("begin", &json!({})));
            return true;
        }
        tokio::time::sleep(feed.figures_every).await;
    }
    false
}

/// What a cluster's connections are judged by.
pub(super) struct Subject {
    plan: Option<Plan>,
    /// The machine that has the GPUs; `None` if they are simulated.
    machine: Option<Topology>,
}

impl Subject {
    /// The subject in a run directory.
    pub(super) fn of(paths: &Paths) -> Self {
        let plan = recorded_plan(paths);
        let simulated = plan.as_ref().is_none_or(|plan| plan.machine.simulated);
        Self { machine: recorded_machine(paths).filter(|_| !simulated), plan }
    }

    /// What the cluster was started by, if that can be read.
    pub(super) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// Whether the bytes between the processes are counted.
    pub(super) fn is_audited(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.supervision.audit)
    }

    pub(super) fn is_native(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| matches!(plan.engine, EnginePlan::Native(_)))
    }

    /// The connections without the lane that should carry their data: from, to, that lane.
    pub(super) fn missing(&self, workers: &[ProcessState]) -> Vec<(usize, usize, String)> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let machine = self.machine.as_ref();
        let lacks = |from: usize, to: usize, lanes: &[String]| {
            let (from_name, to_name) = (&workers[from].name, &workers[to].name);
            let expected = links::missing(plan, machine, from_name, to_name, lanes)?;
            Some((from, to, expected.to_string()))
        };
        connections(workers).into_iter().filter_map(|(a, b, lanes)| lacks(a, b, lanes)).collect()
    }
}

/// The connections of workers, by place: from, to, lanes.
fn connections(workers: &[ProcessState]) -> Vec<(usize, usize, &[String])> {
    let places: BTreeMap<&str, usize> =
        workers.iter().enumerate().map(|(at, worker)| (worker.name.as_str(), at)).collect();
    let mut all = Vec::new();
    for (from, worker) in workers.iter().enumerate() {
        for peer in &worker.peers {
            let to = places.get(peer.peer.as_str());
            all.extend(to.map(|to| (from, *to, peer.lanes.as_slice())));
        }
    }
    all
}

/// The lanes of all connections, and what they lack; workers by their place.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Lanes {
    /// The distinct sets of lanes.
    sets: Vec<String>,
    /// From, to, place of the set.
    pub pairs: Vec<[usize; 3]>,
    /// From, to, and the lane that should carry the data but is not there.
    pub missing: Vec<(usize, usize, String)>,
}

impl Lanes {
    fn of(subject: &Subject, workers: &[ProcessState]) -> Self {
        let mut sets: Vec<String> = Vec::new();
        let numbered = |(from, to, lanes): (usize, usize, &[String])| {
            let set = lanes.join(" ");
            let known = sets.iter().position(|known| *known == set);
            let at = known.unwrap_or_else(|| {
                sets.push(set);
                sets.len() - 1
            });
            [from, to, at]
        };
        let pairs = connections(workers).into_iter().map(numbered).collect();
        Self { sets, pairs, missing: subject.missing(workers) }
    }
}

/// Follows one cluster.
struct Feeder {
    feed: Arc<Feed>,
    control: Control,
    subject: Subject,
    state: Option<ClusterState>,
    events: Option<Lines>,
    tasks: Tasks,
}

impl Feeder {
    fn new(feed: Arc<Feed>) -> Self {
        let paths = Paths::of(&feed.name);
        let subject = Subject::of(&paths);
        Self {
            control: Control::new(paths.control()),
            tasks: Tasks { paths: subject.is_native().then_some(paths), ..Tasks::default() },
            subject,
            state: None,
            events: None,
            feed,
        }
    }

    /// Follows it to its end, and returns true; false if nobody looks.
    async fn follow(mut self) -> bool {
        let mut meter = Some(Meter::new(self.subject.machine.as_ref()));
        let mut figures_at = Instant::now();
        let mut looks = Looks::beginning(figures_at);
        let mut stopped = BTreeSet::new();
        while !self.feed.is_left() {
            let now = Instant::now();
            if let Some(asks) = looks.due(now)
                && !self.look(asks).await
            {
                return true;
            }
            if figures_at <= now {
                let processes = self.state.as_ref().map(processes_of).unwrap_or_default();
                let mut reader = meter.take().unwrap_or_else(|| Meter::new(None));
                let read = move || (reader.read(&processes), reader);
                // After a reading that panics GPUs are not read again.
                if let Ok((mut figures, reader)) = tokio::task::spawn_blocking(read).await {
                    meter = Some(reader);
                    figures.tasks = self.tasks.next();
                    if figures.stopped() != stopped.iter().map(String::as_str).collect() {
                        // The supervisor looks at its processes when it is asked for the state.
                        looks.happened(Instant::now());
                        stopped = figures.stopped().into_iter().map(str::to_owned).collect();
                    }
                    self.feed.tell_figures(&figures);
                }
                self.tell_audit();
                figures_at = now + self.feed.figures_every;
            }
            tokio::select! {
                () = tokio::time::sleep_until(looks.next().min(figures_at)) => {}
                record = next_event(&mut self.events) => {
                    match record {
                        Some(record) => {
                            self.feed.send(Message { kind: "event", text: record.into() });
                        }
                        None => self.events = None,
                    }
                    looks.happened(Instant::now());
                }
            }
        }
        false
    }

    /// Asks for the state, and whether the processes answer if it `asks` them; returns whether the
    /// cluster is running.
    async fn look(&mut self, asks: bool) -> bool {
        if self.events.is_none() {
            self.events = self.control.stream("/v1/events").await.ok();
        }
        let path = if asks { "/v1/state?fresh=true" } else { "/v1/state" };
        let error = match self.control.read::<ClusterState>(path).await {
            Ok(state) => {
                self.feed.forget("silent");
                self.tell_state(state);
                return true;
            }
            Err(error) => error,
        };
        match cluster::find(Some(&self.feed.name)) {
            Ok(_) | Err(FindError::Unreadable(_) | FindError::Unclear { .. }) => {
                self.feed.tell("silent", &json!({ "text": error.to_string() }));
                true
            }
            Err(FindError::Ended(ended)) => {
                let text = ended.summary();
                if let Some(state) = ended.state {
                    self.tell_state(state);
                }
                self.feed.tell("end", &json!({ "text": text }));
                false
            }
            // Nothing is left of a cluster that was stopped.
            Err(_) => {
                self.feed.tell("end", &json!({ "text": "it was stopped" }));
                false
            }
        }
    }

    /// Tells which wires the bytes took, if they are counted.
    fn tell_audit(&self) {
        let paths = self.subject.is_audited().then(|| Paths::of(&self.feed.name));
        if let Some(audit) = paths.as_ref().and_then(recorded_audit) {
            let Audit { ms, findings, causes, unseen, .. } = &audit;
            let lines = audit.lines();
            let told = json!({ "ms": ms, "lines": lines, "findings": findings, "causes": causes,
                               "unseen": unseen });
            self.feed.tell("audit", &told);
        }
    }

    fn tell_state(&mut self, mut state: ClusterState) {
        self.feed.tell("lanes", &Lanes::of(&self.subject, &state.workers));
        for process in state.processes_mut() {
            // The lanes of all pairs are most of a large cluster's state, and rarely change.
            process.peers.clear();
            // These always change, and are among the figures.
            (process.resident_bytes, process.cpu_ms, process.age_ms) = (None, None, None);
            (process.cpu_before, process.work) = (None, None);
        }
        self.feed.tell("state", &state);
        self.state = Some(state);
    }
}

/// When the state is read, and whether the processes are asked for it.
///
/// The supervisor knows at once what happened to a process. That others have gained or lost a
/// connection by it, only they know, and they tell when they are asked.
struct Looks {
    read_at: Option<Instant>,
    ask_at: Instant,
}

impl Looks {
    fn beginning(now: Instant) -> Self {
        Self { read_at: Some(now), ask_at: now + AFTERMATH }
    }

    /// Something has happened, or the stream of events has ended.
    fn happened(&mut self, now: Instant) {
        self.read_at = Some(self.read_at.map_or(now + SETTLE, |at| at.min(now + SETTLE)));
        self.ask_at = self.ask_at.min(now + AFTERMATH);
    }

    fn next(&self) -> Instant {
        self.read_at.map_or(self.ask_at, |at| at.min(self.ask_at))
    }

    /// Whether it is time to read the state, and whether to ask the processes for it.
    fn due(&mut self, now: Instant) -> Option<bool> {
        if self.next() > now {
            return None;
        }
        self.read_at = None;
        let asks = self.ask_at <= now;
        if asks {
            self.ask_at = now + STATE_EVERY;
        }
        Some(asks)
    }
}

/// The next record, as the JSON that the supervisor sends; `None` if the stream has ended. Never
/// without a stream. Cancel-safe.
async fn next_event(events: &mut Option<Lines>) -> Option<String> {
    match events {
        Some(events) => events.next_event().await.ok().flatten(),
        None => std::future::pending().await,
    }
}

/// Asks the native scheduler for its counters, without ever waiting for them.
#[derive(Default)]
struct Tasks {
    /// The run directory of a native cluster.
    paths: Option<Paths>,
    client: Option<Client>,
    asked: Option<JoinHandle<Option<(Client, Overview)>>>,
}

impl Tasks {
    /// The answer to the last question, if it has come; asks the next one.
    fn next(&mut self) -> Option<Overview> {
        let paths = self.paths.clone()?;
        let mut told = None;
        if let Some(asked) = self.asked.take() {
            if !asked.is_finished() {
                self.asked = Some(asked);
                return None;
            }
            // It is finished, so this does not wait.
            let answer = futures_now(asked).and_then(Result::ok).flatten();
            (self.client, told) = answer.unzip();
        }
        let client = self.client.take();
        self.asked = Some(tokio::task::spawn_blocking(move || {
            let client = client.map_or_else(|| Client::connect(paths.root()), Ok).ok()?;
            let overview = client.overview().ok()?;
            Some((client, overview))
        }));
        told
    }
}

/// The result of a future that is complete.
fn futures_now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_an_event_the_state_is_read_at_once_and_the_processes_are_asked_soon() {
        let start = Instant::now();
        let mut looks = Looks::beginning(start);
        assert_eq!(looks.due(start), Some(false));
        assert_eq!(looks.due(looks.next()), Some(true), "who looks first learns of all lanes soon");
        assert_eq!(looks.due(start + AFTERMATH), None);
        let event = start + AFTERMATH * 2;
        looks.happened(event);
        assert_eq!(looks.next(), event + SETTLE);
        // Events without end delay neither.
        looks.happened(event + SETTLE);
        assert_eq!(looks.due(event + SETTLE), Some(false));
        assert_eq!(looks.next(), event + AFTERMATH);
        looks.happened(event + AFTERMATH);
        assert_eq!(looks.due(event + AFTERMATH), Some(true));
        assert_eq!(looks.next(), event + AFTERMATH + STATE_EVERY, "then nothing has happened");
    }
}
