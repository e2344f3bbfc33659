//! Variables and files with settings: what somebody switched off on an old day.
//!
//! *Invariant:* a setting is blamed only for what programs of this plan read.

use super::evidence::Setting;
use super::scene::{Found, Report, Scene, listed};
use super::{Check, Cost, Severity};
use crate::ids::PciAddress;
use crate::spec::UcxVersion;

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "nccl-switches",
        title: "switches of NCCL",
        looks_at: "NCCL_* in the environment, /etc/nccl.conf, ~/.nccl.conf, /etc/environment",
        consequence: "NCCL takes a slower path without a word; NVIDIA warns of crashes and hangs",
        source: "NCCL user guide, environment variables ('may result in crashes or hangs'); \
                 NVIDIA/nccl-tests#228",
        remedy: "unset it, or remove the line",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(nccl),
    },
    Check {
        id: "nccl-topology",
        title: "a topology given to NCCL",
        looks_at: "the file of NCCL_TOPO_FILE, against this machine's GPUs",
        consequence: "NCCL plans its rings for another machine",
        source: "NCCL user guide, NCCL_TOPO_FILE; NVIDIA/nccl#602",
        remedy: "unset it, or write one: cuda-cluster topo -o nccl",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(nccl_topology),
    },
    Check {
        id: "ucx-switches",
        title: "switches of UCX",
        looks_at: "UCX_* in the environment, /etc/environment and ucx.conf",
        consequence: "UCX may not use what the plan counts on; what the caller sets is kept",
        source: "openucx.readthedocs.io, FAQ; ai-dynamo/nixl#1754",
        remedy: "unset it; cuda-cluster plan --explain says what it sets itself",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(ucx),
    },
    Check {
        id: "allocator",
        title: "allocators whose memory can be shared",
        looks_at: "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF; RMM's pool in the plan, with \
                   the version of UCX",
        consequence: "the memory has no CUDA IPC: it goes through host memory, up to 600 times \
                      slower",
        source: "ai-dynamo/nixl#1754; openucx/ucx#7110, #11548",
        remedy: "expandable_segments:False; RMM's ordinary pool; UCX 1.22 for exportable pools",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(allocator),
    },
    Check {
        id: "launch-blocking",
        title: "switches for debugging CUDA",
        looks_at: "CUDA_LAUNCH_BLOCKING, CUDA_DISABLE_PTX_JIT, CUDA_ENABLE_COREDUMP_ON_EXCEPTION, \
                   TORCH_USE_CUDA_DSA, NCCL_DEBUG and UCX_LOG_LEVEL",
        consequence: "each kernel is waited for, or each message written down",
        source: "CUDA C++ Programming Guide, environment variables",
        remedy: "unset it",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(debugging),
    },
    Check {
        id: "cuda-stubs",
        title: "the libcuda that programs load",
        looks_at: "LD_LIBRARY_PATH and LD_PRELOAD: the toolkit's stubs and forward compatibility",
        consequence: "the stub answers every call with an error (34); a compatibility library \
                      refuses GeForce and newer drivers (803, 804)",
        source: "CUDA driver API, CUDA_ERROR_STUB_LIBRARY; CUDA compatibility guide",
        remedy: "take the directory out of the variable",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(stubs),
    },
    Check {
        id: "gpu-mask",
        title: "masks of GPUs",
        looks_at: "CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES",
        consequence: "the plan uses only what the mask shows",
        source: "CUDA C++ Programming Guide; NVIDIA container toolkit",
        remedy: "unset it, or set 'gpus'",
        cost: Cost::Nothing,
        minor: true,
        judge: Some(mask),
    },
    Check {
        id: "gpu-order",
        title: "the order of GPUs in CUDA",
        looks_at: "CUDA_DEVICE_ORDER",
        consequence: "GPU 0 of a program and of nvidia-smi may be two; workers are not concerned, \
                      their masks name UUIDs",
        source: "CUDA C++ Programming Guide, environment variables",
        remedy: "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        cost: Cost::Nothing,
        minor: true,
        judge: Some(order),
    },
    Check {
        id: "proxies",
        title: "proxies",
        looks_at: "http_proxy, https_proxy, all_proxy and no_proxy (whether they are set, not what \
                   they say)",
        consequence: "requests to the machine's own pages and rendezvous go to the proxy, and fail",
        source: "",
        remedy: "no_proxy=localhost,127.0.0.1,::1 and the machines' names",
        cost: Cost::Nothing,
        minor: true,
        judge: Some(proxies),
    },
];

/// Settings of these names, with where each is.
fn named<'a>(
    scene: &Scene<'a>,
    is_it: impl Fn(&str) -> bool + 'a,
) -> impl Iterator<Item = &'a Setting> {
    scene.evidence.settings.iter().filter(move |setting| is_it(&setting.name))
}

