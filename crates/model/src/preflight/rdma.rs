//! RDMA adapters: ports, their speed and addresses, their files, and GPUDirect.
//!
//! *Invariant:* a port that no worker uses, or would have used, is not blamed.

use super::evidence::{DeviceFile, Look};
use super::scene::{Found, Report, Scene, counted, listed};
use super::{Check, Cost, Severity};
use crate::topology::{Gpu, LinkKind, LinkLayer, Nic, NicKind, Port, PortState};
use crate::units::HumanBytes;

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "rdma-ports",
        title: "RDMA adapters with an active port",
        looks_at: "state of each port in sysfs",
        consequence: "everything between machines goes over TCP",
        source: "rdma-core, ibstat",
        remedy: "see ibstat: a down port needs a cable, INIT a subnet manager",
        cost: Cost::Hands,
        minor: false,
        judge: Some(active),
    },
    Check {
        id: "rdma-nearest",
        title: "the NIC nearest to each GPU",
        looks_at: "state of the ports of each GPU's nearest adapter, against the one that is planned",
        consequence: "the GPU's traffic takes a longer path, and shares another GPU's NIC",
        source: "NVIDIA/NVSentinel#642, sgl-project/sglang#3685",
        remedy: "ibstat ADAPTER: Polling is the cable or the switch's port, Disabled \
                 is a setting",
        cost: Cost::Hands,
        minor: false,
        judge: Some(nearest),
    },
    Check {
        id: "rdma-rate",
        title: "rates of ports against siblings",
        looks_at: "rate of each used port in sysfs",
        consequence: "the slowest port decides the speed of all",
        source: "Azure's and OCI's node health checks",
        remedy: "a cable or a switch's port of the full rate; mlxlink says what was negotiated",
        cost: Cost::Hands,
        minor: false,
        judge: Some(rate),
    },
    Check {
        id: "rdma-gid",
        title: "addresses of RoCE ports",
        looks_at: "gids of each used port in sysfs",
        consequence: "connections over the port cannot be made",
        source: "rdma-core, show_gids; RoCE needs an IP address on the port's interface",
        remedy: "give the port's network interface an address",
        cost: Cost::Root,
        minor: false,
        judge: Some(gid),
    },
    Check {
        id: "rdma-files",
        title: "leave to use RDMA adapters",
        looks_at: "access to /dev/infiniband/uverbsN of each used adapter",
        consequence: "UCX does not see the adapter, and goes over TCP without a word",
        source: "rdma-core, Documentation/udev.md",
        remedy: "in a container --device=/dev/infiniband; otherwise the file's permissions",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(files),
    },
    Check {
        id: "gpudirect-rdma",
        title: "GPUDirect RDMA",
        looks_at: "who has registered in /sys/kernel/mm/memory_peers (that nvidia_peermem is loaded \
                   says nothing), the kernel module's kind and the kernel's version for dma-buf",
        consequence: "GPU memory goes through host memory to every NIC: about half the bandwidth",
        source: "NVIDIA/nccl#778, #1579; Mellanox/nv_peer_memory#101",
        remedy: "modprobe nvidia_peermem, after MLNX_OFED or DOCA; or, which ends all jobs, the \
                 open kernel modules on Linux 5.12 or newer",
        cost: Cost::Root,
        minor: false,
        judge: Some(gpudirect),
    },
    Check {
        id: "bar1",
        title: "the window onto GPU memory",
        looks_at: "nvmlDeviceGetBAR1MemoryInfo against the GPU's memory",
        consequence: "adapters reach only so much of the GPU's memory at once; registering more \
                      fails",
        source: "NVIDIA, GPUDirect RDMA, 'BAR sizes'",
        remedy: "Resizable BAR and 'Above 4G decoding' in the firmware; displaymodeselector for \
                 some cards",
        cost: Cost::Restart,
        minor: false,
        judge: Some(bar1),
    },
    Check {
        id: "rdma-flaps",
        title: "links that went down",
        looks_at: "link_downed of each used port: a number without a time",
        consequence: "only if it grows: look again in an hour",
        source: "rdma-core, perfquery",
        remedy: "a cable or a transceiver, if it grows",
        cost: Cost::Hands,
        minor: true,
        judge: Some(flaps),
    },
];

/// Adapters that are hardware of their own.
fn cards<'a>(scene: &Scene<'a>) -> impl Iterator<Item = &'a Nic> {
    let nics = scene.topology.nics.iter();
    nics.filter(|nic| matches!(nic.kind, NicKind::Physical | NicKind::Bond))
}

fn is_up(nic: &Nic) -> bool {
    nic.ports.iter().any(|port| port.state == Some(PortState::Active))
}

