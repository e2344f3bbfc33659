//! Ranks that all wait for others: what that says of them.
//!
//! *Invariant:* a rank is named only for a wait that differs from those of others, or is one of a
//! circle.

use std::collections::{BTreeMap, BTreeSet};

use super::{Found, Standing, apart, named, soon};
use crate::condition::{Condition, Kind, is_long};
use crate::evidence::Evidence;

/// Nobody works, and all wait for others: in different operations, in a circle, or in one that
/// does not end.
pub(super) fn themselves(
    evidence: &Evidence,
    order: &[&String],
    all: &mut BTreeMap<String, Condition>,
) -> Found {
    let found = judged(order, all);
    let (standing, Some(Kind::Peer), odd, why) = found else { return found };
    let odd = apart::elsewhere(evidence, odd).into_iter().map(|(name, left)| {
        let rank = evidence.ranks.iter().find(|rank| rank.name == name);
        // What a process of it does has a place there.
        let condition = all.get_mut(&name).filter(|it| rank.and_then(|it| it.pid) == Some(it.pid));
        if let Some((condition, left)) = condition.zip(left) {
            condition.place = Some(left.place());
            condition.code.clone_from(&left.code);
        }
        name
    });
    (standing, Some(Kind::Peer), odd.collect(), why)
}

fn judged(order: &[&String], all: &BTreeMap<String, Condition>) -> Found {
    let waiting = || all.values().filter(|it| matches!(it.kind, Kind::Collective | Kind::Peer));
    // A rank that has just run may be about to go on.
    let long = waiting().all(|one| is_long(one.for_ms));
    let open = waiting().any(|one| one.open);
    let standing = |open: bool| {
        if long && !open { Standing::Stalled } else { Standing::Waiting }
    };
    let operations: BTreeSet<(Option<&String>, Option<&String>)> = waiting()
        .filter(|one| one.kind == Kind::Collective)
        .map(|one| (one.operation.as_ref(), one.place.as_ref()))
        .collect();
    let outside = named(order, all, |one| matches!(one.kind, Kind::Peer | Kind::Idle));
    if !outside.is_empty() && !operations.is_empty() {
        // Those in the operation may ask for its end again and again, as MPI's do.
        let lasts = |one: &Condition| is_long(one.for_ms) && !soon(one);
        let long = outside.iter().all(|name| all.get(name).is_some_and(lasts));
        let standing = if long { Standing::Stalled } else { Standing::Waiting };
        let why = "the others are in an operation that all have to call".to_owned();
        let cause = outside.first().and_then(|name| all.get(name)).map(|one| one.kind);
        return (standing, cause, outside, why);
    }
    if operations.is_empty() {
        let why = "they wait for each other".to_owned();
        return (standing(open), Some(Kind::Peer), circle(all), why);
    }
    let in_it = |(operation, place): &(Option<&String>, Option<&String>)| {
        named(order, all, |one| {
            one.operation.as_ref() == *operation && one.place.as_ref() == *place
        })
    };
    if operations.len() > 1 {
        let least = operations.iter().map(in_it).min_by_key(Vec::len).unwrap_or_default();
        let why = "they wait in different operations, and each for all others".to_owned();
        return (standing(false), Some(Kind::Collective), least, why);
    }
    let ranks = order.len();
    let or = if open { ", or wait for one on another machine" } else { "" };
    let why = format!(
        "all {ranks} are in it, so it waits for somebody else: it may count more members than there \
         are{or}, or a message was lost"
    );
    (standing(open), Some(Kind::Collective), Vec::new(), why)
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
