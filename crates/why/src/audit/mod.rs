//! Which wires the bytes between a job's ranks took, against those that its plan expects.
//!
//! Reads no counters and no logs: it is given what they say.
//!
//! *Invariant:* only what was seen is said: bytes are a counter's, wires a library's words. A pair
//! of which nothing was seen is not in the audit, and is not called good.

pub mod ledger;
mod show;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::topology::LinkKind;
use cuda_cluster_model::units::HumanBytes;

use crate::wires::{BetweenGpus, Found, Wires};
pub use ledger::Party;

/// The version of the JSON form.
pub const VERSION: u32 = 1;

/// So many bytes over sockets between two GPUs are worth a word.
const MUCH: u64 = 256 << 20;

/// Shared memory with less room than this is full.
const FULL: u64 = 1 << 20;

/// What the plan says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    pub members: Vec<Member>,
    /// How the members' GPUs reach each other, each pair once.
    pub links: Vec<Link>,
    /// Whether the GPUs are made up, so that nothing can go over their links.
    pub simulated: bool,
}

/// A rank with its GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    pub name: String,
    /// NVML's index.
    pub gpu: Option<u32>,
    pub pci: Option<PciAddress>,
}

/// Two members, by their places, and how their GPUs reach each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    pub between: [usize; 2],
    pub kind: LinkKind,
}

/// What was seen of a job.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub ms: u64,
    pub flows: BTreeMap<(Party, Party), u64>,
    pub wires: Wires,
    pub devices: Vec<Moved>,
    /// The least room that `/dev/shm` had for the ranks, and its size.
    pub shared_memory: Option<[u64; 2]>,
    pub unseen: Vec<String>,
}

/// The bytes over the links of a device, of all programs that use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// `gpu0`, `mlx5_0`.
    pub device: String,
    /// `NVLink`, `PCIe`, `network`.
    pub wire: String,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

/// What an audit has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    pub version: u32,
    /// How long the job has been watched.
    pub ms: u64,
    /// The pairs of which something was seen.
    pub pairs: Vec<Pair>,
    /// What devices moved meanwhile.
    pub devices: Vec<Moved>,
    /// What differs from the plan, the weightiest first.
    pub findings: Vec<Finding>,
    /// Why, as far as the libraries' lines tell.
    pub causes: Vec<Found>,
    /// What could not be seen.
    pub unseen: Vec<String>,
}

/// One way between two, and the wires that it took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// A rank's name, `this machine` for another process of it, or another machine's address.
    pub from: String,
    pub to: String,
    /// How their GPUs reach each other by the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<LinkKind>,
    /// Bytes over TCP, which the kernel has counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_bytes: Option<u64>,
    /// The wires that NCCL says it uses.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nccl: BTreeSet<String>,
}

/// Something that differs from the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Whether a library says that it uses a slower wire than there is.
    pub downgrade: bool,
    pub text: String,
}

impl Audit {
    /// Whether a library uses slower wires than the plan has.
    pub fn is_below_plan(&self) -> bool {
        self.findings.iter().any(|finding| finding.downgrade)
    }
}

/// Compares what was seen with what is planned.
pub fn audit(expected: &Expected, seen: Seen) -> Audit {
    let pairs = pairs(expected, &seen);
    // NCCL's network may lead to another machine, whose GPUs have the same numbers.
    let alone = seen.wires.machines.is_none_or(|machines| machines < 2);
    let mut findings = match expected.simulated {
        true => Vec::new(),
        false => downgrades(&pairs, alone).into_iter().chain(over_sockets(&pairs)).collect(),
    };
    findings.sort_by_key(|finding| !finding.downgrade);
    if let Some([least, size]) = seen.shared_memory.filter(|[least, _]| *least < FULL) {
        let (least, size) = (HumanBytes(least), HumanBytes(size));
        let text = format!("/dev/shm was full: {least} of {size} were free");
        findings.push(Finding { downgrade: false, text });
    }
    Audit {
        version: VERSION,
        ms: seen.ms,
        pairs,
        devices: seen.devices,
        findings,
        causes: seen.wires.causes,
        unseen: seen.unseen,
    }
}

fn pairs(expected: &Expected, seen: &Seen) -> Vec<Pair> {
    let mut found: BTreeMap<(Party, Party), (Option<u64>, BTreeSet<String>)> = BTreeMap::new();
    for (pair, bytes) in &seen.flows {
        found.entry(pair.clone()).or_default().0 = Some(*bytes);
    }
    for between in &seen.wires.between_gpus {
        if let Some(pair) = expected.ends(between) {
            found.entry(pair).or_default().1.insert(between.wire.clone());
        }
    }
    let pair = |((from, to), (tcp_bytes, nccl)): (_, (_, _))| {
        let planned = expected.link(&from, &to);
        Pair { from: name(from), to: name(to), planned, tcp_bytes, nccl }
    };
    found.into_iter().map(pair).collect()
}