fn active(scene: &Scene<'_>, report: &mut Report) {
    let all: Vec<&Nic> = cards(scene).filter(|nic| !nic.ports.is_empty()).collect();
    let up = all.iter().filter(|nic| is_up(nic)).count();
    match (all.len(), up) {
        (0, _) => {}
        (count, 0) => {
            let text = format!("{}, and no active port", counted(count, "adapter"));
            let states = all.iter().flat_map(|nic| &nic.ports).filter_map(|port| port.state);
            let states: Vec<String> = states.map(|state| state.to_string()).collect();
            let states: Vec<&str> = states.iter().map(String::as_str).collect();
            report.push(Found::warning(text).saw("ports/*/state", listed(&states)));
        }
        (count, up) => {
            report.ok(format!("{}, {up} with an active port", counted(count, "adapter")))
        }
    }
}

/// The name of a port as UCX has it.
fn name(nic: &Nic, port: &Port) -> String {
    format!("{}:{}", nic.name, port.port)
}

fn nearest(scene: &Scene<'_>, report: &mut Report) {
    if scene.plan.is_none() || !scene.moves_by_rdma() {
        return;
    }
    let mut well = 0;
    for gpu in scene.gpus() {
        let planned = scene.workers_on(gpu);
        let Some(worker) = scene
            .plan
            .into_iter()
            .flat_map(|plan| &plan.workers)
            .find(|worker| planned.contains(&worker.name) && !worker.nics.is_empty())
        else {
            continue;
        };
        match nearer(scene, gpu, &worker.nics[0].nic) {
            None => well += 1,
            Some((nic, state, kind)) => {
                let text = format!(
                    "its nearest adapter {nic} ({kind}) is {state}, so it uses {}",
                    worker.nics[0]
                );
                let found = Found::warning(text).saw(format!("{nic}/ports/*/state"), state);
                let found = found.with("ADAPTER", nic);
                report.push(scene.of_gpu(gpu, found));
            }
        }
    }
    report.settle(well, "GPU", "the nearest adapters are up", Vec::new());
}

/// An adapter that is down and nearer to a GPU than its own.
fn nearer(scene: &Scene<'_>, gpu: &Gpu, own: &str) -> Option<(String, String, LinkKind)> {
    let nics = || scene.topology.nics.iter().enumerate();
    let distance = |at: usize| scene.link_to_nic(gpu, at);
    let own = nics().find(|(_, nic)| nic.name == own).and_then(|(at, _)| distance(at))?;
    let down = nics().filter(|(_, nic)| nic.kind == NicKind::Physical && !is_up(nic));
    let near = down.filter_map(|(at, nic)| Some((nic, distance(at).filter(|kind| *kind < own)?)));
    let (nic, kind) = near.min_by_key(|(_, kind)| *kind)?;
    let state = nic.ports.iter().find_map(|port| port.state)?;
    Some((nic.name.clone(), state.to_string(), kind))
}

fn rate(scene: &Scene<'_>, report: &mut Report) {
    let ports = scene.ports();
    let rates = |layer: Option<LinkLayer>| {
        ports
            .iter()
            .filter(move |(_, port)| port.link_layer == layer)
            .filter_map(|(_, p)| p.rate_gbps)
    };
    let mut well = 0;
    for (nic, port) in &ports {
        let Some(own) = port.rate_gbps else { continue };
        let most = rates(port.link_layer).fold(own, f64::max);
        // Without a plan the slower ones may be there for something else.
        if own >= most || scene.plan.is_none() {
            well += 1;
            continue;
        }
        let found = Found::warning(format!("it has {own} Gb/s, and its siblings {most}"));
        let found = found.about(name(nic, port)).concerns(scene.workers_of_nic(nic));
        report.push(found.saw("rate", format!("{own} Gb/sec")));
    }
    report.settle(well, "port", "rates as their siblings'", Vec::new());
}

fn gid(scene: &Scene<'_>, report: &mut Report) {
    let (mut well, mut unseen) = (0, Vec::new());
    for (nic, port) in scene.ports() {
        let Some(seen) = scene.evidence.ports.get(&name(nic, port)) else { continue };
        if port.link_layer != Some(LinkLayer::Ethernet) {
            continue;
        }
        match &seen.gids {
            Look::Seen(gids) if gids.is_empty() => {
                let found = Found::error("it has no address (GID)").about(name(nic, port));
                report.push(found.saw("gids", "all zero").concerns(scene.workers_of_nic(nic)));
            }
            Look::Seen(_) => well += 1,
            Look::Unseen(why) => unseen.push((name(nic, port), why.clone())),
            Look::NotThere => {}
        }
    }
    report.settle(well, "port", "with addresses", unseen);
}

