//! Network devices for each worker: applies the user's request to the machine's NICs.
//!
//! Does not judge NICs; `nics` does.
//!
//! *Invariant:* if `UCX_NET_DEVICES` is set, it ends with the device for connection setup.

use std::collections::{BTreeMap, BTreeSet};

use super::context::{Context, Slot};
use super::error::PlanError;
use super::form::Why;
use super::nics::{Given, Nics};
use super::ucx::needs_loopback_alone;
use super::variables::{NET_DEVICES, connects, is_used};
use crate::ids::{GpuIndex, NicPort, is_elastic};
use crate::spec::{EngineKind, NetDevices, UcxCompat, UcxVersion, Variables};
use crate::topology::{Nic, NicKind, Note};

/// UCX's first version that uses DMA functions (its NEWS: "Enabled Direct NIC by default").
const DMA_SINCE: UcxVersion = UcxVersion { major: 1, minor: 20 };

/// The NICs and network devices of one worker.
#[derive(Clone, Debug)]
pub(super) struct NicShare {
    /// Nearest first; empty if UCX chooses.
    pub(super) ports: Vec<NicPort>,
    /// Value of `UCX_NET_DEVICES`; `None` leaves it unset.
    pub(super) devices: Option<String>,
    /// Whether the NICs are this program's choice.
    assigned: bool,
    /// Whether they would have been, if it were known where their DMA functions are.
    undecided: bool,
    pub(super) why: Why,
}

/// The network of all workers.
#[derive(Clone, Debug)]
pub(super) struct Network {
    /// One entry for each worker, in rank order.
    pub(super) shares: Vec<NicShare>,
    /// Whether any RDMA port can be used.
    pub(super) rdma: bool,
}

/// Shares NICs out.
pub(super) fn share(context: &Context<'_>, notes: &mut Vec<Note>) -> Result<Network, PlanError> {
    let ucx = &context.spec.ucx;
    let excluded = ucx.exclude_nics.clone().unwrap_or_default();
    let mut nics = Nics::judge(context.topology, &excluded)?;
    let gpus = context.gpus();
    nics.keep_one_fabric(&gpus);
    nics.weigh(&gpus);
    if ucx.infiniband == Some(true) && nics.usable.is_empty() {
        let mut text = "asked for, but no InfiniBand or RoCE port can be used".to_owned();
        let refusals = nics.refusals();
        if !refusals.is_empty() {
            text.push_str(&format!(" ({})", refusals.join("; ")));
        }
        notes.push(Note::new("ucx.infiniband", text));
    }
    let can_assign = !nics.usable.is_empty() && !gpus.is_empty();
    let sharing = Sharing {
        context,
        control: control_device(context, notes),
        pinned: if can_assign { nics.pin(&gpus) } else { BTreeMap::new() },
        striped: if can_assign { nics.stripe(&gpus) } else { BTreeMap::new() },
        nics,
    };
    let shares: Result<Vec<NicShare>, PlanError> =
        (0u32..).zip(context.slots).map(|(rank, slot)| sharing.of(rank, slot)).collect();
    let shares = shares?;
    if shares.iter().any(|share| !share.ports.is_empty()) {
        notes.extend(sharing.nics.notes.iter().cloned());
        names_that_ucx_cannot_know(&shares, notes);
    }
    if shares.iter().any(|share| share.assigned) {
        notes.extend(sharing.nics.choices.iter().cloned());
    }
    notes.extend(unused_control_device(context, &shares));
    notes.extend(dma_functions(&sharing, &shares));
    // A software device is usable for who names it, and whoever sets the variable names a port.
    let named = |share: &NicShare| share.devices.as_ref().is_some_and(|all| all.contains(':'));
    let rdma = !sharing.nics.usable.is_empty() || shares.iter().any(named);
    Ok(Network { shares, rdma })
}

