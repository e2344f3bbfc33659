//! Who keeps a job waiting, and why.
//!
//! Pure: from [`Evidence`] to a [`Verdict`].
//!
//! *Invariant:* [`Standing::Stalled`] is said only of a wait that cannot end by itself, or that has
//! lasted for `PATIENCE_MS` in which nobody of the job ran, and that nobody is known to be able to
//! end ([`Condition::open`]).

mod among;
mod apart;
mod kernel;
mod queued;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::condition::{Condition, Kind};
use crate::condition::{LONG_SLEEP_MS, is_long, short};
use crate::evidence::Evidence;
use crate::follow::of;

/// How a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It will not go on by itself, as far as can be seen.
    Stalled,
    /// Some ranks wait for others, which work, or not for long yet.
    Waiting,
    /// All ranks work.
    Working,
    /// Nobody has anything to do.
    Idle,
    /// The evidence does not tell.
    CannotTell,
}

/// How sure a verdict is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The kernel says so.
    Certain,
    /// It follows from what most programs mean by such calls.
    Likely,
}

/// Ranks that do the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub ranks: Vec<String>,
    /// What one of them does.
    pub condition: Condition,
}

/// Who keeps a job waiting, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub standing: Standing,
    /// What the odd ones are doing: the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Kind>,
    pub confidence: Confidence,
    /// The ranks that the others wait for.
    pub odd: Vec<String>,
    /// The verdict as one or two sentences.
    pub text: String,
    /// All ranks by what they do, the odd ones first.
    pub groups: Vec<Group>,
}

/// Judges.
pub fn judge(evidence: &Evidence) -> Verdict {
    let found = evidence.ranks.iter().map(|rank| (rank.name.clone(), of(evidence, rank)));
    let mut all: BTreeMap<String, Condition> = found.collect();
    let order: Vec<&String> = evidence.ranks.iter().map(|rank| &rank.name).collect();
    let roots = Roots::of(evidence, &all);
    let root = roots.first.as_ref();
    let (standing, cause, odd, why) = match (root, &evidence.tasks) {
        (Some(root), _) => {
            let is = |one: &Condition| one.kind == root.kind && !roots.asks(one);
            (roots.standing(root), Some(root.kind), named(&order, &all, is), String::new())
        }
        (None, Some(tasks)) => queued::alone(tasks),
        (None, None) if evidence.serves => {
            let why = "each waits for requests, and what is queued is not read here".to_owned();
            (Standing::CannotTell, None, Vec::new(), why)
        }
        (None, None) if roots.waiting => among::themselves(evidence, &order, &mut all),
        (None, None) => (Standing::Idle, None, Vec::new(), String::new()),
    };
    let mut why: Vec<String> = [why].into_iter().filter(|why| !why.is_empty()).collect();
    if let Some(tasks) = &evidence.tasks {
        // Who has nothing of its own to show was named with its task.
        let odd = if root.is_some() { odd.as_slice() } else { &[] };
        why.extend(queued::beside(tasks, odd, root));
    }
    if roots.waiting {
        why.extend(apart::unread(evidence, &odd, &all));
        why.extend(apart::lacking(evidence, &odd));
    }
    let said = kernel::said(evidence);
    let unexplained = odd.is_empty() && matches!(standing, Standing::Stalled | Standing::Waiting);
    let (cause, odd) = match said.last().filter(|_| unexplained) {
        Some(said) => (Some(said.kind), vec![said.rank.clone()]),
        None => (cause, odd),
    };
    why.extend(said.into_iter().map(|said| said.text));
    let groups = groups(&order, &all, &odd);
    let text = sentence(standing, &groups, &odd, &why.join("; "));
    let certain = matches!(
        cause,
        Some(Kind::Stopped | Kind::Traced | Kind::Frozen | Kind::Deadlock | Kind::Gone)
    );
    let confidence = if certain { Confidence::Certain } else { Confidence::Likely };
    Verdict { standing, cause, confidence, odd, text, groups }
}

/// What ranks do that do not wait for others.
struct Roots {
    /// That which explains the most.
    first: Option<Condition>,
    /// Whether others wait for them.
    waiting: bool,
    works: bool,
    /// Whether others ask again and again for what one of them does or waits for.
    asked: bool,
}

