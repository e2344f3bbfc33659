//! Which NICs each GPU's traffic uses.
//!
//! Does not write environment variables; `ucx` does.
//!
//! *Invariant:* an assigned NIC is as near as any usable one of its GPU's; no NIC serves two GPUs
//! while an equally near one of either serves none.

use std::collections::BTreeMap;

use super::assign::assign;
use super::gpus::machine_name;
use super::{PlanError, Rejected};
use crate::ids::{GpuIndex, NicPort};
use crate::topology::{
    Device, Gpu, LinkKind, LinkLayer, Links, Nic, NicKind, Note, Port, PortState, Topology,
};

/// A NIC with at least one port that can carry traffic.
#[derive(Clone, Debug)]
pub(super) struct Usable<'a> {
    /// Position in `Topology::nics`.
    at: u32,
    pub(super) nic: &'a Nic,
    /// The best port first: by rate, then by number.
    ports: Vec<UsablePort>,
}

#[derive(Clone, Copy, Debug)]
struct UsablePort {
    number: u32,
    layer: Option<LinkLayer>,
    rate_gbps: Option<f64>,
}

impl Usable<'_> {
    /// The port for the `turn`-th GPU of this NIC.
    fn port(&self, turn: usize) -> NicPort {
        let port = self.ports[turn % self.ports.len()];
        NicPort { nic: self.nic.name.clone(), port: port.number }
    }

    fn best_rate(&self) -> f64 {
        self.ports.iter().filter_map(|port| port.rate_gbps).fold(0.0, f64::max)
    }
}

/// Every NIC of a machine, judged.
#[derive(Clone, Debug)]
pub(super) struct Nics<'a> {
    topology: &'a Topology,
    links: Links,
    pub(super) usable: Vec<Usable<'a>>,
    /// NICs and ports that cannot be used: position, name, reason.
    refused: Vec<(u32, String, String)>,
    /// Why the other fabric was left, when there were two.
    pub(super) notes: Vec<Note>,
}

/// What a GPU got.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    /// Nearest first.
    pub(super) ports: Vec<NicPort>,
    /// As an expert would say it.
    pub(super) reason: String,
    pub(super) rejected: Vec<Rejected>,
}

impl<'a> Nics<'a> {
    /// Judges every NIC. `excluded` are devices (`mlx5_4`) or ports (`mlx5_4:1`).
    pub(super) fn judge(topology: &'a Topology, excluded: &[String]) -> Result<Self, PlanError> {
        for name in excluded {
            let device = name.split(':').next().unwrap_or(name);
            if !topology.nics.iter().any(|nic| nic.name == device) {
                return Err(no_such_nic(topology, name));
            }
        }
        let links = if topology.links.is_empty() {
            topology.derive_links()
        } else {
            topology.links.clone()
        };
        let mut nics =
            Self { topology, links, usable: Vec::new(), refused: Vec::new(), notes: Vec::new() };
        for (at, nic) in (0u32..).zip(&topology.nics) {
            if let Some(why) = unusable(nic).or_else(|| is_excluded(&nic.name, excluded)) {
                nics.refused.push((at, nic.name.clone(), why));
                continue;
            }
            let ports = nics.usable_ports(at, nic, excluded);
            if !ports.is_empty() {
                nics.usable.push(Usable { at, nic, ports });
            }
        }
        Ok(nics)
    }

    fn usable_ports(&mut self, at: u32, nic: &Nic, excluded: &[String]) -> Vec<UsablePort> {
        if nic.ports.is_empty() {
            let text = "the source tells nothing about its ports: port 1 is taken to be active";
            self.notes.push(Note::new(&nic.name, text));
            return vec![UsablePort { number: 1, layer: None, rate_gbps: None }];
        }
        let mut ports = Vec::new();
        for port in &nic.ports {
            let name = format!("{}:{}", nic.name, port.port);
            match port_unusable(port).or_else(|| is_excluded(&name, excluded)) {
                Some(why) => self.refused.push((at, name, why)),
                None => {
                    if port.state.is_none() {
                        let text = "the source tells no state: taken to be active";
                        self.notes.push(Note::new(name, text));
                    }
                    ports.push(UsablePort {
                        number: port.port,
                        layer: port.link_layer,
                        rate_gbps: port.rate_gbps,
                    });
                }
            }
        }
        ports.sort_by(|a, b| {
            let rate = |port: &UsablePort| port.rate_gbps.unwrap_or(0.0);
            rate(b).total_cmp(&rate(a)).then(a.number.cmp(&b.number))
        });
        ports
    }

