//! NVLink: the fabric of machines with NVSwitches, links against their siblings, peer access.
//!
//! *Invariant:* what the fabric's manager does is judged by its result, never by a service that
//! runs.

use std::collections::BTreeSet;

use super::evidence::Look;
use super::scene::{Found, Pair, Report, Scene, counted, listed};
use super::{Check, Cost};
use crate::topology::{FabricState, Gpu};

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "fabric-state",
        title: "registration with the NVLink fabric",
        looks_at: "nvmlDeviceGetGpuFabricInfoV: state, status and health of each GPU",
        consequence: "links are up, but no GPU reaches another over them, and CUDA may fail with \
                      802 (system not yet initialized)",
        source: "NVIDIA, Fabric Manager user guide; dstackai/dstack#1167, Azure/azhpc-images#506",
        remedy: "systemctl enable nvidia-fabricmanager, of the driver's own version, and restart \
                 it (journalctl -u nvidia-fabricmanager says why it ended), until nvidia-smi -q says \
                 'Completed'",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(state),
    },
    Check {
        id: "subnet-manager",
        title: "the subnet manager of HGX B200",
        looks_at: "processes called nvlsm, where the fabric is not whole",
        consequence: "the fabric manager of a B200 machine waits for it",
        source: "NVIDIA, Fabric Manager user guide, 'NVLSM'",
        remedy: "install nvlsm, load ib_umad, and restart nvidia-fabricmanager",
        cost: Cost::Root,
        minor: false,
        judge: Some(subnet_manager),
    },
    Check {
        id: "fabric-clique",
        title: "one clique of the NVLink fabric",
        looks_at: "clique and cluster UUID of each GPU (a clique's number alone says nothing)",
        consequence: "GPUs of different cliques do not reach each other over NVLink",
        source: "nvml.h, nvmlGpuFabricInfo_t; meta-pytorch/torchcomms#3612",
        remedy: "put the GPUs into one partition of the fabric (Fabric Manager, or the tenant's \
                 configuration)",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(clique),
    },
    Check {
        id: "nvlink-peers",
        title: "peer access over NVLinks",
        looks_at: "nvmlDeviceGetP2PStatus of each pair that NVLinks join",
        consequence: "the pair goes through host memory, although its links are up",
        source: "NVIDIA, Fabric Manager user guide; NVIDIA/nvtrust#22 for confidential computing",
        remedy: "nvidia-smi topo -p2p r shows the same; with confidential computing it stays so",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(peers),
    },
    Check {
        id: "nvlinks-down",
        title: "NVLinks against siblings",
        looks_at: "active NVLinks of each GPU, against GPUs of the same model; a card without a \
                   bridge has none, and that is well",
        consequence: "the pair with fewer links has so much less bandwidth, and everybody waits \
                      for it",
        source: "leptonai/gpud#1085, NVIDIA/nccl#2329",
        remedy: "dmesg | grep -i nvlink; nvidia-smi nvlink -s; reset the GPU, then the baseboard",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(down),
    },
    Check {
        id: "nvlink-speed",
        title: "speed of NVLinks against siblings",
        looks_at: "the speed of each active NVLink, against GPUs of the same model",
        consequence: "the slowest link decides the speed of all",
        source: "nvml.h, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON",
        remedy: "reset the GPUs together; then ask the vendor",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(speed),
    },
    Check {
        id: "imex",
        title: "channels between trays (IMEX)",
        looks_at: "/dev/nvidia-caps-imex-channels, where GPUs are in a fabric over several machines",
        consequence: "memory cannot be shared with other machines of the rack; on this one nothing \
                      is missing",
        source: "NVIDIA, IMEX service guide",
        remedy: "nvidia-imex, and NVreg_CreateImexChannel0=1 of the kernel module",
        cost: Cost::Root,
        minor: true,
        judge: Some(imex),
    },
];

/// Used GPUs with a registration.
fn registered<'a>(scene: &Scene<'a>) -> impl Iterator<Item = &'a Gpu> {
    scene.topology.gpus.iter().filter(|gpu| gpu.fabric.is_some())
}

