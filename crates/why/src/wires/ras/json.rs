//! RAS's answer in JSON (`SET FORMAT json`, since NCCL 2.28.7).
//!
//! Reads no text form.
//!
//! *Invariant:* keys that a later NCCL adds change nothing.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Communicator, Count, Operation, Process, Rank, Status};

#[derive(Deserialize)]
struct Answer {
    nccl_version: String,
    communicators: Vec<Comm>,
    #[serde(default)]
    ras: Collection,
}

#[derive(Default, Deserialize)]
struct Collection {
    #[serde(default)]
    timeouts_count: u64,
}

#[derive(Deserialize)]
struct Comm {
    #[serde(default)]
    hash: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    ranks: Vec<Member>,
    #[serde(default)]
    missing_ranks: Vec<Member>,
}

#[derive(Deserialize)]
struct Member {
    rank: u32,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    cuda_dev: i64,
    #[serde(default)]
    status: State,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

#[derive(Default, Deserialize)]
struct State {
    #[serde(default)]
    init_state: i64,
    #[serde(default)]
    async_error: i64,
    #[serde(default)]
    abort_flag: bool,
    #[serde(default)]
    considered_dead: bool,
}

/// The answer, behind what the server has said before it.
pub(super) fn parse(text: &str) -> Option<Status> {
    // Other braces may stand before it: a log's, or those of a program's own JSON.
    let inside = text.find("\"nccl_version\"")?;
    let start = text.get(..inside)?.rfind('{')?;
    let text = text.get(start..)?;
    let mut answers = serde_json::Deserializer::from_str(text).into_iter::<Answer>();
    let answer = answers.next()?.ok()?;
    let communicators = answer.communicators.iter().enumerate().map(communicator).collect();
    let lost = answer.communicators.iter().flat_map(|comm| &comm.missing_ranks);
    let mut dead: Vec<Process> =
        lost.filter(|member| member.status.considered_dead).map(process).collect();
    dead.sort();
    dead.dedup();
    Some(Status {
        nccl: Some(answer.nccl_version),
        communicators,
        missing: Vec::new(),
        dead,
        timeouts: answer.ras.timeouts_count,
    })
}

fn communicator((number, comm): (usize, &Comm)) -> Communicator {
    let states: Vec<&Member> = comm.ranks.iter().filter(|one| one.status.abort_flag).collect();
    let status = if states.is_empty() { "" } else { "ABORT" };
    Communicator {
        name: number.to_string(),
        hash: comm.hash.clone(),
        alike: 1,
        size: comm.size,
        status: status.to_owned(),
        missing: comm.missing_ranks.iter().map(rank).collect(),
        operations: operations(&comm.ranks),
        errors: comm.ranks.iter().filter_map(error).collect(),
    }
}

fn operations(ranks: &[Member]) -> Vec<Operation> {
    let mut names: BTreeMap<&str, BTreeMap<u64, Vec<Rank>>> = BTreeMap::new();
    for member in ranks {
        for (name, launched) in &member.collective_counts {
            names.entry(name).or_default().entry(*launched).or_default().push(rank(member));
        }
    }
    let count = |(launched, named): (u64, Vec<Rank>)| {
        let ranks = u64::try_from(named.len()).unwrap_or(u64::MAX);
        Count { launched, ranks, named }
    };
    let one = |(name, counts): (&str, BTreeMap<u64, Vec<Rank>>)| Operation {
        name: name.to_owned(),
        counts: counts.into_iter().rev().map(count).collect(),
    };
    names.into_iter().map(one).collect()
}

fn rank(member: &Member) -> Rank {
    Rank { rank: member.rank, process: Some(process(member)) }
}

fn process(member: &Member) -> Process {
    let gpus = member.cuda_dev.to_string();
    Process { pid: member.pid, host: member.host.clone(), gpus }
}

fn error(member: &Member) -> Option<String> {
    let failed = |code: &i64| !matches!(code, 0 | 7);
    let codes = [member.status.init_state, member.status.async_error];
    let code = codes.into_iter().find(failed)?;
    Some(format!("rank {} reports error {code} ({})", rank(member), meaning(code)))
}

/// `ncclResult_t` (`nccl.h`).
fn meaning(code: i64) -> &'static str {
    match code {
        1 => "a call of CUDA failed",
        2 => "a call of the system failed",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "remote error: a network, or another process that has ended",
        8 => "timeout",
        _ => "unknown",
    }
}