/// Notes NICs that are left to UCX because nobody tells where their DMA functions are, and DMA
/// functions that this UCX does not use.
fn dma_functions(sharing: &Sharing<'_>, shares: &[NicShare]) -> Option<Note> {
    let context = sharing.context;
    if shares.iter().any(|share| share.undecided) {
        let names = sharing.nics.untold().join(", ");
        let text = format!(
            "nobody tells which DMA functions beside the GPUs are those of {names}, so nothing is \
             pinned: UCX finds them itself from {DMA_SINCE} on; 'ucx.net_devices' can name NICs"
        );
        return Some(Note::new("nics", text));
    }
    let version = context.spec.ucx.version.or(context.caller.ucx_version);
    let older = version.filter(|version| *version < DMA_SINCE)?;
    let pinned = |nic: &&Nic| {
        nic.dma.is_some() && shares.iter().flat_map(|s| &s.ports).any(|port| port.nic == nic.name)
    };
    let names = context.topology.nics.iter().filter(pinned).map(|nic| nic.name.as_str());
    let names: Vec<&str> = names.collect();
    let text = format!(
        "UCX {older} does not use the DMA functions of {} ({DMA_SINCE} does): what goes to GPUs \
         goes through the CPU",
        names.join(", ")
    );
    (!names.is_empty()).then(|| Note::new("nics", text))
}

/// Notes a control device that no worker's list of devices has.
fn unused_control_device(context: &Context<'_>, shares: &[NicShare]) -> Option<Note> {
    let asked = context.spec.ucx.control_device.as_ref()?;
    // Where UCX or its list is not used at all, that is noted elsewhere.
    if !is_used(context.spec, context.engine) || context.engine == EngineKind::Command {
        return None;
    }
    let lists = shares.iter().filter_map(|share| share.devices.as_deref());
    let mut lists: BTreeSet<&str> = lists.collect();
    if lists.iter().any(|list| list.split(',').any(|one| one == asked)) {
        return None;
    }
    let text = match lists.pop_first() {
        Some(list) => format!("ignored: the workers' devices are {list}"),
        None => "ignored: UCX chooses among all devices, so that none is named".to_owned(),
    };
    Some(Note::new("ucx.control_device", format!("{text}; 'ucx.net_devices' names them")))
}

/// Elastic Fabric Adapters among the NICs in use, by name, and whether there are others.
///
/// If none is pinned, all NICs of the machine count.
pub(super) fn elastic(context: &Context<'_>, shares: &[NicShare]) -> (Vec<String>, bool) {
    let mut used: BTreeSet<&str> =
        shares.iter().flat_map(|share| &share.ports).map(|port| port.nic.as_str()).collect();
    if used.is_empty() {
        let hardware = |nic: &&Nic| matches!(nic.kind, NicKind::Physical | NicKind::Bond);
        used = context.topology.nics.iter().filter(hardware).map(|nic| nic.name.as_str()).collect();
    }
    let (elastic, others): (Vec<&str>, Vec<&str>) =
        used.into_iter().partition(|nic| is_elastic(nic));
    (elastic.into_iter().map(str::to_owned).collect(), !others.is_empty())
}