/// What an old setting of NCCL switches off, if it does.
fn switched_off(name: &str, value: &str) -> Option<&'static str> {
    let value = value.trim();
    let on = !value.is_empty() && value != "0";
    let local = value.eq_ignore_ascii_case("LOC") || value == "0";
    Some(match name {
        "NCCL_P2P_DISABLE" if on => "peer access between GPUs",
        "NCCL_P2P_LEVEL" if local => "peer access between GPUs",
        "NCCL_SHM_DISABLE" if on => "shared memory within the machine",
        "NCCL_IB_DISABLE" if on => "InfiniBand and RoCE",
        "NCCL_NET_GDR_LEVEL" if local => "GPUDirect RDMA",
        "NCCL_NVLS_ENABLE" if value == "0" => "reductions in NVSwitches",
        "NCCL_CUMEM_ENABLE" if value == "0" => "memory that NCCL can share by itself",
        _ => return None,
    })
}

fn nccl(scene: &Scene<'_>, report: &mut Report) {
    let mut any = false;
    for setting in named(scene, |name| name.starts_with("NCCL_")) {
        any = true;
        let Setting { name, value, place, .. } = setting;
        let Some(what) = switched_off(name, value) else { continue };
        let found = Found::warning(format!("{name}={value} in {place} switches off {what}"));
        let found = found.saw(place, format!("{name}={value}"));
        let found = match place.contains('/') {
            true => found.remedy(format!(
                "remove the line from {place}, for what starts from then on; it may be there \
                 because of a hang (iommu, acs)"
            )),
            false => found,
        };
        let is_the_systems = place.contains('/') && !place.ends_with("/.nccl.conf");
        let found = if is_the_systems { found.costs(Cost::Root) } else { found };
        report.push(if scene.may_use_nccl() { found } else { found.at_most(Severity::Note) });
    }
    if report.found.is_empty() {
        report.ok(if any { "nothing is switched off" } else { "none is set" });
    }
}

fn nccl_topology(scene: &Scene<'_>, report: &mut Report) {
    for setting in named(scene, |name| name == "NCCL_TOPO_FILE") {
        let Setting { value, place, gpus, .. } = setting;
        let text = match gpus {
            None => continue,
            Some(Err(why)) => format!("{value} cannot be read: {why}"),
            Some(Ok(gpus)) => {
                let here =
                    |pci: &PciAddress| scene.topology.gpus.iter().any(|gpu| gpu.pci == Some(*pci));
                let foreign = gpus.iter().filter(|pci| !here(pci)).count();
                if foreign == 0 {
                    report.ok(format!("{value} is of this machine"));
                    continue;
                }
                format!("{foreign} of the {} GPUs in {value} are not here", gpus.len())
            }
        };
        let found = Found::warning(text).saw(place, format!("NCCL_TOPO_FILE={value}"));
        report.push(if scene.may_use_nccl() { found } else { found.at_most(Severity::Note) });
    }
}

fn ucx(scene: &Scene<'_>, report: &mut Report) {
    for setting in named(scene, |name| name.starts_with("UCX_")) {
        let Setting { name, value, place, .. } = setting;
        let lists = |word: &str| value.split(',').any(|one| one == word || one.starts_with(word));
        let all = value.is_empty() || value == "all" || value.starts_with('^');
        let text = match name.as_str() {
            "UCX_TLS" if !all && !lists("cuda") && !scene.gpus().is_empty() => {
                format!("UCX_TLS={value} in {place} has no transport for GPU memory")
            }
            "UCX_TLS" if value.starts_with('^') && value.contains("cuda") => {
                format!("UCX_TLS={value} in {place} forbids a transport of GPU memory")
            }
            "UCX_MEMTYPE_CACHE" if value.eq_ignore_ascii_case("n") => {
                format!(
                    "{name}={value} in {place}: each message asks the driver whose memory it is"
                )
            }
            "UCX_PROTO_ENABLE" if value.eq_ignore_ascii_case("n") => {
                format!("{name}={value} in {place} chooses UCX's old protocols")
            }
            _ => continue,
        };
        report.push(Found::warning(text).saw(place, format!("{name}={value}")));
    }
    if report.found.is_empty() {
        report.ok("nothing that the plan counts on is switched off");
    }
}

/// UCX's first version that has CUDA IPC for pools that can be exported.
const SHARES_POOLS_SINCE: UcxVersion = UcxVersion { major: 1, minor: 22 };