    /// How a GPU and a NIC reach each other; by NUMA node where the source tells no link.
    fn link(&self, gpu: &Gpu, at: u32) -> Option<LinkKind> {
        self.links.between(Device::Gpu(gpu.index), Device::Nic(at)).or_else(|| {
            let nic = self.topology.nics.get(at as usize)?;
            let same = gpu.numa? == nic.numa?;
            Some(if same { LinkKind::Node } else { LinkKind::Sys })
        })
    }

    /// Leaves one fabric: an InfiniBand port cannot reach a RoCE port.
    ///
    /// The fabric whose NICs are nearer to the GPUs is kept; InfiniBand where both are equal.
    pub(super) fn keep_one_fabric(&mut self, gpus: &[&Gpu]) {
        let has = |nics: &Self, layer| {
            nics.usable.iter().flat_map(|nic| &nic.ports).any(|port| port.layer == Some(layer))
        };
        let both = has(self, LinkLayer::InfiniBand) && has(self, LinkLayer::Ethernet);
        if !both {
            return;
        }
        let distance = |layer: LinkLayer| -> u32 {
            let on = |nic: &&Usable<'_>| {
                nic.ports.iter().any(|port| port.layer.is_none_or(|other| other == layer))
            };
            let nearest = |gpu: &&Gpu| {
                self.usable.iter().filter(on).map(|nic| level(self.link(gpu, nic.at))).min()
            };
            gpus.iter().filter_map(nearest).sum()
        };
        let (keep, drop) = if distance(LinkLayer::Ethernet) < distance(LinkLayer::InfiniBand) {
            (LinkLayer::Ethernet, LinkLayer::InfiniBand)
        } else {
            (LinkLayer::InfiniBand, LinkLayer::Ethernet)
        };
        for nic in &mut self.usable {
            for port in nic.ports.iter().filter(|port| port.layer == Some(drop)) {
                let name = format!("{}:{}", nic.nic.name, port.number);
                let why = format!("{drop}, which cannot reach the {keep} ports of the others");
                self.refused.push((nic.at, name, why));
            }
            nic.ports.retain(|port| port.layer != Some(drop));
        }
        self.usable.retain(|nic| !nic.ports.is_empty());
    }

    /// One NIC for each GPU: the nearest, ties shared evenly, faster ones first, then by name.
    pub(super) fn pin(&self, gpus: &[&Gpu]) -> BTreeMap<GpuIndex, Given> {
        let turns = self.assignment(gpus);
        let mut given = BTreeMap::new();
        for (row, gpu) in gpus.iter().enumerate() {
            let (at, turn) = turns[row];
            let with: Vec<GpuIndex> = gpus
                .iter()
                .zip(&turns)
                .filter(|(other, (nic, _))| *nic == at && other.index != gpu.index)
                .map(|(other, _)| other.index)
                .collect();
            let port = self.usable[at].port(turn);
            let choice = Given {
                reason: self.reason(gpu, at, &with),
                rejected: self.rejected(gpu, &[at], gpus, &turns),
                ports: vec![port],
            };
            given.insert(gpu.index, choice);
        }
        given
    }

    /// All NICs of the nearest level, shared out so that none idles and no two GPUs share one
    /// while another idles.
    pub(super) fn stripe(&self, gpus: &[&Gpu]) -> BTreeMap<GpuIndex, Given> {
        let turns = self.assignment(gpus);
        let mut of: Vec<Vec<usize>> = turns.iter().map(|(at, _)| vec![*at]).collect();
        let idle = self.in_order_of_name().into_iter();
        for at in idle.filter(|at| turns.iter().all(|(used, _)| used != at)) {
            // An idle NIC goes to the GPU with the fewest among those it is nearest to.
            let near = in_order_of_place(gpus).into_iter().filter(|row| {
                let best = self.nearest_level(gpus[*row]);
                level(self.link(gpus[*row], self.usable[at].at)) == best
            });
            if let Some(row) = near.min_by_key(|row| of[*row].len()) {
                of[row].push(at);
            }
        }
        let mut given = BTreeMap::new();
        for (row, gpu) in gpus.iter().enumerate() {
            let kind = link_word(self.link(gpu, self.usable[of[row][0]].at));
            let count = of[row].len();
            let plural = if count == 1 { "the one NIC" } else { "NICs" };
            let reason = format!("{count} × {kind}: {plural} of the nearest level that fall to it");
            let ports = of[row].iter().map(|at| {
                let turn = if *at == turns[row].0 { turns[row].1 } else { 0 };
                self.usable[*at].port(turn)
            });
            let choice = Given {
                ports: ports.collect(),
                reason,
                rejected: self.rejected(gpu, &of[row], gpus, &turns),
            };
            given.insert(gpu.index, choice);
        }
        given
    }

    fn nearest_level(&self, gpu: &Gpu) -> u32 {
        self.usable.iter().map(|nic| level(self.link(gpu, nic.at))).min().unwrap_or(u32::MAX)
    }

    /// For each GPU the position of its NIC in `usable`, and its turn among that NIC's GPUs.
    ///
    /// Works on GPUs in the order of their places and on NICs in the order of their names, so that
    /// the answer does not depend on how either are numbered.
    fn assignment(&self, gpus: &[&Gpu]) -> Vec<(usize, usize)> {
        let (rows, columns) = (in_order_of_place(gpus), self.in_order_of_name());
        let slower = slower_ranks(&self.usable);
        let levels: Vec<Vec<u32>> = rows
            .iter()
            .map(|row| {
                let level_of = |at: &usize| level(self.link(gpus[*row], self.usable[*at].at));
                columns.iter().map(level_of).collect()
            })
            .collect();
        // The aims by weight, the least first; each weighs more than all lesser ones together can.
        let (n, m) = (rows.len() as i128 + 1, columns.len() as i128 + 1);
        let low_name = n * n * m;
        let fast = n * m * low_name + n * n * m;
        let share = n * m * fast * 2;
        let near = n * n * share * 2;
        let slots = assign_slots(rows.len(), columns.len(), |row, column, turn| {
            i128::from(levels[row][column]) * near
                + turn as i128 * share
                + slower[columns[column]] as i128 * fast
                + column as i128 * low_name
                // The largest sum of products is that of two rising sequences: GPU order and NIC
                // order then agree, which is how rails are cabled.
                + (n * m - (row * column) as i128)
        });
        let mut turns = vec![(0, 0); gpus.len()];
        for (row, (column, turn)) in slots.into_iter().enumerate() {
            turns[rows[row]] = (columns[column], turn);
        }
        turns
    }

    fn in_order_of_name(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.usable.len()).collect();
        order.sort_by_cached_key(|at| nic_key(self.usable[*at].nic));
        order
    }

    fn reason(&self, gpu: &Gpu, at: usize, with: &[GpuIndex]) -> String {
        let link = self.link(gpu, self.usable[at].at);
        let best = level(link);
        let tied = self.usable.iter().filter(|nic| level(self.link(gpu, nic.at)) == best).count();
        let mut reason = match tied {
            1 if self.usable.len() == 1 => format!("{}, the only usable NIC", link_word(link)),
            1 => format!("{}, the nearest of {} usable NICs", link_word(link), self.usable.len()),
            _ => {
                format!("{}; {tied} NICs are equally near and shared out evenly", link_word(link))
            }
        };
        if !with.is_empty() {
            let others: Vec<String> = with.iter().map(|gpu| format!("GPU {gpu}")).collect();
            reason.push_str(&format!("; also serves {}", others.join(", ")));
        }
        if matches!(link, Some(LinkKind::Sys)) {
            reason.push_str("; far from this GPU, but there is no nearer one");
        }
        reason
    }

    fn rejected(
        &self,
        gpu: &Gpu,
        taken: &[usize],
        gpus: &[&Gpu],
        turns: &[(usize, usize)],
    ) -> Vec<Rejected> {
        let chosen =
            taken.first().map_or(u32::MAX, |at| level(self.link(gpu, self.usable[*at].at)));
        let mut others: Vec<(u32, Rejected)> = Vec::new();
        for (at, nic) in self.usable.iter().enumerate().filter(|(at, _)| !taken.contains(at)) {
            let link = self.link(gpu, nic.at);
            let serves: Vec<String> = gpus
                .iter()
                .zip(turns)
                .filter(|(_, (used, _))| *used == at)
                .map(|(other, _)| format!("GPU {}", other.index))
                .collect();
            let why = match (level(link).cmp(&chosen), serves.is_empty()) {
                (std::cmp::Ordering::Greater, _) => format!("{}, farther", link_word(link)),
                (_, false) => {
                    format!("{} as well, but it serves {}", link_word(link), serves.join(", "))
                }
                (_, true) => format!("{} as well, but slower or later in order", link_word(link)),
            };
            others.push((level(link), Rejected { what: nic.port(0).to_string(), why }));
        }
        for (at, what, why) in &self.refused {
            let link = self.link(gpu, *at);
            let why = format!("{}, but {why}", link_word(link));
            others.push((level(link), Rejected { what: what.clone(), why }));
        }
        others.sort_by_key(|(level, _)| *level);
        others.into_iter().map(|(_, rejected)| rejected).collect()
    }

    /// The ports that a list or a filled-in template names; other names are network devices.
    pub(super) fn named(&self, names: &[String]) -> Result<(Vec<NicPort>, Vec<String>), PlanError> {
        let (mut ports, mut devices) = (Vec::new(), Vec::new());
        for name in names {
            let (device, number) = match name.split_once(':') {
                Some((device, number)) => (device, Some(number)),
                None => (name.as_str(), None),
            };
            let known = self.topology.nics.iter().position(|nic| nic.name == device);
            let Some(at) = known else {
                let netdev = self.topology.nics.iter().flat_map(|nic| &nic.ports);
                let is_netdev = netdev.filter_map(|p| p.netdev.as_deref()).any(|n| n == device);
                let nearest = crate::spec::nearest(name, self.names().iter().map(String::as_str));
                // RDMA ports have a number; a name close to a NIC's is a slip. What is left is a
                // network device, which a topology need not know.
                if number.is_some() || (!is_netdev && nearest.is_some()) {
                    return Err(no_such_nic(self.topology, name));
                }
                devices.push(name.clone());
                continue;
            };
            let at = u32::try_from(at).unwrap_or(u32::MAX);
            let refused = self.refused.iter().find(|(nic, what, _)| {
                *nic == at && (what == name || (what == device && !what.contains(':')))
            });
            if let Some((_, _, why)) = refused {
                return Err(PlanError::UnusableNic { name: name.clone(), why: why.clone() });
            }
            let usable = self.usable.iter().find(|nic| nic.at == at);
            let port = match (usable, number) {
                (Some(usable), None) => Some(usable.port(0)),
                (Some(usable), Some(number)) => usable
                    .ports
                    .iter()
                    .find(|port| port.number.to_string() == number)
                    .map(|port| NicPort { nic: device.to_owned(), port: port.number }),
                (None, _) => {
                    let why = self.refused.iter().find(|(nic, _, _)| *nic == at);
                    let why =
                        why.map_or_else(String::new, |(_, what, why)| format!("{what} {why}"));
                    return Err(PlanError::UnusableNic { name: name.clone(), why });
                }
            };
            ports.push(port.ok_or_else(|| no_such_nic(self.topology, name))?);
        }
        Ok((ports, devices))
    }

    /// The error of a mode that needs a NIC where there is none.
    pub(super) fn none(&self, mode: &str) -> PlanError {
        PlanError::NoNic {
            mode: mode.to_owned(),
            machine: machine_name(self.topology),
            rejected: self.refusals(),
        }
    }

    /// Every NIC that cannot be used, with its reason.
    pub(super) fn refusals(&self) -> Vec<String> {
        self.refused.iter().map(|(_, what, why)| format!("{what}: {why}")).collect()
    }

    fn names(&self) -> Vec<String> {
        self.topology.nics.iter().map(|nic| nic.name.clone()).collect()
    }
}

