//! Channels: who sends to whom by what wire; and many of them in few words.
//!
//! Reads no lines.
//!
//! *Invariant:* what is said of a group of channels is true of each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

/// One end of a channel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Who {
    /// A rank of a communicator.
    Rank(u32),
    /// A process (`host:pid`), or which of its peers (`self`, `intra-node`, `inter-node`, `peer`).
    Name(String),
}

/// A way from one end to the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Channel {
    pub from: Who,
    pub to: Who,
    /// `P2P/CUMEM`, `SHM`, `NET/Socket`, `NET/IB/GDRDMA`, `rc_mlx5`.
    pub wire: String,
    /// `eth0`, `mlx5_0:1`; NCCL's number of it where its name is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// A wire between two GPUs, as NCCL writes them: by NVML's index, or in old versions by the PCI
/// address in hexadecimal without its signs. Ranks are a communicator's, and GPUs are not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BetweenGpus {
    pub from: String,
    pub to: String,
    pub wire: String,
}

impl fmt::Display for Who {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Rank(rank) => write!(out, "{rank}"),
            Who::Name(name) => out.write_str(name),
        }
    }
}

/// As many pairs as are named one by one.
const PAIRS: usize = 6;

type Pairs<'a> = BTreeSet<(&'a Who, &'a Who)>;

/// A line for each wire with the same devices: `ranks 0–7 among each other: P2P/CUMEM`,
/// `0→8, 8→0: NET/Socket (eth0)`.
pub fn grouped(channels: &[Channel]) -> Vec<String> {
    let mut ways: BTreeMap<(&str, &Who, &Who), BTreeSet<&str>> = BTreeMap::new();
    for channel in channels {
        let devices = ways.entry((&channel.wire, &channel.from, &channel.to)).or_default();
        devices.extend(channel.device.as_deref());
    }
    let mut wires: BTreeMap<(&str, Vec<&str>), Pairs<'_>> = BTreeMap::new();
    for ((wire, from, to), devices) in ways {
        let devices = devices.into_iter().collect();
        wires.entry((wire, devices)).or_default().insert((from, to));
    }
    let line = |((wire, devices), pairs): ((&str, Vec<&str>), Pairs<'_>)| {
        let by = match devices.as_slice() {
            [] => String::new(),
            devices => format!(" ({})", devices.join(", ")),
        };
        format!("{}: {wire}{by}", who(&pairs))
    };
    wires.into_iter().map(line).collect()
}

fn who(pairs: &Pairs<'_>) -> String {
    let mut said = Vec::new();
    let mut single = Vec::new();
    for circle in circles(pairs) {
        let own: Pairs<'_> =
            pairs.iter().filter(|(from, _)| circle.contains(from)).copied().collect();
        let ranks: Option<Vec<u32>> = circle.iter().map(|who| rank(who)).collect();
        match ranks {
            Some(ranks) if ranks.len() > 2 && own.len() > 2 => {
                said.push(format!("ranks {} among each other", ranges(&ranks)));
            }
            _ => single.extend(own),
        }
    }
    let left_out = single.len().saturating_sub(PAIRS);
    said.extend(single.iter().take(PAIRS).map(|(from, to)| format!("{from}→{to}")));
    if left_out > 0 {
        said.push(format!("{left_out} more"));
    }
    said.join(", ")
}

fn rank(who: &Who) -> Option<u32> {
    match who {
        Who::Rank(rank) => Some(*rank),
        Who::Name(_) => None,
    }
}

/// The ends that are connected with each other, directly or by way of others.
fn circles<'a>(pairs: &Pairs<'a>) -> Vec<BTreeSet<&'a Who>> {
    let mut near: BTreeMap<&Who, BTreeSet<&'a Who>> = BTreeMap::new();
    for (from, to) in pairs {
        near.entry(from).or_default().insert(to);
        near.entry(to).or_default().insert(from);
    }
    let mut circles = Vec::new();
    while let Some((_, first)) = near.pop_first() {
        let mut circle = BTreeSet::new();
        let mut next: Vec<&'a Who> = first.into_iter().collect();
        while let Some(who) = next.pop() {
            if circle.insert(who) {
                next.extend(near.remove(who).unwrap_or_default());
            }
        }
        circles.push(circle);
    }
    circles
}

/// `0–3, 8`.
pub(super) fn ranges(numbers: &[u32]) -> String {
    let sorted: BTreeSet<u32> = numbers.iter().copied().collect();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in sorted {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let text = |(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}–{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(from: u32, to: u32, wire: &str, device: Option<&str>) -> Channel {
        let device = device.map(str::to_owned);
        Channel { from: Who::Rank(from), to: Who::Rank(to), wire: wire.to_owned(), device }
    }

    #[test]
    fn a_ring_is_said_in_a_few_words_and_pairs_one_by_one() {
        let mut channels: Vec<Channel> =
            (0..8).map(|rank| channel(rank, (rank + 1) % 8, "P2P/CUMEM", None)).collect();
        channels.push(channel(0, 8, "NET/Socket", Some("eth0")));
        channels.push(channel(8, 0, "NET/Socket", Some("eth0")));
        let said = grouped(&channels);
        assert_eq!(said[0], "0→8, 8→0: NET/Socket (eth0)");
        assert_eq!(said[1], "ranks 0–7 among each other: P2P/CUMEM");
    }

    #[test]
    fn a_device_is_said_of_those_that_use_it() {
        let channels = [
            channel(0, 8, "NET/IB", Some("mlx5_0:1")),
            channel(0, 8, "NET/IB", Some("mlx5_1:1")),
            channel(8, 0, "NET/IB", Some("mlx5_1:1")),
        ];
        let said = grouped(&channels);
        assert_eq!(said, ["0→8: NET/IB (mlx5_0:1, mlx5_1:1)", "8→0: NET/IB (mlx5_1:1)"]);
    }

    #[test]
    fn many_pairs_are_counted() {
        let channels: Vec<Channel> =
            (0..10).map(|rank| channel(rank, rank + 100, "NET/IB", None)).collect();
        let said = grouped(&channels);
        assert_eq!(said, ["0→100, 1→101, 2→102, 3→103, 4→104, 5→105, 4 more: NET/IB"]);
    }

    #[test]
    fn numbers_that_follow_each_other_are_a_range() {
        assert_eq!(ranges(&[3, 0, 1, 2, 8, 9, u32::MAX]), "0–3, 8, 9, 4294967295");
        assert_eq!(ranges(&[]), "");
    }
}