fn allocator(scene: &Scene<'_>, report: &mut Report) {
    let own = scene.engine() == Some(crate::plan::EngineKind::Native);
    let names = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
    for setting in named(scene, |name| names.contains(&name)) {
        let Setting { name, value, place, .. } = setting;
        let value = value.to_ascii_lowercase();
        let bad = value.contains("expandable_segments:t") || value.contains("cudamallocasync");
        if !bad || scene.gpus().len() < 2 {
            continue;
        }
        let found = Found::warning(format!("{name} in {place}: PyTorch's memory cannot be shared"));
        let found = found.saw(place, format!("{name}={value}"));
        report.push(if own { found.at_most(Severity::Note) } else { found });
    }
    let version = scene.plan.and_then(|plan| plan.ucx?.version);
    let pools = scene
        .workers(|worker| worker.rmm.as_ref().is_some_and(|rmm| rmm.asynchronous || rmm.managed));
    if !pools.is_empty() && scene.gpus().len() > 1 {
        let shared = version.is_some_and(|version| version >= SHARES_POOLS_SINCE);
        let version = version.map_or("unknown".to_owned(), |version| version.to_string());
        let text = match shared {
            true => "RMM's asynchronous pool is not made exportable, which UCX 1.22 needs",
            false => "UCX has no CUDA IPC for the memory of RMM's asynchronous or managed pool",
        };
        report.push(Found::warning(text).saw("UCX", version).concerns(pools));
    }
    if report.found.is_empty() {
        report.ok("nothing forbids CUDA IPC");
    }
}

fn debugging(scene: &Scene<'_>, report: &mut Report) {
    for setting in named(scene, |_| true) {
        let Setting { name, value, place, .. } = setting;
        let lower = value.to_ascii_lowercase();
        let on = !lower.is_empty() && lower != "0";
        let (bad, severity) = match name.as_str() {
            "CUDA_LAUNCH_BLOCKING" => (on, Severity::Warning),
            "CUDA_DISABLE_PTX_JIT" | "CUDA_ENABLE_COREDUMP_ON_EXCEPTION" | "TORCH_USE_CUDA_DSA" => {
                (on, Severity::Note)
            }
            "NCCL_DEBUG" => (["trace", "info"].contains(&lower.as_str()), Severity::Note),
            "UCX_LOG_LEVEL" => (
                ["debug", "trace", "req", "data", "async", "func", "poll"]
                    .contains(&lower.as_str()),
                Severity::Warning,
            ),
            _ => continue,
        };
        if bad {
            let text = format!("{name}={value} in {place}");
            report.push(Found::new(severity, text).saw(place, format!("{name}={value}")));
        }
    }
    if report.found.is_empty() {
        report.ok("none is on");
    }
}

fn stubs(scene: &Scene<'_>, report: &mut Report) {
    let names = ["LD_LIBRARY_PATH", "LD_PRELOAD"];
    for setting in named(scene, |name| names.contains(&name)) {
        let Setting { name, value, place, .. } = setting;
        for part in value.split([':', ' ']) {
            let found = if part.contains("/stubs") {
                Found::error(format!("{name} has {part}, whose libcuda is a stub"))
            } else if part.contains("/cuda") && part.trim_end_matches('/').ends_with("/compat") {
                Found::note(format!("{name} has {part}, whose libcuda is for older drivers"))
            } else {
                continue;
            };
            report.push(found.saw(place, format!("{name}={value}")));
        }
    }
    if report.found.is_empty() {
        report.ok("no stub comes before the driver's");
    }
}

fn mask(scene: &Scene<'_>, report: &mut Report) {
    let names = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];
    for setting in named(scene, |name| names.contains(&name)) {
        let Setting { name, value, place, .. } = setting;
        if name == "NVIDIA_VISIBLE_DEVICES" && ["all", ""].contains(&value.as_str()) {
            continue;
        }
        let shown = value.split(',').filter(|one| !one.trim().is_empty()).count();
        let all = scene.topology.gpus.len();
        if shown >= all {
            report.ok(format!("{name} shows all {all} GPUs"));
            continue;
        }
        let text = format!("{name}={value} shows {shown} of {all} GPUs");
        report.push(Found::note(text).saw(place, format!("{name}={value}")));
    }
}

fn order(scene: &Scene<'_>, report: &mut Report) {
    let models: std::collections::BTreeSet<_> =
        scene.topology.gpus.iter().map(|gpu| &gpu.name).collect();
    if models.len() < 2 {
        return;
    }
    let by_place = named(scene, |name| name == "CUDA_DEVICE_ORDER")
        .any(|setting| setting.value == "PCI_BUS_ID");
    match by_place {
        true => report.ok("PCI_BUS_ID, as nvidia-smi's"),
        false => {
            let text =
                format!("the machine has {} models, and CUDA puts the fastest first", models.len());
            report.push(Found::note(text).saw("CUDA_DEVICE_ORDER", "not set"));
        }
    }
}

fn proxies(scene: &Scene<'_>, report: &mut Report) {
    let is_proxy = |name: &str| {
        let lower = name.to_ascii_lowercase();
        ["http_proxy", "https_proxy", "all_proxy"].contains(&lower.as_str())
    };
    let set: Vec<&str> = named(scene, is_proxy).map(|setting| setting.name.as_str()).collect();
    if set.is_empty() {
        return;
    }
    let spared = named(scene, |name| name.eq_ignore_ascii_case("no_proxy")).next().is_some();
    match spared {
        true => report.ok("set, with exceptions"),
        false => report.push(
            Found::note(format!("{} without no_proxy", listed(&set))).saw("environment", "(set)"),
        ),
    }
}