/// Assigns each row a column of `nics`, each of which can be taken `rows` times.
///
/// The `turn`-th GPU of a NIC costs `turn` shares, so that equally near NICs fill evenly.
fn assign_slots(
    rows: usize,
    nics: usize,
    cost: impl Fn(usize, usize, usize) -> i128,
) -> Vec<(usize, usize)> {
    if rows == 0 || nics == 0 {
        return vec![(0, 0); rows];
    }
    let columns = assign(rows, nics * rows, |row, column| cost(row, column / rows, column % rows));
    // Turns are handed out again in row order, so that ports of one NIC follow the GPUs' order.
    let mut served = vec![0; nics];
    columns
        .into_iter()
        .map(|column| {
            let at = column / rows;
            served[at] += 1;
            (at, served[at] - 1)
        })
        .collect()
}

/// A link as a number, nearest first; unknown is farther than any.
fn level(link: Option<LinkKind>) -> u32 {
    match link {
        Some(LinkKind::X | LinkKind::Nv(_)) => 0,
        Some(LinkKind::Pix) => 1,
        Some(LinkKind::Pxb) => 2,
        Some(LinkKind::Phb) => 3,
        Some(LinkKind::Node) => 4,
        Some(LinkKind::Sys) => 5,
        None => 6,
    }
}