fn name(party: Party) -> String {
    match party {
        Party::Rank(name) | Party::Host(name) => name,
        Party::Here => "this machine".to_owned(),
    }
}

impl Expected {
    fn place(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name == name)
    }

    fn link(&self, from: &Party, to: &Party) -> Option<LinkKind> {
        let (Party::Rank(from), Party::Rank(to)) = (from, to) else { return None };
        let places = [self.place(from)?, self.place(to)?];
        let same = |link: &&Link| link.between == places || link.between == [places[1], places[0]];
        self.links.iter().find(same).map(|link| link.kind)
    }

    /// The ranks that two GPUs are of.
    fn ends(&self, between: &BetweenGpus) -> Option<(Party, Party)> {
        let party = |gpu: &str| self.of_gpu(gpu).map(|member| Party::Rank(member.name.clone()));
        let ends = (party(&between.from)?, party(&between.to)?);
        (ends.0 != ends.1).then_some(ends)
    }

    /// The only rank with this GPU. NVML's indexes are short, and PCI addresses are not.
    fn of_gpu(&self, gpu: &str) -> Option<&Member> {
        let is_it = |member: &&Member| match gpu.len() {
            0..=3 => member.gpu.is_some() && member.gpu == gpu.parse().ok(),
            _ => member.pci.is_some_and(|pci| u64::from_str_radix(gpu, 16) == Ok(number(pci))),
        };
        let mut found = self.members.iter().filter(is_it);
        found.next().filter(|_| found.next().is_none())
    }
}

/// A PCI address as NCCL writes it: the digits without the signs between them.
fn number(pci: PciAddress) -> u64 {
    let PciAddress { domain, bus, device, function } = pci;
    u64::from(domain) << 20 | u64::from(bus) << 12 | u64::from(device) << 4 | u64::from(function)
}

/// What a wire of NCCL goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Direct,
    HostMemory,
    Sockets,
    Network,
}

fn class(wire: &str) -> Option<Class> {
    match wire {
        _ if wire.starts_with("P2P/") => Some(Class::Direct),
        "SHM" => Some(Class::HostMemory),
        _ if wire.starts_with("NET/Socket") => Some(Class::Sockets),
        _ if wire.starts_with("NET/") => Some(Class::Network),
        _ => None,
    }
}

/// Wires that are slower than the link; with those that are of `downgrade` if the link is
/// NVLink, or the wire is sockets. Below a PCIe switch the driver may refuse direct transfers.
fn slower(wire: &str, link: LinkKind, alone: bool) -> Option<bool> {
    let class = class(wire)?;
    let between_machines = matches!(class, Class::Sockets | Class::Network) && !alone;
    let nvlink = matches!(link, LinkKind::Nv(_) | LinkKind::X);
    match class {
        Class::Direct => None,
        _ if between_machines => None,
        Class::Sockets => Some(true),
        _ if nvlink => Some(true),
        _ if matches!(link, LinkKind::Pix | LinkKind::Pxb) => Some(false),
        // Between host bridges NCCL chooses host memory, or the network, by itself.
        _ => None,
    }
}

fn downgrades(pairs: &[Pair], alone: bool) -> Vec<Finding> {
    let mut found: BTreeMap<(bool, &str, LinkKind), Vec<&Pair>> = BTreeMap::new();
    for pair in pairs {
        let Some(link) = pair.planned else { continue };
        for wire in &pair.nccl {
            if let Some(downgrade) = slower(wire, link, alone) {
                found.entry((!downgrade, wire, link)).or_default().push(pair);
            }
        }
    }
    let finding = |((remark, wire, link), pairs): ((bool, &str, LinkKind), Vec<&Pair>)| {
        let text = format!("{}: {wire} (NCCL), and the plan says {link}", few(&pairs));
        Finding { downgrade: !remark, text }
    };
    found.into_iter().map(finding).collect()
}

/// Pairs in a few words.
fn few(pairs: &[&Pair]) -> String {
    const NAMED: usize = 3;
    let named: Vec<String> =
        pairs.iter().take(NAMED).map(|pair| format!("{} → {}", pair.from, pair.to)).collect();
    let more = match pairs.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {}", show::more(more)),
    };
    named.join(", ") + &more
}