impl Roots {
    fn of(evidence: &Evidence, all: &BTreeMap<String, Condition>) -> Self {
        let waits = |it: &&Condition| matches!(it.kind, Kind::Collective | Kind::Peer);
        let own = || all.values().filter(|it| !waits(it) && it.kind != Kind::Idle);
        let mut roots = Self {
            first: None,
            waiting: all.values().any(|it| waits(&it)),
            works: own().any(|it| matches!(it.kind, Kind::Works | Kind::Device)),
            asked: own().any(Self::may_be_asked) && own().any(Condition::asks_again),
        };
        let own = || own().filter(|it| !roots.asks(it));
        // Who has ended while others work has finished.
        let lives = own().any(|it| it.kind != Kind::Gone);
        let counts = |it: &&Condition| it.kind != Kind::Gone || roots.waiting && !lives;
        let first = own().filter(counts).min_by_key(|it| it.kind);
        // A worker of an engine does something now and then, whatever its tasks wait for.
        let tasks = evidence.tasks.as_ref();
        let none_runs = tasks.is_some_and(|it| it.unplaced > 0 && it.placed.is_empty());
        let counts = |it: &&Condition| !(none_runs && it.kind == Kind::Works && !it.in_task);
        roots.first = first.filter(counts).cloned();
        roots
    }

    /// Whether others may ask again and again for what one in this condition will do.
    fn may_be_asked(condition: &Condition) -> bool {
        let does = matches!(condition.kind, Kind::Works | Kind::Device);
        does || condition.kind > Kind::Sleeps && is_long(condition.for_ms) && !soon(condition)
    }

    /// Whether this one sleeps for a moment, to ask again.
    fn asks(&self, condition: &Condition) -> bool {
        self.asked && condition.asks_again()
    }

    fn standing(&self, root: &Condition) -> Standing {
        match by_root(root, self.waiting, self.works) {
            // The short sleeps that it comes behind may be something else than questions.
            Standing::Stalled if self.asked && root.kind > Kind::Sleeps => Standing::Waiting,
            standing => standing,
        }
    }
}

/// How a job stands of which a rank is in this condition.
///
/// While another one works, only what cannot go on by itself is a stall: the rest may be a thread
/// that has nothing to do until the work is done.
fn by_root(root: &Condition, others_wait: bool, works: bool) -> Standing {
    let long = is_long(root.for_ms);
    match root.kind {
        Kind::Deadlock => Standing::Stalled,
        // Some let a process run now and then, copy its memory, or ask for its stack. The kernel
        // stops a thread when it runs, so it has been stopped since then.
        Kind::Stopped | Kind::Traced | Kind::Frozen if root.for_ms.is_some() && !long => {
            Standing::Waiting
        }
        Kind::Stopped | Kind::Traced | Kind::Frozen => Standing::Stalled,
        Kind::Gone if others_wait => Standing::Stalled,
        Kind::Unknown if root.open => Standing::Waiting,
        Kind::Gone | Kind::Unknown => Standing::CannotTell,
        // A server may wait so for its next request.
        Kind::Lock if !others_wait && !root.in_task => Standing::CannotTell,
        Kind::Works | Kind::Device if !others_wait => Standing::Working,
        _ if works => Standing::Waiting,
        Kind::Sleeps if root.left_ms.is_some_and(|left| left >= LONG_SLEEP_MS) => Standing::Stalled,
        Kind::Works | Kind::Device | Kind::Memory | Kind::Throttled | Kind::Sleeps => {
            Standing::Waiting
        }
        _ if long && !soon(root) => Standing::Stalled,
        _ => Standing::Waiting,
    }
}

/// Whether a wait ends by itself before long, or somebody may end it of whom too little is known.
fn soon(condition: &Condition) -> bool {
    condition.open || condition.timed && condition.left_ms.is_none_or(|left| left < LONG_SLEEP_MS)
}

type Found = (Standing, Option<Kind>, Vec<String>, String);

fn named(
    order: &[&String],
    all: &BTreeMap<String, Condition>,
    is: impl Fn(&Condition) -> bool,
) -> Vec<String> {
    let found = order.iter().filter(|name| all.get(**name).is_some_and(&is));
    found.map(|name| (*name).clone()).collect()
}

fn groups(order: &[&String], all: &BTreeMap<String, Condition>, odd: &[String]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for name in order {
        let Some(condition) = all.get(*name) else { continue };
        let same = |group: &&mut Group| {
            let one = &group.condition;
            one.kind == condition.kind
                && one.operation == condition.operation
                && one.place == condition.place
                && (one.kind == Kind::Collective || one.on == condition.on)
                && group.ranks.iter().all(|other| odd.contains(other) == odd.contains(name))
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.ranks.push((*name).clone()),
            None => {
                groups.push(Group { ranks: vec![(*name).clone()], condition: condition.clone() })
            }
        }
    }
    groups.sort_by_key(|group| !group.ranks.iter().any(|rank| odd.contains(rank)));
    groups
}

