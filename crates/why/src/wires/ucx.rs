//! UCX's lines: the lanes of its endpoints, from any of the forms in which it writes them.
//!
//! Judges nothing. The forms are those of UCX 1.5 to 1.20 (`ucp_worker.c`, `proto_debug.c`,
//! `wireup.c`) and of `ucx_info`.
//!
//! *Invariant:* the lines of one process say the same whatever stands between them.

use std::collections::{BTreeMap, BTreeSet};

use super::cause::Cause;
use super::channel::{Channel, Who};
use super::lines::Record;

/// What UCX's lines have said.
#[derive(Debug, Default)]
pub(super) struct Ucx {
    channels: BTreeSet<Channel>,
    /// Of each configuration that leads to another machine, or might: its lanes, and the line.
    pub(super) elsewhere: Vec<Lanes>,
    /// `tcp/eth0`: what a context has to choose from.
    pub(super) resources: BTreeSet<String>,
    /// The peer of the table that a process is writing.
    tables: BTreeMap<String, &'static str>,
    /// The first table about another machine, of each process.
    heads: BTreeMap<String, String>,
}

/// The lanes of a configuration.
#[derive(Debug)]
pub(super) struct Lanes {
    pub(super) transports: BTreeSet<String>,
    /// Whether they certainly lead to another machine.
    pub(super) certain: bool,
    pub(super) line: String,
}

/// Who is meant where nothing is said of it.
const SOME_PEER: &str = "peer";
/// A process on another machine.
const ELSEWHERE: &str = "inter-node";

impl Ucx {
    /// Keeps what this says; `false` if it is nothing that we know.
    pub(super) fn see(&mut self, record: &Record<'_>) -> bool {
        let line = record.body;
        if line.contains('|') {
            return self.see_table(record);
        }
        if let Some((_, resource)) =
            line.split_once("flags -").filter(|_| line.contains("resource"))
        {
            let name = resource.split_whitespace().last().filter(|name| name.contains('/'));
            self.resources.extend(name.map(str::to_owned));
            return true;
        }
        if let Some((_, lane)) = line.split_once("lane[") {
            let name = lane.split_once(':').and_then(|(_, rest)| numbered(rest));
            return name.is_some_and(|(wire, device)| {
                self.keep(record, SOME_PEER, wire, device);
                true
            });
        }
        match peer(line) {
            Some((peer, rest)) if rest.contains('(') => self.see_configuration(record, peer, rest),
            _ => line.contains("UCX  INFO  Version") || line.contains("UCX_* env variable"),
        }
    }

    /// `… inter-node cfg#1 tag(rc_mlx5/mlx5_0:1) rma(rc_mlx5/mlx5_0:1)`.
    fn see_configuration(&mut self, record: &Record<'_>, peer: &'static str, rest: &str) -> bool {
        let inside = rest.split('(').skip(1).filter_map(|part| part.split(')').next());
        let lanes: Vec<(&str, &str)> =
            inside.flat_map(str::split_whitespace).filter_map(lane).collect();
        for (wire, device) in &lanes {
            self.keep(record, peer, wire, device);
        }
        if matches!(peer, ELSEWHERE | SOME_PEER) && !lanes.is_empty() {
            self.elsewhere.push(Lanes {
                transports: lanes.iter().map(|(wire, _)| (*wire).to_owned()).collect(),
                certain: peer == ELSEWHERE,
                line: record.whole.to_owned(),
            });
        }
        !lanes.is_empty()
    }

    /// A row of UCX_PROTO_INFO's table: the head names the peer, the others have lanes at the end.
    fn see_table(&mut self, record: &Record<'_>) -> bool {
        if let Some((peer, _)) = peer(record.body) {
            self.tables.insert(record.process.to_owned(), peer);
            if peer == ELSEWHERE {
                let head = || record.whole.to_owned();
                self.heads.entry(record.process.to_owned()).or_insert_with(head);
            }
            return true;
        }
        let cells: Vec<&str> = record.body.split('|').map(str::trim).collect();
        let [.., range, _, lanes, _] = cells.as_slice() else { return false };
        let Some(peer) = self.tables.get(record.process).copied() else { return false };
        if !range.contains("..") && range.parse::<u64>().is_err() {
            return false;
        }
        for (wire, device) in lanes.split_whitespace().filter_map(lane) {
            self.keep(record, peer, wire, device);
        }
        true
    }

