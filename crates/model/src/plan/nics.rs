//! Which NICs UCX can use, and how far they are from the GPUs.
//!
//! Does not share them out; `pinning` does. Does not write environment variables; `ucx` does.
//!
//! *Invariant:* every NIC of the topology is either usable or refused with a reason.

use super::error::PlanError;
use super::form::Rejected;
use super::gpus::machine_name;
use crate::ids::{NicPort, is_nic_column};
use crate::topology::{
    Device, Gpu, LinkKind, LinkLayer, Links, Nic, NicKind, Note, Port, PortState, Topology,
};

/// A NIC with at least one port that can carry traffic.
#[derive(Clone, Debug)]
pub(super) struct Usable<'a> {
    /// Position in `Topology::nics`.
    pub(super) at: u32,
    pub(super) nic: &'a Nic,
    /// The best port first: by rate, then by number.
    ports: Vec<UsablePort>,
}

#[derive(Clone, Copy, Debug)]
struct UsablePort {
    /// `None` for a NIC that is only known as a column of `nvidia-smi topo -m`.
    number: Option<u32>,
    layer: Option<LinkLayer>,
    rate_gbps: Option<f64>,
}

impl Usable<'_> {
    /// The port for the `turn`-th GPU of this NIC.
    pub(super) fn port(&self, turn: usize) -> NicPort {
        let port = self.ports[turn % self.ports.len()];
        NicPort { nic: self.nic.name.clone(), port: port.number }
    }

    /// The fastest port's rate, Gbit/s; 0 when unknown.
    pub(super) fn best_rate(&self) -> f64 {
        self.ports.iter().filter_map(|port| port.rate_gbps).fold(0.0, f64::max)
    }
}

/// A NIC or port that cannot be used.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    /// Position in `Topology::nics`.
    pub(super) at: u32,
    /// The NIC or its port.
    pub(super) what: String,
    pub(super) why: String,
    pub(super) cause: Cause,
}

/// The kinds of reasons that are treated differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Its port does not carry data now.
    State,
    /// It is a software device, which is used only if the user names it.
    Software,
    /// It is a network interface, which UCX uses for TCP under that name.
    Socket,
    /// Anything else: its kind, its owner, or the user's exclusion.
    Other,
}

/// Every NIC of a machine, judged.
#[derive(Clone, Debug)]
pub(super) struct Nics<'a> {
    topology: &'a Topology,
    links: Links,
    pub(super) usable: Vec<Usable<'a>>,
    pub(super) refused: Vec<Refused>,
    /// What was assumed about the usable ones.
    pub(super) notes: Vec<Note>,
    /// Choices between NICs that an expert would question.
    pub(super) choices: Vec<Note>,
    /// Positions in `usable` of NICs that are not used because they are much slower.
    pub(super) slow: Vec<usize>,
}