/// `UCX_NET_DEVICES` for processes that talk to every worker: scheduler and clients.
pub(super) fn everywhere(context: &Context<'_>, shares: &[NicShare]) -> Option<String> {
    if let Some(value) = set_elsewhere(context) {
        return Some(value.0);
    }
    let mut all: Vec<&str> = Vec::new();
    for device in shares.iter().filter_map(|share| share.devices.as_deref()) {
        for name in device.split(',') {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    // The control device goes last, as it does for the workers.
    let control =
        shares.iter().filter_map(|share| share.devices.as_deref()?.rsplit(',').next()).next();
    all.retain(|name| Some(*name) != control);
    all.extend(control);
    (!all.is_empty()).then(|| all.join(","))
}

/// A value from the caller's environment or from `ucx.env`, with who set it.
fn set_elsewhere(context: &Context<'_>) -> Option<(String, &'static str)> {
    let caller = context.caller.variables.get(NET_DEVICES);
    let caller = caller.map(|value| (value.clone(), "set in the caller's environment, which wins"));
    let spec = || context.spec.ucx.env.as_ref()?.get(NET_DEVICES);
    caller.or_else(|| spec().map(|value| (value.clone(), "set by 'ucx.env'")))
}

/// The network device for connection setup.
fn control_device(context: &Context<'_>, notes: &mut Vec<Note>) -> String {
    if let Some(device) = &context.spec.ucx.control_device {
        return device.clone();
    }
    let scheduler = &context.spec.scheduler;
    if let Some(interface) = &scheduler.interface {
        return interface.clone();
    }
    let joins = context.spec.dask.join.is_some();
    let local = match context.engine {
        EngineKind::Native => true,
        EngineKind::Dask => scheduler.host.is_none() && !joins,
        // All ranks of a simulated machine are on this one, whose network its file can't know.
        EngineKind::Command => context.spec.simulate == Some(true),
    };
    if local {
        return "lo".to_owned();
    }
    // A worker that joins a Dask scheduler is reached at the address that faces the scheduler.
    let interfaces = &context.caller.interfaces;
    let address = scheduler.host.as_ref().and_then(|host| host.parse().ok());
    let of_host = interfaces.iter().find(|i| address.is_some_and(|a| i.addresses.contains(&a)));
    let main = || interfaces.iter().find(|interface| interface.main);
    match of_host.or_else(main) {
        Some(interface) => interface.name.clone(),
        None => {
            if connects(context.spec, context.engine) {
                let text = "the interface of the announced address is unknown: 'lo' is assumed";
                notes.push(Note::new("ucx.control_device", text));
            }
            "lo".to_owned()
        }
    }
}

struct Sharing<'a> {
    context: &'a Context<'a>,
    control: String,
    nics: Nics<'a>,
    pinned: BTreeMap<GpuIndex, Given>,
    striped: BTreeMap<GpuIndex, Given>,
}

impl Sharing<'_> {
    fn of(&self, rank: u32, slot: &Slot<'_>) -> Result<NicShare, PlanError> {
        let spec = self.context.spec;
        if let Some((value, reason)) = set_elsewhere(self.context) {
            return Ok(unpinned(Some(value), reason));
        }
        if !is_used(spec, self.context.engine) {
            return Ok(unpinned(None, "UCX is not used, so the choice would have no effect"));
        }
        let overridden = slot.overridden(|one| one.net_devices.as_ref());
        let asked = overridden.or(spec.ucx.net_devices.as_ref());
        let mode = asked.cloned().unwrap_or_default();
        match &mode {
            NetDevices::None => Ok(unpinned(None, "asked to leave the choice to UCX")),
            NetDevices::Auto if spec.ucx.compat == Some(UcxCompat::Dask) => {
                Ok(unpinned(None, "dask-cuda never sets it ('ucx.compat: dask')"))
            }
            NetDevices::Auto
                if needs_loopback_alone(
                    spec,
                    self.context.engine,
                    !self.nics.usable.is_empty(),
                ) =>
            {
                let reason = "all workers are on this machine: TCP stays where no network reaches";
                Ok(unpinned(Some("lo".to_owned()), reason))
            }
            NetDevices::Auto if spec.ucx.infiniband != Some(true) => {
                Ok(unpinned(None, "InfiniBand is not asked for: UCX chooses"))
            }
            NetDevices::Auto if self.nics.usable.is_empty() => {
                Ok(unpinned(None, "there is no usable NIC to pin: UCX chooses"))
            }
            NetDevices::Auto | NetDevices::Pin => self.assigned(slot, &self.pinned, &mode),
            NetDevices::Stripe => self.assigned(slot, &self.striped, &mode),
            NetDevices::List(names) if overridden.is_some() => {
                self.listed(names, "for this worker")
            }
            NetDevices::List(names) => self.listed(names, "the same list for every worker"),
            NetDevices::Template(template) => {
                let numbers = Variables {
                    gpu: slot.chosen.map_or(0, |chosen| chosen.gpu.index.0),
                    rank,
                    numa: slot.chosen.and_then(|chosen| chosen.gpu.numa).map(|numa| numa.0),
                };
                let filled = template.fill(numbers);
                let filled = filled.map_err(|problem| PlanError::Template {
                    worker: slot.name.clone(),
                    problem,
                })?;
                let names: Vec<String> = filled.split(',').map(str::to_owned).collect();
                self.listed(&names, &format!("the template {template} filled in"))
            }
        }
    }

    fn assigned(
        &self,
        slot: &Slot<'_>,
        given: &BTreeMap<GpuIndex, Given>,
        mode: &NetDevices,
    ) -> Result<NicShare, PlanError> {
        if self.nics.usable.is_empty() {
            return Err(self.nics.none(&mode.to_string()));
        }
        // The NIC beside a GPU may be any of them, and UCX finds it itself: a wrong choice would
        // take that away.
        let untold = self.nics.untold();
        if !untold.is_empty() {
            let names = untold.join(", ");
            let reason =
                format!("nobody tells where the DMA functions of {names} are: UCX chooses");
            return Ok(NicShare { undecided: true, ..unpinned(None, &reason) });
        }
        let Some(given) = slot.chosen.and_then(|chosen| given.get(&chosen.gpu.index)) else {
            return Ok(unpinned(None, "it has no GPU that a NIC could be near to: UCX chooses"));
        };
        Ok(NicShare {
            devices: self.value(&given.ports, &[]),
            why: Why {
                choice: "nic".to_owned(),
                chosen: join(&given.ports),
                reason: given.reason.clone(),
                rejected: given.rejected.clone(),
            },
            ports: given.ports.clone(),
            assigned: true,
            undecided: false,
        })
    }

    fn listed(&self, names: &[String], reason: &str) -> Result<NicShare, PlanError> {
        let (ports, others) = self.nics.named(names)?;
        Ok(NicShare {
            devices: self.value(&ports, &others),
            why: Why {
                choice: "nic".to_owned(),
                chosen: names.join(","),
                reason: format!("named by the user: {reason}"),
                rejected: Vec::new(),
            },
            ports,
            assigned: false,
            undecided: false,
        })
    }

    /// The variable's value: NIC ports that UCX can know, other devices, the control device.
    fn value(&self, ports: &[NicPort], others: &[String]) -> Option<String> {
        let known: Vec<String> = ports
            .iter()
            .filter(|port| port.port.is_some())
            .map(ToString::to_string)
            .chain(others.iter().cloned())
            .collect();
        if known.is_empty() {
            return None;
        }
        let mut devices = known;
        if !devices.contains(&self.control) {
            devices.push(self.control.clone());
        }
        Some(devices.join(","))
    }
}

/// Notes NICs whose device names are unknown.
fn names_that_ucx_cannot_know(shares: &[NicShare], notes: &mut Vec<Note>) {
    let ports = shares.iter().flat_map(|share| &share.ports).filter(|port| port.port.is_none());
    let names: Vec<&str> =
        ports.map(|port| port.nic.as_str()).collect::<BTreeSet<_>>().into_iter().collect();
    if !names.is_empty() {
        let text = format!(
            "the source names {} by matrix column only, so {NET_DEVICES} cannot name them and UCX \
             chooses",
            names.join(", ")
        );
        notes.push(Note::new("nics", text));
    }
}

fn unpinned(devices: Option<String>, reason: &str) -> NicShare {
    NicShare {
        ports: Vec::new(),
        why: Why {
            choice: "nic".to_owned(),
            chosen: devices.clone().unwrap_or_else(|| "left to UCX".to_owned()),
            reason: reason.to_owned(),
            rejected: Vec::new(),
        },
        devices,
        assigned: false,
        undecided: false,
    }
}

fn join(ports: &[NicPort]) -> String {
    let names: Vec<String> = ports.iter().map(ToString::to_string).collect();
    names.join(",")
}