fn files(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for (nic, port) in scene.ports() {
        let Some(seen) = scene.evidence.ports.get(&name(nic, port)) else { continue };
        let why = match &seen.file {
            Look::Seen(DeviceFile::Usable) => {
                well += 1;
                continue;
            }
            Look::Seen(DeviceFile::Missing) => "its device file is missing".to_owned(),
            Look::Seen(DeviceFile::Refused(why)) => format!("its device file is refused: {why}"),
            Look::NotThere | Look::Unseen(_) => continue,
        };
        let found = Found::error(why.clone()).about(name(nic, port)).saw("access", why);
        let found = found.concerns(scene.workers_of_nic(nic));
        // Without a plan nobody has asked for it.
        let most = if scene.plan.is_some() { Severity::Error } else { Severity::Warning };
        report.push(found.at_most(most));
    }
    report.settle(well, "port", "usable by this process", Vec::new());
}

/// Linux's first version with dma-buf in RDMA.
const DMA_BUF_SINCE: (u32, u32) = (5, 12);

fn has_dma_buf(kernel: &str) -> Option<bool> {
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit());
    let version = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    Some(version >= DMA_BUF_SINCE)
}

fn gpudirect(scene: &Scene<'_>, report: &mut Report) {
    if !scene.moves_by_rdma() || scene.topology.driver.is_none() {
        return;
    }
    let driver = &scene.evidence.driver;
    let peers = match &driver.memory_peers {
        Look::Seen(all) => Some(!all.is_empty()),
        Look::NotThere => Some(false),
        Look::Unseen(_) => None,
    };
    let kernel = scene.evidence.system.kernel.as_deref();
    let dma_buf = match (&driver.open, kernel.and_then(has_dma_buf)) {
        (Look::Seen(false), _) | (_, Some(false)) => Some(false),
        (Look::Seen(true), Some(true)) => Some(true),
        _ => None,
    };
    match (peers, dma_buf) {
        (Some(true), _) => report.ok("nvidia_peermem is registered"),
        (_, Some(true)) => report.ok("dma-buf: open kernel modules"),
        (Some(false), Some(false)) => {
            let loaded = driver.peermem.seen() == Some(&true);
            let text = match loaded {
                true => {
                    "nvidia_peermem is loaded, but not registered with the RDMA drivers, and there \
                     is no dma-buf"
                }
                false => "nvidia_peermem is not loaded, and there is no dma-buf",
            };
            let kind = if driver.open.seen() == Some(&true) { "open" } else { "proprietary" };
            let found = Found::warning(text)
                .saw("/sys/kernel/mm/memory_peers", "nobody")
                .saw("kernel module", kind)
                .saw("kernel", kernel.unwrap_or("unknown"));
            let found = found.concerns(scene.workers(|worker| !worker.nics.is_empty()));
            report.push(match loaded {
                true => found.remedy(
                    "modprobe -r nvidia_peermem, then modprobe nvidia_peermem, after MLNX_OFED or \
                     DOCA; if it is not registered even then, the driver was built without them: \
                     build it again, or take the open kernel modules on Linux 5.12 or newer, which \
                     ends all jobs",
                ),
                false => found,
            });
        }
        _ => report.cannot_tell("the kernel module's kind cannot be seen"),
    }
}

fn bar1(scene: &Scene<'_>, report: &mut Report) {
    if !scene.moves_by_rdma() {
        return;
    }
    let mut well = 0;
    for gpu in scene.gpus() {
        let (Some(window), Some(memory)) = (gpu.bar1_bytes, gpu.memory_bytes) else { continue };
        // What NVML counts as memory is less than what is there.
        if window >= memory / 10 * 9 {
            well += 1;
            continue;
        }
        let text = format!("{} of {} can be reached", HumanBytes(window), HumanBytes(memory));
        let found = Found::warning(text).saw("nvmlDeviceGetBAR1MemoryInfo", HumanBytes(window));
        report.push(scene.of_gpu(gpu, found));
    }
    report.settle(well, "GPU", "windows onto all of their memory", Vec::new());
}

fn flaps(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for (nic, port) in scene.ports() {
        let Some(seen) = scene.evidence.ports.get(&name(nic, port)) else { continue };
        match &seen.link_downed {
            Look::Seen(0) => well += 1,
            Look::Seen(times) => {
                let text = format!(
                    "its link went down {} since the driver was loaded",
                    counted(times, "time")
                );
                let found = Found::note(text).about(name(nic, port));
                report.push(found.saw("counters/link_downed", times));
            }
            Look::NotThere | Look::Unseen(_) => {}
        }
    }
    report.settle(well, "port", "links that never went down", Vec::new());
}
