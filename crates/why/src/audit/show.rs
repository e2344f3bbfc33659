//! An audit in lines of text.
//!
//! *Invariant:* what is left out is counted.

use std::collections::BTreeMap;

use super::{Audit, Moved, Pair};
use cuda_cluster_model::units::HumanBytes;

/// As many pairs as are named one by one.
const PAIRS: usize = 8;

impl Audit {
    /// What was seen: wires, then bytes, then devices.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.wires();
        lines.extend(self.bytes());
        lines.extend(self.moved());
        if lines.is_empty() {
            lines.push("no bytes were counted, and no library said which wires it uses".to_owned());
        }
        lines
    }

    /// `gpu0 → gpu1, gpu1 → gpu0: P2P/CUMEM (NV18)`.
    fn wires(&self) -> Vec<String> {
        let mut by_wire: BTreeMap<(&str, String), Vec<&Pair>> = BTreeMap::new();
        for pair in &self.pairs {
            for wire in &pair.nccl {
                by_wire.entry((wire, planned(pair))).or_default().push(pair);
            }
        }
        let line = |((wire, planned), pairs): ((&str, String), Vec<&Pair>)| {
            let named: Vec<String> = pairs.iter().take(PAIRS).map(|pair| ends(pair)).collect();
            let more = match pairs.len().saturating_sub(PAIRS) {
                0 => String::new(),
                more => format!(", {more} more"),
            };
            format!("NCCL: {wire}{planned}: {}{more}", named.join(", "))
        };
        by_wire.into_iter().map(line).collect()
    }

    /// `gpu0 → gpu1: 3.2 GiB over TCP (NV18)`.
    fn bytes(&self) -> Vec<String> {
        let mut pairs: Vec<(u64, &Pair)> =
            self.pairs.iter().filter_map(|pair| Some((pair.tcp_bytes?, pair))).collect();
        pairs.sort_by_key(|(bytes, pair)| (std::cmp::Reverse(*bytes), &pair.from, &pair.to));
        let line = |(bytes, pair): &(u64, &Pair)| {
            format!("TCP: {}: {}{}", ends(pair), HumanBytes(*bytes), planned(pair))
        };
        let mut lines: Vec<String> = pairs.iter().take(PAIRS).map(line).collect();
        let rest = pairs.get(PAIRS..).unwrap_or_default();
        if !rest.is_empty() {
            let bytes = HumanBytes(rest.iter().map(|(bytes, _)| bytes).sum());
            lines.push(format!("TCP: {}: {bytes}", more(rest.len())));
        }
        lines
    }

    /// `NVLink: gpu0 3.2 GiB out, 3.1 GiB in; …`.
    fn moved(&self) -> Vec<String> {
        let mut by_wire: BTreeMap<&str, Vec<&Moved>> = BTreeMap::new();
        for moved in &self.devices {
            by_wire.entry(&moved.wire).or_default().push(moved);
        }
        let one = |moved: &&Moved| {
            let (sent, received) = (HumanBytes(moved.sent_bytes), HumanBytes(moved.received_bytes));
            format!("{} {sent} out, {received} in", moved.device)
        };
        let line = |(wire, moved): (&str, Vec<&Moved>)| {
            let said: Vec<String> = moved.iter().map(one).collect();
            format!("{wire}, of all programs: {}", said.join("; "))
        };
        by_wire.into_iter().map(line).collect()
    }
}

/// `1 more pair`, `4 more pairs`.
pub(super) fn more(count: usize) -> String {
    let pairs = if count == 1 { "pair" } else { "pairs" };
    format!("{count} more {pairs}")
}

fn ends(pair: &Pair) -> String {
    format!("{} → {}", pair.from, pair.to)
}

fn planned(pair: &Pair) -> String {
    pair.planned.map_or_else(String::new, |link| format!(" ({link})"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::expected;
    use super::super::{Moved, Party, Seen, audit};
    use std::collections::BTreeMap;

    #[test]
    fn wires_bytes_and_devices_are_said_and_the_rest_is_counted() {
        let rank = |number: usize| Party::Rank(format!("gpu{number}"));
        let pairs = (0..4).flat_map(|a| (0..4).map(move |b| (a, b))).filter(|(a, b)| a != b);
        let flows: BTreeMap<_, _> =
            pairs.map(|(a, b)| ((rank(a), rank(b)), 1 << (a + b))).collect();
        let text = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n";
        let moved = Moved {
            device: "gpu0".to_owned(),
            wire: "NVLink".to_owned(),
            sent_bytes: 1 << 30,
            received_bytes: 2048,
        };
        let seen = Seen {
            flows,
            wires: crate::wires::read(text),
            devices: vec![moved],
            ..Seen::default()
        };
        let lines = audit(&expected(), seen).lines();
        assert_eq!(lines[0], "NCCL: P2P/CUMEM (NV18): gpu0 → gpu1");
        assert_eq!(lines[1], "TCP: gpu2 → gpu3: 32 B (NV18)");
        assert_eq!(lines[9], "TCP: 4 more pairs: 12 B");
        assert_eq!(lines[10], "NVLink, of all programs: gpu0 1.0 GiB out, 2.0 KiB in");
        assert_eq!(lines.len(), 11);
    }

    #[test]
    fn nothing_seen_is_said() {
        let lines = audit(&expected(), Seen::default()).lines();
        assert_eq!(lines, ["no bytes were counted, and no library said which wires it uses"]);
    }
}