fn sentence(standing: Standing, groups: &[Group], odd: &[String], why: &str) -> String {
    let begin = match standing {
        Standing::Stalled => "stalled",
        Standing::Waiting => "not stalled so far",
        Standing::Working => "working",
        Standing::Idle => return "idle: each rank waits for events, and none works".to_owned(),
        Standing::CannotTell => "no verdict",
    };
    let is_odd = |group: &&Group| group.ranks.iter().any(|rank| odd.contains(rank));
    let idle = |group: &&Group| group.condition.kind == Kind::Idle;
    let said = shortened(groups.iter().filter(is_odd).map(said).collect());
    let others = groups.iter().filter(|group| !is_odd(group) && !idle(group));
    let parts = [said, shortened(others.map(doing).collect()), why.to_owned()];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    format!("{begin}: {}", parts.join("; "))
}

/// The first ones of many: all groups are listed below the sentence.
fn shortened(mut all: Vec<String>) -> String {
    const SHOWN: usize = 3;
    let more = all.len().saturating_sub(SHOWN);
    all.truncate(SHOWN);
    if more > 0 {
        all.push(format!("and {more} more that differ"));
    }
    all.join("; ")
}

fn said(group: &Group) -> String {
    let since = group.condition.for_ms.filter(|millis| *millis >= 1000);
    let since = since.map_or(String::new(), |millis| format!(", for {} now", short(millis)));
    format!("{}{since}", doing(group))
}

fn doing(group: &Group) -> String {
    let Condition { text, place, .. } = &group.condition;
    let each = if group.ranks.len() > 1 { "each of " } else { "" };
    let place = place.as_ref().map_or(String::new(), |place| format!(" ({place})"));
    format!("{each}{} {text}{place}", list(&group.ranks))
}