/// What a GPU got.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    /// Nearest first.
    pub(super) ports: Vec<NicPort>,
    /// The reason, as an expert would say it.
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
        let mut nics = Self {
            topology,
            links,
            usable: Vec::new(),
            refused: Vec::new(),
            notes: Vec::new(),
            choices: Vec::new(),
            slow: Vec::new(),
        };
        let mut assumed = Assumed::default();
        for (at, nic) in (0u32..).zip(&topology.nics) {
            let excluded_whole = || is_excluded(&nic.name, excluded).map(|why| (why, Cause::Other));
            if let Some((why, cause)) = unusable(nic).or_else(excluded_whole) {
                nics.refused.push(Refused { at, what: nic.name.clone(), why, cause });
                continue;
            }
            let ports = nics.usable_ports(at, nic, excluded, &mut assumed);
            if !ports.is_empty() {
                nics.usable.push(Usable { at, nic, ports });
            }
        }
        nics.notes.extend(assumed.notes());
        Ok(nics)
    }

    fn usable_ports(
        &mut self,
        at: u32,
        nic: &Nic,
        excluded: &[String],
        assumed: &mut Assumed,
    ) -> Vec<UsablePort> {
        if nic.ports.is_empty() {
            let number = (!is_nic_column(&nic.name)).then_some(1);
            if number.is_some() {
                assumed.portless.push(nic.name.clone());
            }
            return vec![UsablePort { number, layer: None, rate_gbps: None }];
        }
        let mut ports = Vec::new();
        for port in &nic.ports {
            let name = format!("{}:{}", nic.name, port.port);
            let down = port_unusable(port).map(|why| (why, Cause::State));
            let refused =
                down.or_else(|| is_excluded(&name, excluded).map(|why| (why, Cause::Other)));
            match refused {
                Some((why, cause)) => {
                    self.refused.push(Refused { at, what: name, why, cause });
                }
                None => {
                    if port.state.is_none() {
                        assumed.stateless.push(name);
                    }
                    ports.push(UsablePort {
                        number: (!is_nic_column(&nic.name)).then_some(port.port),
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

    /// How a GPU and a NIC are connected; derived from NUMA nodes if the source has no link.
    pub(super) fn link(&self, gpu: &Gpu, at: u32) -> Option<LinkKind> {
        self.links.between(Device::Gpu(gpu.index), Device::Nic(at)).or_else(|| {
            let nic = self.topology.nics.get(at as usize)?;
            let same = gpu.numa? == nic.numa?;
            Some(if same { LinkKind::Node } else { LinkKind::Sys })
        })
    }

    /// Keeps one fabric, because an InfiniBand port cannot reach a RoCE port.
    ///
    /// Keeps the fabric whose NICs are nearer to the GPUs, and InfiniBand if both are equal. It is
    /// noted unless InfiniBand's NICs are nearer to every GPU, as where Ethernet is for storage.
    /// Explanations list the other NICs either way.
    pub(super) fn keep_one_fabric(&mut self, gpus: &[&Gpu]) {
        let has = |nics: &Self, layer| {
            nics.usable.iter().flat_map(|nic| &nic.ports).any(|port| port.layer == Some(layer))
        };
        let both = has(self, LinkLayer::InfiniBand) && has(self, LinkLayer::Ethernet);
        if !both {
            return;
        }
        let nearest = |gpu: &Gpu, layer: LinkLayer| {
            let on = |nic: &&Usable<'_>| {
                nic.ports.iter().any(|port| port.layer.is_none_or(|other| other == layer))
            };
            self.usable.iter().filter(on).map(|nic| level(self.link(gpu, nic.at))).min()
        };
        let distance =
            |layer: LinkLayer| -> u32 { gpus.iter().filter_map(|gpu| nearest(gpu, layer)).sum() };
        let is_nearer =
            |gpu: &&Gpu| nearest(gpu, LinkLayer::InfiniBand) < nearest(gpu, LinkLayer::Ethernet);
        let obvious = !gpus.is_empty() && gpus.iter().all(is_nearer);
        let (keep, drop) = if distance(LinkLayer::Ethernet) < distance(LinkLayer::InfiniBand) {
            (LinkLayer::Ethernet, LinkLayer::InfiniBand)
        } else {
            (LinkLayer::InfiniBand, LinkLayer::Ethernet)
        };
        let mut dropped = Vec::new();
        for nic in &mut self.usable {
            for port in nic.ports.iter().filter(|port| port.layer == Some(drop)) {
                let what = NicPort { nic: nic.nic.name.clone(), port: port.number }.to_string();
                let why = format!("{drop}, which cannot reach the {keep} ports of the others");
                dropped.push(what.clone());
                self.refused.push(Refused { at: nic.at, what, why, cause: Cause::Other });
            }
            nic.ports.retain(|port| port.layer != Some(drop));
        }
        self.usable.retain(|nic| !nic.ports.is_empty());
        if obvious {
            return;
        }
        let text = format!(
            "{} left out: {drop}, which cannot reach the {keep} ports of the others; \
             'ucx.exclude_nics' with their names says that this is meant",
            are(&dropped)
        );
        self.choices.push(Note::new("nics", text));
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
                let nearest = crate::text::nearest(name, self.names().iter().map(String::as_str));
                // RDMA ports have a number, and a name close to a NIC's is a typing error. Anything
                // else is a network device, which a topology need not list.
                if number.is_some() || (!is_netdev && nearest.is_some()) {
                    return Err(no_such_nic(self.topology, name));
                }
                devices.push(name.clone());
                continue;
            };
            let at = u32::try_from(at).unwrap_or(u32::MAX);
            let refused = self.refused.iter().find(|refused| {
                refused.at == at && (refused.what == *name || refused.what == device)
            });
            match refused {
                // UCX uses it for TCP.
                Some(Refused { cause: Cause::Socket, .. }) if number.is_none() => {
                    devices.push(name.clone());
                    continue;
                }
                // The user asked for this software device by name.
                Some(Refused { cause: Cause::Software, .. }) => {
                    ports.push(self.of_software(at, name, number)?);
                    continue;
                }
                Some(Refused { why, .. }) => {
                    return Err(PlanError::UnusableNic { name: name.clone(), why: why.clone() });
                }
                None => {}
            }
            let usable = self.usable.iter().find(|nic| nic.at == at);
            let port = match (usable, number) {
                (Some(usable), None) => Some(usable.port(0)),
                (Some(usable), Some(number)) => usable
                    .ports
                    .iter()
                    .find(|port| port.number.is_some_and(|port| port.to_string() == number))
                    .map(|port| NicPort { nic: device.to_owned(), port: port.number }),
                (None, _) => {
                    let why = self.refused.iter().find(|refused| refused.at == at);
                    let why = why.map_or_else(String::new, |refused| {
                        format!("{} {}", refused.what, refused.why)
                    });
                    return Err(PlanError::UnusableNic { name: name.clone(), why });
                }
            };
            ports.push(port.ok_or_else(|| no_such_nic(self.topology, name))?);
        }
        Ok((ports, devices))
    }

    /// The port of a software device that the user names.
    fn of_software(&self, at: u32, name: &str, number: Option<&str>) -> Result<NicPort, PlanError> {
        let missing = || no_such_nic(self.topology, name);
        let nic = self.topology.nics.get(at as usize).ok_or_else(missing)?;
        let fits = |port: &&Port| number.is_none_or(|number| port.port.to_string() == number);
        match nic.ports.iter().find(fits) {
            Some(port) => match port_unusable(port) {
                Some(why) => Err(PlanError::UnusableNic { name: name.to_owned(), why }),
                None => Ok(NicPort { nic: nic.name.clone(), port: Some(port.port) }),
            },
            None if nic.ports.is_empty() && number.is_none_or(|number| number == "1") => {
                Ok(NicPort { nic: nic.name.clone(), port: Some(1) })
            }
            None => Err(missing()),
        }
    }

    /// Usable NICs with a DMA function of which nobody tells where it is.
    pub(super) fn untold(&self) -> Vec<String> {
        let untold = self.usable.iter().filter(|usable| usable.nic.dma_is_untold());
        untold.map(|usable| usable.nic.name.clone()).collect()
    }

    /// How a GPU and a NIC are connected, in words.
    pub(super) fn way(&self, gpu: &Gpu, at: u32) -> String {
        let link = self.link(gpu, at);
        let near = link.is_some_and(|kind| kind <= LinkKind::Phb);
        let nic = self.topology.nics.get(at as usize).filter(|_| near);
        let dma = nic.and_then(|nic| nic.dma.as_ref()?.pci);
        let dma = dma.map_or_else(String::new, |pci| format!(" by its DMA function {pci}"));
        format!("{}{dma}", link_word(link))
    }

    /// The error of a mode that needs a NIC if none is usable.
    pub(super) fn none(&self, mode: &str) -> PlanError {
        PlanError::NoNic {
            mode: mode.to_owned(),
            machine: machine_name(self.topology),
            rejected: self.refusals(),
        }
    }

    /// Every NIC that cannot be used, with its reason.
    pub(super) fn refusals(&self) -> Vec<String> {
        self.refused.iter().map(|refused| format!("{}: {}", refused.what, refused.why)).collect()
    }

    fn names(&self) -> Vec<String> {
        self.topology.nics.iter().map(|nic| nic.name.clone()).collect()
    }
}

/// A link as a number, nearest first; unknown is farther than any.
pub(super) fn level(link: Option<LinkKind>) -> u32 {
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

pub(super) fn link_word(link: Option<LinkKind>) -> String {
    link.map_or_else(|| "distance unknown".to_owned(), |kind| kind.to_string())
}

/// Assumptions about ports; one note for each kind.
#[derive(Default)]
struct Assumed {
    portless: Vec<String>,
    stateless: Vec<String>,
}

impl Assumed {
    fn notes(self) -> impl Iterator<Item = Note> {
        let about = |names: &[String]| match names {
            [one] => one.clone(),
            _ => "nics".to_owned(),
        };
        let of = |names: &[String], what: &str| match names.len() {
            0 | 1 => what.to_owned(),
            _ => format!("{what} (of {})", names.join(", ")),
        };
        let portless = (!self.portless.is_empty()).then(|| {
            let what = of(&self.portless, "the source tells nothing about the ports");
            let text = format!("{what}: port 1 is taken to be active");
            Note::new(about(&self.portless), text)
        });
        let stateless = (!self.stateless.is_empty()).then(|| {
            let what = of(&self.stateless, "the source tells no state");
            Note::new(about(&self.stateless), format!("{what}: taken to be active"))
        });
        portless.into_iter().chain(stateless)
    }
}

/// Names with their verb: `a, b are`, `a is`.
pub(super) fn are(names: &[String]) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(", "))
}

fn unusable(nic: &Nic) -> Option<(String, Cause)> {
    let (why, cause) = match nic.kind {
        NicKind::Physical | NicKind::Bond => return None,
        NicKind::VirtualFunction => {
            ("it is a virtual function of a NIC that is here", Cause::Other)
        }
        NicKind::BondSlave => ("it belongs to a bond and cannot be used by itself", Cause::Other),
        NicKind::SwitchManager => {
            ("it is the baseboard's way to its NVSwitches and leads to no network", Cause::Other)
        }
        NicKind::Software => {
            ("it is software without RDMA hardware, to be used only by name", Cause::Software)
        }
        NicKind::Socket => ("it is a network interface, no RDMA device", Cause::Socket),
    };
    Some((why.to_owned(), cause))
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
    let nearest = crate::text::nearest(name, present.iter().map(String::as_str));
    PlanError::NoSuchNic { name: name.to_owned(), present, nearest }
}