/// Much that went over sockets where GPUs have a better way. Who sent it is not known: it may have
/// lain in host memory.
fn over_sockets(pairs: &[Pair]) -> Vec<Finding> {
    let much = pairs.iter().filter_map(|pair| {
        let bytes = pair.tcp_bytes.filter(|bytes| *bytes >= MUCH)?;
        Some((bytes, pair, pair.planned?))
    });
    let mut much: Vec<_> = much.collect();
    much.sort_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes));
    let Some((most, pair, link)) = much.first() else { return Vec::new() };
    let bytes = HumanBytes(*most);
    let more = match much.len() - 1 {
        0 => String::new(),
        more => format!(" (and {})", show::more(more)),
    };
    let text =
        format!("{} → {}: {bytes} over TCP, and the plan says {link}{more}", pair.from, pair.to);
    vec![Finding { downgrade: false, text }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wires::read;

    /// Four GPUs with NVLink but for the pair 0 and 3.
    pub(super) fn expected() -> Expected {
        let member = |index: u32| Member {
            name: format!("gpu{index}"),
            gpu: Some(index),
            pci: format!("0000:{:02x}:00.0", 0x1a + index).parse().ok(),
        };
        let mut links = Vec::new();
        for a in 0..4 {
            for b in a + 1..4 {
                let kind = if (a, b) == (0, 3) { LinkKind::Sys } else { LinkKind::Nv(18) };
                links.push(Link { between: [a, b], kind });
            }
        }
        Expected { members: (0..4).map(member).collect(), links, simulated: false }
    }

    fn said(text: &str) -> Audit {
        audit(&expected(), Seen { wires: read(text), ..Seen::default() })
    }

    fn line(ends: &str, wire: &str) -> String {
        format!("n:1:2 [0] NCCL INFO Channel 00/0 : {ends} via {wire}\n")
    }

    #[test]
    fn direct_wires_are_as_planned() {
        let audit = said(&(line("0[1] -> 1[2]", "P2P/CUMEM") + &line("1[2] -> 0[1]", "P2P/IPC")));
        assert_eq!(audit.findings, []);
        // By their GPUs: the communicator's rank 0 is gpu1.
        assert_eq!((&*audit.pairs[0].from, &*audit.pairs[0].to), ("gpu1", "gpu2"));
        assert_eq!(audit.pairs[0].planned, Some(LinkKind::Nv(18)));
    }

    #[test]
    fn host_memory_in_place_of_nvlink_is_a_downgrade_and_elsewhere_is_not() {
        let audit = said(&line("0[1] -> 1[2]", "SHM/direct/direct"));
        assert!(audit.is_below_plan());
        assert_eq!(audit.findings[0].text, "gpu1 → gpu2: SHM (NCCL), and the plan says NV18");
        assert_eq!(said(&line("0[0] -> 1[3]", "SHM/direct/direct")).findings, []);
        assert!(said(&line("0[0] -> 1[3]", "NET/Socket/0")).is_below_plan());
    }

    #[test]
    fn a_network_between_machines_is_no_downgrade() {
        let size = "n:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4\n";
        let net = line("0[0] -> 4[1] [send]", "NET/Socket/0");
        assert!(said(&net).is_below_plan());
        assert_eq!(said(&(size.to_owned() + &net)).findings, []);
    }

    #[test]
    fn old_lines_name_gpus_by_their_addresses() {
        let audit = said(&line("0[1a000] -> 1[1b000]", "direct shared memory"));
        assert_eq!((&*audit.pairs[0].from, &*audit.pairs[0].to), ("gpu0", "gpu1"));
        assert!(audit.is_below_plan());
    }

    #[test]
    fn gpus_that_are_nobodys_or_two_ranks_are_left_out() {
        assert_eq!(said(&line("0[7] -> 1[2]", "SHM/direct/direct")).pairs, []);
        let mut expected = expected();
        expected.members[3].gpu = Some(2);
        let wires = read(&line("0[1] -> 1[2]", "SHM/direct/direct"));
        assert_eq!(audit(&expected, Seen { wires, ..Seen::default() }).pairs, []);
    }

    #[test]
    fn much_over_sockets_is_said_but_blames_no_library() {
        let rank = |name: &str| Party::Rank(name.to_owned());
        let flows = BTreeMap::from([
            ((rank("gpu2"), rank("gpu1")), 38_000_000_000),
            ((rank("gpu1"), rank("gpu2")), 300 << 20),
            ((rank("gpu0"), Party::Here), 1 << 40),
        ]);
        let seen = Seen { flows, shared_memory: Some([0, 64 << 20]), ..Seen::default() };
        let found = audit(&expected(), seen.clone());
        let texts: Vec<&str> = found.findings.iter().map(|it| it.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "gpu2 → gpu1: 35.4 GiB over TCP, and the plan says NV18 (and 1 more pair)",
                "/dev/shm was full: 0 B of 64.0 MiB were free",
            ]
        );
        assert!(!found.is_below_plan());
        let simulated = Expected { simulated: true, ..expected() };
        assert_eq!(audit(&simulated, seen).findings.len(), 1);
    }
}