/// `gpu0, gpu1 and 6 others`.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 4;
    match names {
        [one] => one.clone(),
        _ if names.len() <= SHOWN => names.join(", "),
        _ => format!("{} and {} others", names[..SHOWN - 1].join(", "), names.len() + 1 - SHOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::evidence::{
        Call, Connection, End, Frame, Holder, Process, Rank, State, Thread, Waits,
    };

    /// A thread that has waited for a minute.
    fn waits(waits: Waits, function: &str) -> Thread {
        let frame = Frame { function: function.into(), file: "/a.py".into(), line: 1, code: None };
        Thread {
            call: Some(Call { name: "call".into(), waits, left_ms: None }),
            asleep_for_ms: Some(60_000),
            same_frames: true,
            frames: vec![frame],
            ..Thread::default()
        }
    }

    fn works() -> Thread {
        Thread { state: State::Running, cpu_ms: 400, ..Thread::default() }
    }

    fn collective(name: &str) -> Thread {
        waits(Waits::Unknown, name)
    }

    fn job(threads: Vec<Thread>) -> Evidence {
        let named = |number: u32| format!("gpu{number}");
        let processes = (0..).zip(threads).map(|(number, thread)| Process {
            pid: 100 + number,
            rank: named(number),
            threads: vec![Thread { tid: 100 + number, ..thread }],
            ..Process::default()
        });
        let processes: Vec<Process> = processes.collect();
        let rank = |process: &Process| Rank {
            name: process.rank.clone(),
            pid: Some(process.pid),
            ..Rank::default()
        };
        let ranks = processes.iter().map(rank).collect();
        Evidence { ranks, processes, interval_ms: 400, ..Evidence::default() }
    }

    fn told(evidence: &Evidence) -> (Standing, Option<Kind>, String) {
        let verdict = judge(evidence);
        (verdict.standing, verdict.cause, verdict.odd.join(" "))
    }

    #[test]
    fn the_smaller_of_two_operations_is_the_odd_one() {
        let all = ["all_reduce", "all_reduce", "barrier"].map(collective);
        let expected = (Standing::Stalled, Some(Kind::Collective), "gpu2".to_owned());
        assert_eq!(told(&job(all.to_vec())), expected);
    }

    #[test]
    fn who_works_is_waited_for_and_not_stalled() {
        let all = vec![collective("barrier"), works(), collective("barrier")];
        assert_eq!(told(&job(all)), (Standing::Waiting, Some(Kind::Works), "gpu1".to_owned()));
        assert_eq!(told(&job(vec![works(), works()])).0, Standing::Working);
    }

    #[test]
    fn a_sleeper_beside_one_that_works_is_not_a_stall() {
        let sleeps = || waits(Waits::Time { left_ms: Some(3_600_000) }, "main");
        let beside = vec![collective("barrier"), works(), sleeps()];
        assert_eq!(told(&job(beside)).0, Standing::Waiting);
        let alone = vec![collective("barrier"), sleeps()];
        assert_eq!(told(&job(alone)), (Standing::Stalled, Some(Kind::Sleeps), "gpu1".to_owned()));
    }

    #[test]
    fn a_wait_that_ends_soon_by_itself_is_no_stall() {
        let waits = |timed, left_ms| {
            let lock =
                Waits::Lock { address: 1, shared: false, timed, holder: None, sharers: None };
            let mut thread = waits(lock, "main");
            thread.call.as_mut().expect("it waits").left_ms = left_ms;
            // Another thread, of which nothing is known, may wake it.
            let mut job = job(vec![collective("barrier"), thread]);
            job.processes[1].threads.push(Thread { tid: 7, ..Thread::default() });
            told(&job).0
        };
        assert_eq!(waits(false, None), Standing::Stalled);
        assert_eq!(waits(true, None), Standing::Waiting, "nobody knows when");
        assert_eq!(waits(true, Some(3_000)), Standing::Waiting);
        assert_eq!(waits(true, Some(1_800_000)), Standing::Stalled, "as a long sleep is one");
    }

    #[test]
    fn who_has_finished_while_others_work_is_no_cause() {
        let mut job = job(vec![works(), works()]);
        job.ranks[1].pid = None;
        job.ranks[1].ended = Some("ended with status 0".to_owned());
        assert_eq!(told(&job).0, Standing::Working);
        job.processes[0].threads = vec![collective("barrier")];
        assert_eq!(told(&job), (Standing::Stalled, Some(Kind::Gone), "gpu1".to_owned()));
    }

    #[test]
    fn a_wait_for_a_gpu_is_not_a_stall_however_long_it_is() {
        let path = "/dev/nvidia0".to_owned();
        let end = End::File { path, filesystem: None };
        let gpu = waits(Waits::Descriptor { end, writes: false }, "main");
        let all = vec![collective("barrier"), gpu];
        assert_eq!(told(&job(all)), (Standing::Waiting, Some(Kind::Device), "gpu1".to_owned()));
    }

    #[test]
    fn event_loops_that_are_connected_are_idle_and_those_of_an_engine_are_not_judged() {
        let mut job = job(vec![collective("main"), collective("main")]);
        for (process, other) in job.processes.iter_mut().zip([1, 0]) {
            let peer = Some(Holder { pid: 100 + other, rank: Some(format!("gpu{other}")) });
            process.connections = vec![Connection { peer, ..Connection::default() }];
            let waits = Waits::Any { ends: vec![End::Connection(0)], timed: false };
            process.threads[0].call =
                Some(Call { name: "epoll_wait".to_owned(), waits, left_ms: None });
        }
        assert_eq!(told(&job).0, Standing::Idle);
        job.serves = true;
        assert_eq!(told(&job).0, Standing::CannotTell);
        let one = &mut job.processes[0].threads[0];
        one.call.as_mut().expect("it waits").name = "recvfrom".to_owned();
        assert_eq!(told(&job).0, Standing::CannotTell, "a scheduler may have to wait");
    }

    #[test]
    fn a_wait_that_has_just_begun_is_not_a_stall() {
        let mut job = job(vec![collective("all_reduce"), collective("barrier")]);
        job.processes[0].threads[0].asleep_for_ms = Some(200);
        assert_eq!(told(&job).0, Standing::Waiting);
        job.processes[0].threads[0].asleep_for_ms = None;
        assert_eq!(told(&job).0, Standing::Waiting, "nobody knows for how long");
    }

    /// One of each condition that a single thread can be in.
    fn any_thread() -> impl Strategy<Value = Thread> {
        let peer = End::Connection(0);
        let lock =
            Waits::Lock { address: 1, shared: false, timed: false, holder: Some(7), sharers: None };
        prop_oneof![
            Just(works()),
            Just(collective("all_reduce")),
            Just(collective("barrier")),
            Just(waits(lock, "main")),
            Just(waits(Waits::Descriptor { end: peer, writes: true }, "main")),
            Just(waits(Waits::Time { left_ms: Some(90_000) }, "main")),
            Just(waits(Waits::Child { pid: Some(3) }, "main")),
            Just(Thread { state: State::Stopped, ..Thread::default() }),
            Just(Thread { state: State::Uninterruptible, ..Thread::default() }),
        ]
    }

    proptest! {
        #[test]
        fn a_verdict_is_the_same_in_any_order_and_from_a_file(
            threads in proptest::collection::vec(any_thread(), 0..7),
            turn in 0..7usize,
        ) {
            let mut job = job(threads);
            let verdict = judge(&job);
            let text = serde_json::to_string(&job).expect("it has a text form");
            let again: Evidence = serde_json::from_str(&text).expect("and is read from it");
            prop_assert_eq!(&judge(&again), &verdict);
            let turn = turn.checked_rem(job.ranks.len()).unwrap_or(0);
            job.ranks.rotate_left(turn);
            let mut turned = judge(&job);
            turned.odd.sort();
            prop_assert_eq!(turned.odd, verdict.odd.clone());
            prop_assert_eq!((turned.standing, turned.cause), (verdict.standing, verdict.cause));
            let known = |name: &String| job.ranks.iter().any(|rank| rank.name == *name);
            prop_assert!(verdict.odd.iter().all(known));
            prop_assert_ne!(verdict.text, "");
        }
    }
}