/// Whether a service runs; `None` if processes of the machine cannot be seen.
fn runs(scene: &Scene<'_>, name: &str) -> Option<bool> {
    scene.evidence.services.seen().map(|all| all.iter().any(|one| one == name))
}

fn state(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for gpu in registered(scene) {
        let Some(fabric) = &gpu.fabric else { continue };
        let Some(problem) = fabric.problem() else {
            well += 1;
            continue;
        };
        let manager = match runs(scene, "nv-fabricmanage") {
            Some(true) => "runs",
            Some(false) => "does not run",
            None => "cannot be seen from here",
        };
        let said = format!("{:?}, clique {}", fabric.state, fabric.clique);
        let alone = scene.gpus().len() < 2;
        let found = Found::error(problem)
            .saw("nvmlDeviceGetGpuFabricInfoV", said)
            .saw("process nv-fabricmanager", manager);
        let found = scene.of_gpu(gpu, found);
        report.push(if alone { found.at_most(super::Severity::Note) } else { found });
    }
    report.settle(well, "GPU", "registered, and the fabric is well", Vec::new());
}

fn subnet_manager(scene: &Scene<'_>, report: &mut Report) {
    let blackwell = |gpu: &&Gpu| gpu.compute_capability.is_some_and(|known| known.major == 10);
    // In a rack it runs on the switches' trays; there the fabric has a cluster.
    let own = |gpu: &&Gpu| gpu.fabric.as_ref().is_some_and(|fabric| fabric.cluster.is_none());
    let hgx: Vec<&Gpu> = registered(scene).filter(blackwell).filter(own).collect();
    let completed = |gpu: &&Gpu| {
        gpu.fabric.as_ref().is_some_and(|fabric| fabric.state == FabricState::Completed)
    };
    if hgx.is_empty() {
        return;
    }
    if hgx.iter().all(completed) {
        return report.ok("the fabric is registered, so it has done its work");
    }
    match runs(scene, "nvlsm") {
        Some(true) => report.ok("nvlsm runs"),
        Some(false) => {
            let text = "nvlsm does not run, and the NVLink fabric is not registered";
            report.push(Found::error(text).saw("processes", "none called nvlsm"));
        }
        None => report.cannot_tell("processes of the machine cannot be seen from here"),
    }
}

fn clique(scene: &Scene<'_>, report: &mut Report) {
    let of = |gpu: &Gpu| {
        let fabric = gpu.fabric.as_ref().filter(|one| one.state == FabricState::Completed)?;
        Some((fabric.cluster.clone(), fabric.clique))
    };
    let used: Vec<(&Gpu, _)> =
        scene.gpus().into_iter().filter_map(|gpu| Some((gpu, of(gpu)?))).collect();
    let cliques: BTreeSet<_> = used.iter().map(|(_, clique)| clique).collect();
    if cliques.len() < 2 {
        return report.settle(used.len(), "GPU", "in one clique of the fabric", Vec::new());
    }
    let names: Vec<String> = cliques
        .iter()
        .map(|clique| {
            let members = used.iter().filter(|(_, own)| own == *clique);
            let members: Vec<String> =
                members.map(|(gpu, _)| format!("GPU{}", gpu.index)).collect();
            let cluster = clique.0.as_deref().unwrap_or("no cluster");
            format!("{} in clique {} of {cluster}", members.join(" "), clique.1)
        })
        .collect();
    let text = format!("GPUs of the plan are in {} cliques of the NVLink fabric", cliques.len());
    let found = Found::error(text).saw("nvmlDeviceGetGpuFabricInfoV", names.join("; "));
    report.push(found.concerns(scene.workers(|worker| worker.gpu.is_some())));
}

