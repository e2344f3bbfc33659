//! Who keeps a job waiting, and why.
//!
//! Pure: from [`Evidence`] to a [`Verdict`].
//!
//! *Invariant:* [`Standing::Stalled`] is said only of a wait that cannot end by itself, or that has
//! lasted for [`PATIENCE_MS`] in which nobody of the job ran.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use crate::condition::{Condition, Kind};
use crate::condition::{of, short};
use crate::evidence::Evidence;

/// A wait of this length is called a stall, if nothing says that it is shorter by nature.
pub const PATIENCE_MS: u64 = 5_000;

/// A sleep of which more is left is not one between two tries.
const LONG_SLEEP_MS: u64 = 60_000;

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
    let all: BTreeMap<String, Condition> = found.collect();
    let order: Vec<&String> = evidence.ranks.iter().map(|rank| &rank.name).collect();
    let waits = |kind| matches!(kind, Kind::Collective | Kind::Peer);
    let roots: Vec<&Condition> =
        all.values().filter(|it| !waits(it.kind) && it.kind != Kind::Idle).collect();
    let cause = roots.iter().map(|condition| condition.kind).min();
    let waiting = all.values().any(|condition| waits(condition.kind));
    let (standing, cause, odd, why) = match cause {
        Some(cause) => {
            let odd = named(&order, &all, |condition| condition.kind == cause);
            let root = roots.iter().find(|condition| condition.kind == cause);
            let standing = root.map_or(Standing::CannotTell, |root| by_root(root, waiting));
            (standing, Some(cause), odd, String::new())
        }
        None if waiting => among_themselves(&order, &all),
        None => (Standing::Idle, None, Vec::new(), String::new()),
    };
    let groups = groups(&order, &all, &odd);
    let text = sentence(standing, &groups, &odd, &why);
    let certain = matches!(
        cause,
        Some(Kind::Stopped | Kind::Traced | Kind::Frozen | Kind::Deadlock | Kind::Gone)
    );
    let confidence = if certain { Confidence::Certain } else { Confidence::Likely };
    Verdict { standing, cause, confidence, odd, text, groups }
}

/// How a job stands of which a rank is in this condition.
fn by_root(root: &Condition, others_wait: bool) -> Standing {
    let long = root.for_ms.is_some_and(|millis| millis >= PATIENCE_MS);
    match root.kind {
        Kind::Stopped | Kind::Traced | Kind::Frozen | Kind::Deadlock => Standing::Stalled,
        Kind::Gone if others_wait => Standing::Stalled,
        Kind::Gone | Kind::Unknown => Standing::CannotTell,
        Kind::Sleeps if root.left_ms.is_some_and(|left| left >= LONG_SLEEP_MS) => Standing::Stalled,
        Kind::Works if !others_wait => Standing::Working,
        Kind::Works | Kind::Memory | Kind::Throttled | Kind::Sleeps => Standing::Waiting,
        _ if long => Standing::Stalled,
        _ => Standing::Waiting,
    }
}

type Found = (Standing, Option<Kind>, Vec<String>, String);

/// Nobody works, and all wait for others: in different operations, in a circle, or in one that
/// does not end.
fn among_themselves(order: &[&String], all: &BTreeMap<String, Condition>) -> Found {
    let waiting = || all.values().filter(|it| matches!(it.kind, Kind::Collective | Kind::Peer));
    // A rank that has just run may be about to go on.
    let long = waiting().all(|one| one.for_ms.is_some_and(|millis| millis >= PATIENCE_MS));
    let standing = if long { Standing::Stalled } else { Standing::Waiting };
    let operations: BTreeSet<(Option<&String>, Option<&String>)> = waiting()
        .filter(|one| one.kind == Kind::Collective)
        .map(|one| (one.operation.as_ref(), one.place.as_ref()))
        .collect();
    let outside = named(order, all, |one| one.kind == Kind::Peer);
    if !outside.is_empty() && !operations.is_empty() {
        let why = "the others are in an operation that all have to call".to_owned();
        return (standing, Some(Kind::Peer), outside, why);
    }
    if operations.is_empty() {
        let why = "they wait for each other".to_owned();
        return (standing, Some(Kind::Peer), circle(all), why);
    }
    let in_it = |(operation, place): &(Option<&String>, Option<&String>)| {
        named(order, all, |one| {
            one.operation.as_ref() == *operation && one.place.as_ref() == *place
        })
    };
    if operations.len() > 1 {
        let least = operations.iter().map(in_it).min_by_key(Vec::len).unwrap_or_default();
        let why = "they wait in different operations, and each for all others".to_owned();
        return (standing, Some(Kind::Collective), least, why);
    }
    let ranks = order.len();
    let why = format!(
        "all {ranks} are in it, so it waits for somebody else: it may count more members than there \
         are, or a message was lost"
    );
    (standing, Some(Kind::Collective), Vec::new(), why)
}

/// Ranks that wait for each other in a circle; all that wait, if none is seen.
fn circle(all: &BTreeMap<String, Condition>) -> Vec<String> {
    let next = |name: &str| all.get(name).and_then(|it| it.on.first()).cloned();
    for start in all.keys() {
        let mut path = vec![start.clone()];
        while let Some(name) = path.last().and_then(|last| next(last)) {
            if let Some(at) = path.iter().position(|other| *other == name) {
                let mut circle = path.split_off(at);
                circle.sort();
                return circle;
            }
            path.push(name);
        }
    }
    all.keys().cloned().collect()
}

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
        Standing::Idle => return "idle: no rank has anything to do".to_owned(),
        Standing::CannotTell => "no verdict",
    };
    let is_odd = |group: &&Group| group.ranks.iter().any(|rank| odd.contains(rank));
    let said = groups.iter().filter(is_odd).map(said).collect::<Vec<_>>().join("; ");
    let others: Vec<String> = groups
        .iter()
        .filter(|group| !is_odd(group) && group.condition.kind != Kind::Idle)
        .map(doing)
        .collect();
    let parts = [said, others.join("; "), why.to_owned()];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    format!("{begin}: {}", parts.join("; "))
}

fn said(group: &Group) -> String {
    let since = group.condition.for_ms.filter(|millis| *millis >= 1000);
    let since = since.map_or(String::new(), |millis| format!(", for {} now", short(millis)));
    format!("{}{since}", doing(group))
}

fn doing(group: &Group) -> String {
    let Condition { text, place, .. } = &group.condition;
    let each = if group.ranks.len() > 1 { " each" } else { "" };
    let place = place.as_ref().map_or(String::new(), |place| format!(" ({place})"));
    format!("{}{each} {text}{place}", list(&group.ranks))
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