    fn keep(&mut self, record: &Record<'_>, peer: &str, wire: &str, device: &str) {
        let from = if record.process.is_empty() { "?" } else { record.process };
        self.channels.insert(Channel {
            from: Who::Name(from.to_owned()),
            to: Who::Name(peer.to_owned()),
            wire: wire.to_owned(),
            device: Some(device.to_owned()),
        });
    }

    /// Of each process that has written tables alone: its lanes to other machines.
    pub(super) fn tables(&self) -> impl Iterator<Item = Lanes> {
        self.heads.iter().map(|(process, head)| {
            let from = if process.is_empty() { "?" } else { process };
            let (from, to) = (Who::Name(from.to_owned()), Who::Name(ELSEWHERE.to_owned()));
            let own = self.channels.iter().filter(|one| one.from == from && one.to == to);
            let transports = own.map(|one| one.wire.clone()).collect();
            Lanes { transports, certain: true, line: head.clone() }
        })
    }

    pub(super) fn channels(&self) -> &BTreeSet<Channel> {
        &self.channels
    }

    /// Why there is no way to a peer: its address can't be reached, or no transport can do it.
    pub(super) fn failed(&self, record: &Record<'_>) -> Option<Cause> {
        let (_, reasons) = record.body.split_once("no active messages transport")?;
        let (_, reasons) = reasons.split_once(": ").unwrap_or(("", reasons));
        // `tcp/eth0 - Destination is unreachable`, since 1.21 `tcp/lo - different host id …`, but
        // `tcp/eth0 - no peer failure handler` of what a transport can't do at all.
        let across = |reason: &str| {
            let (lane, why) = reason.trim().split_once(" - ").unwrap_or(("", ""));
            let network = ["tcp/", "rc", "ud_", "ud/", "dc", "srd"];
            network.iter().any(|name| lane.starts_with(name)) && !why.starts_with("no ")
        };
        let unreachable = reasons.split(", ").any(across);
        Some(if unreachable { Cause::Unreachable } else { Cause::Transport })
    }
}

/// Which peer a configuration is for, and what stands behind its name.
fn peer(line: &str) -> Option<(&'static str, &str)> {
    if let Some((_, rest)) = line.split_once("ep_cfg[") {
        return rest.split_once(']').map(|(_, rest)| (SOME_PEER, rest));
    }
    let (before, rest) = line.split_once("cfg#")?;
    let word = before.split_whitespace().last().unwrap_or("");
    let known = ["self", "intra-node", ELSEWHERE].into_iter().find(|name| *name == word);
    let rest = rest.trim_start_matches(|letter: char| letter.is_ascii_digit());
    Some((known.unwrap_or(SOME_PEER), rest))
}

/// `rc_mlx5/mlx5_0:1/path0`: the transport and the device.
fn lane(word: &str) -> Option<(&str, &str)> {
    let (wire, device) = word.split_once('/')?;
    let device = device.split('/').next().unwrap_or("");
    let is_name = |text: &str| {
        let letters = |letter: char| letter.is_ascii_alphanumeric() || "_-:.".contains(letter);
        !text.is_empty() && text.chars().all(letters)
    };
    let begins = wire.starts_with(|letter: char| letter.is_ascii_lowercase());
    (begins && is_name(wire) && is_name(device)).then_some((wire, device))
}

/// `  0:posix/memory.0 md[0]  -> …`: a lane with its number, and its path at the end.
fn numbered(text: &str) -> Option<(&str, &str)> {
    let word = text.split_whitespace().next()?;
    let (_, name) = word.split_once(':')?;
    let bare = match name.rsplit_once('.') {
        Some((bare, path)) if path.bytes().all(|byte| byte.is_ascii_digit()) => bare,
        _ => name,
    };
    lane(bare)
}