fn peers(scene: &Scene<'_>, report: &mut Report) {
    let pairs = scene.pairs();
    let joined: Vec<&Pair<'_>> = pairs.iter().filter(|pair| pair.has_nvlink()).collect();
    let refused: Vec<&&Pair<'_>> =
        joined.iter().filter(|pair| pair.are_peers() == Some(false)).collect();
    if let Some(first) = refused.first() {
        let names: Vec<String> = refused.iter().map(|pair| pair.name()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let text = "NVLinks are up, and the driver refuses peer access";
        let confidential = match &scene.evidence.confidential {
            Look::Seen(true) => "confidential computing is on, which forbids it on Hopper",
            _ => "not supported by the driver",
        };
        let found = Found::error(text).about(listed(&names));
        let from = format!("nvmlDeviceGetP2PStatus of {}", first.name());
        let workers =
            refused.iter().flat_map(|pair| [scene.workers_on(pair.a), scene.workers_on(pair.b)]);
        let found = found.saw(from, confidential).concerns(workers.flatten().collect());
        let unregistered = registered(scene)
            .any(|gpu| gpu.fabric.as_ref().is_some_and(|fabric| fabric.problem().is_some()));
        report.push(match unregistered {
            true => found.remedy("follows from fabric-state: mend that first"),
            false => found,
        });
    }
    let untold = joined.iter().filter(|pair| pair.are_peers().is_none()).count();
    if untold > 0 {
        report.cannot_tell(format!("NVML does not tell of {}", counted(untold, "pair")));
    }
    report.settle(joined.len() - untold, "pair", "peer access over NVLinks", Vec::new());
}

fn active(gpu: &Gpu) -> usize {
    gpu.nvlinks.iter().filter(|link| link.active).count()
}

fn down(scene: &Scene<'_>, report: &mut Report) {
    let switched = scene.topology.nvswitch.is_some_and(|count| count > 0);
    let mut well = 0;
    // MIG mode switches them off.
    let whole = |gpu: &&Gpu| gpu.mig_mode != Some(true);
    for gpu in scene.topology.gpus.iter().filter(whole).filter(|gpu| !gpu.nvlinks.is_empty()) {
        let own = active(gpu);
        let siblings = scene.siblings(gpu).into_iter().filter(whole);
        let most = siblings.map(active).max().unwrap_or(own);
        // Without switches a card may have no bridge, or one to fewer cards.
        if own == most || (own == 0 && !switched) {
            well += 1;
            continue;
        }
        let numbers = gpu.nvlinks.iter().filter(|link| !link.active).map(|link| link.link);
        let numbers: Vec<String> = numbers.map(|number| number.to_string()).collect();
        let text = format!("{own} of its NVLinks are up, and {most} of its siblings");
        let from = "nvmlDeviceGetNvLinkState";
        let found = Found::warning(text).saw(from, format!("down: {}", numbers.join(", ")));
        report.push(scene.of_gpu(gpu, found));
    }
    report.settle(well, "GPU", "NVLinks as their siblings'", Vec::new());
}

fn speed(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for gpu in &scene.topology.gpus {
        let Some(own) = gpu.slowest_nvlink_gb_per_s() else { continue };
        let others = scene.siblings(gpu).into_iter().filter_map(Gpu::slowest_nvlink_gb_per_s);
        let most = others.fold(own, f64::max);
        if own >= most * 0.9 {
            well += 1;
            continue;
        }
        let text = format!("an NVLink has {own} GB/s, and those of its siblings {most}");
        let found = Found::warning(text).saw("NVLINK_SPEED_MBPS_COMMON", format!("{own} GB/s"));
        report.push(scene.of_gpu(gpu, found));
    }
    report.settle(well, "GPU", "NVLinks as fast as their siblings'", Vec::new());
}

fn imex(scene: &Scene<'_>, report: &mut Report) {
    if !registered(scene).any(|gpu| gpu.fabric.as_ref().is_some_and(|one| one.cluster.is_some())) {
        return;
    }
    match &scene.evidence.driver.imex_channel {
        Look::Seen(true) => report.ok("channel 0 is there"),
        Look::Unseen(why) => report.cannot_tell(why.clone()),
        Look::Seen(false) | Look::NotThere => {
            let text = "the GPUs are in a fabric over several machines, and there is no channel";
            let found = Found::note(text).saw("/dev/nvidia-caps-imex-channels/channel0", "missing");
            report.push(found);
        }
    }
}