fn link_word(link: Option<LinkKind>) -> String {
    link.map_or_else(|| "distance unknown".to_owned(), |kind| kind.to_string())
}

/// Positions of GPUs in the order of their places, by index where those are unknown.
fn in_order_of_place(gpus: &[&Gpu]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    order.sort_by_key(|at| (gpus[*at].pci, gpus[*at].index));
    order
}

/// 0 for the fastest NICs, 1 for the next faster, and so on.
fn slower_ranks(nics: &[Usable<'_>]) -> Vec<usize> {
    let mut rates: Vec<f64> = nics.iter().map(Usable::best_rate).collect();
    rates.sort_by(|a, b| b.total_cmp(a));
    rates.dedup();
    nics.iter()
        .map(|nic| rates.iter().position(|rate| *rate == nic.best_rate()).unwrap_or(0))
        .collect()
}

/// Orders `mlx5_2` before `mlx5_10`.
fn nic_key(nic: &Nic) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = nic.name.as_str();
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, after) = rest.split_at(word);
        let number = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (digits, after) = after.split_at(number);
        parts.push((text.to_owned(), digits.parse().unwrap_or(0)));
        rest = after;
    }
    parts
}

fn unusable(nic: &Nic) -> Option<String> {
    match nic.kind {
        NicKind::Physical | NicKind::Bond => None,
        NicKind::VirtualFunction => {
            Some("it is a virtual function of a NIC that is here".to_owned())
        }
        NicKind::BondSlave => Some("it belongs to a bond and cannot be used by itself".to_owned()),
        NicKind::Software => Some("it is software without RDMA hardware".to_owned()),
    }
}

fn port_unusable(port: &Port) -> Option<String> {
    match port.state {
        None | Some(PortState::Active) => None,
        Some(state) => Some(format!("port {} is {state}", port.port)),
    }
}

fn is_excluded(name: &str, excluded: &[String]) -> Option<String> {
    excluded.iter().any(|other| other == name).then(|| "it is excluded by the user".to_owned())
}

fn no_such_nic(topology: &Topology, name: &str) -> PlanError {
    let present: Vec<String> = topology
        .nics
        .iter()
        .flat_map(|nic| match nic.ports.as_slice() {
            [] => vec![nic.name.clone()],
            ports => ports.iter().map(|p| format!("{}:{}", nic.name, p.port)).collect(),
        })
        .collect();
    let nearest = crate::spec::nearest(name, present.iter().map(String::as_str));
    PlanError::NoSuchNic { name: name.to_owned(), present, nearest }
}
