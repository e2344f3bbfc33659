//! The driver: its parts, its files, GPUs that it does not show, what it shares.
//!
//! *Invariant:* a GPU that is hidden from a container on purpose is no finding.

use super::evidence::{DeviceFile, FunctionRole, Look};
use super::scene::{Found, Pair, Report, Scene, listed};
use super::{Check, Cost};
use crate::ids::PciAddress;

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "driver-versions",
        title: "one version of the driver",
        looks_at: "/proc/driver/nvidia/version against nvmlSystemGetDriverVersion",
        consequence: "NVML and CUDA refuse to work, at the latest in new processes",
        source: "NVML_ERROR_LIB_RM_VERSION_MISMATCH; NVIDIA/nvidia-docker#1671",
        remedy: "restart the machine, or unload and load the kernel modules, after an update; in a \
                 container start it anew",
        cost: Cost::Restart,
        minor: false,
        judge: Some(versions),
    },
    Check {
        id: "gpus-missing",
        title: "as many GPUs as on the bus",
        looks_at: "NVIDIA GPUs in sysfs that the kernel's driver lists, against NVML's",
        consequence: "the plan has fewer workers than the machine has GPUs, and work on the lost \
                      one has failed",
        source: "NVIDIA/nvtrust#128; Xid 79 in NVIDIA's list",
        remedy: "dmesg | grep -i -e xid -e nvrm says why (see xid); power the machine off and on; \
                 if it is lost again, seat the card again",
        cost: Cost::Restart,
        minor: false,
        judge: Some(missing),
    },
    Check {
        id: "gpu-driver",
        title: "GPUs that another driver holds",
        looks_at: "DRIVER of NVIDIA GPUs in sysfs",
        consequence: "CUDA does not see them",
        source: "Linux, Documentation/driver-api/vfio.rst; NVIDIA's README, 'Nouveau'",
        remedy: "blacklist nouveau and restart; a GPU of vfio-pci belongs to a virtual machine",
        cost: Cost::Restart,
        minor: false,
        judge: Some(other_driver),
    },
    Check {
        id: "device-files",
        title: "the driver's device files",
        looks_at: "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidiaN",
        consequence: "cuInit fails with 999 or 100",
        source: "NVIDIA's README, 'nvidia-modprobe'",
        remedy: "nvidia-modprobe -c0 -u as root; docker run --gpus all, or the toolkit's \
                 nvidia-ctk",
        cost: Cost::Root,
        minor: false,
        judge: Some(files_missing),
    },
    Check {
        id: "device-rules",
        title: "leave to use the device files",
        looks_at: "access to /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidiaN, as control groups rule it",
        consequence: "no worker can open its GPU; in a container that had it before, 'systemctl \
                      daemon-reload' on the host has rewritten the cgroup's device rules",
        source: "NVIDIA/nvidia-docker#1671, nvidia-container-toolkit#171",
        remedy: "on the host, so that it stays: nvidia-ctk system create-dev-char-symlinks \
                 --create-all, or cgroupfs for the container's runtime; then a new container",
        cost: Cost::Container,
        minor: false,
        judge: Some(files_refused),
    },
    Check {
        id: "confidential",
        title: "confidential computing",
        looks_at: "nvmlSystemGetConfComputeState",
        consequence: "no peer access between GPUs on Hopper: pairs go through encrypted host memory",
        source: "NVIDIA/nvtrust#22",
        remedy: "nothing, if it is wanted; else the GPU's mode (gpu-admin-tools)",
        cost: Cost::Restart,
        minor: false,
        judge: Some(confidential),
    },
    Check {
        id: "peer-access",
        title: "peer access over PCIe",
        looks_at: "nvmlDeviceGetP2PStatus of pairs without NVLinks",
        consequence: "the pair goes through host memory: two copies, at most half of PCIe's \
                      bandwidth",
        source: "CUDA driver API, cuDeviceCanAccessPeer; GeForce cards and virtual machines have \
                 none",
        remedy: "nothing for GeForce; a virtual machine needs x-nv-gpudirect-clique",
        cost: Cost::Restart,
        minor: true,
        judge: Some(peers),
    },
    Check {
        id: "mps",
        title: "MPS",
        looks_at: "the control pipe, the processes of MPS, workers planned for one GPU",
        consequence: "programs that find a pipe without a server fail; a GPU has at most 48 clients",
        source: "NVIDIA, Multi-Process Service, 'Limitations'",
        remedy: "start nvidia-cuda-mps-control -d, or remove the pipe's directory",
        cost: Cost::Root,
        minor: false,
        judge: Some(mps),
    },
    Check {
        id: "ucx-cuda-version",
        title: "a UCX built for the driver's CUDA",
        looks_at: "the package of the libucp that is preferred, against the driver's CUDA version",
        consequence: "UCX does not load its CUDA part, and device memory goes nowhere",
        source: "PyPI, libucx-cu12 and libucx-cu13",
        remedy: "pip install libucx-cu12 (for CUDA 12), or a newer driver",
        cost: Cost::Nothing,
        minor: false,
        judge: Some(ucx),
    },
];

fn versions(scene: &Scene<'_>, report: &mut Report) {
    let Some(library) = &scene.topology.driver else { return };
    let from = "/proc/driver/nvidia/version";
    report.one(&scene.evidence.driver.kernel_version, from, |kernel| {
        let text = format!("the kernel's module is {kernel}, and the library {library}");
        match kernel == library {
            true => Ok(format!("{library}, in the kernel and outside")),
            false => Err(Found::error(text).saw(from, kernel).saw("NVML", library)),
        }
    });
}

/// GPUs on the bus that NVML does not list.
fn unlisted<'a>(
    scene: &'a Scene<'_>,
) -> impl Iterator<Item = (&'a PciAddress, &'a super::Function)> {
    let known = |pci: &PciAddress| scene.topology.gpus.iter().any(|gpu| gpu.pci == Some(*pci));
    let functions = scene.evidence.functions.iter();
    functions.filter(move |(pci, one)| one.role == FunctionRole::Gpu && !known(pci))
}

fn missing(scene: &Scene<'_>, report: &mut Report) {
    if scene.topology.driver.is_none() {
        return;
    }
    // The driver's own list leaves out what is hidden from a container.
    let lost: Vec<String> = unlisted(scene)
        .filter(|(_, one)| one.driver.as_deref() == Some("nvidia") && one.listed)
        .map(|(pci, _)| pci.to_string())
        .collect();
    let seen = scene.topology.gpus.len();
    if lost.is_empty() {
        return report.settle(seen, "GPU", "all that the kernel's driver has", Vec::new());
    }
    let names: Vec<&str> = lost.iter().map(String::as_str).collect();
    let text = format!("{seen} of {} GPUs answer: {} is lost", seen + lost.len(), listed(&names));
    let found = Found::warning(text).saw("/proc/driver/nvidia/gpus, but not NVML", listed(&names));
    report.push(found.about(listed(&names)));
}

fn other_driver(scene: &Scene<'_>, report: &mut Report) {
    for (pci, function) in unlisted(scene) {
        let (text, bad) = match function.driver.as_deref() {
            Some("nvidia") => continue,
            Some("nouveau") => ("the driver nouveau has it".to_owned(), true),
            // Given to a virtual machine, on purpose.
            Some(driver) => (format!("the driver {driver} has it"), false),
            None => ("no driver has it".to_owned(), true),
        };
        let found = if bad { Found::warning(text) } else { Found::note(text) };
        let driver = function.driver.as_deref().unwrap_or("none");
        report.push(found.about(pci.to_string()).saw("DRIVER in uevent", driver));
    }
    if report.found.is_empty() {
        report.settle(scene.topology.gpus.len(), "GPU", "of the NVIDIA driver", Vec::new());
    }
}

fn files_missing(scene: &Scene<'_>, report: &mut Report) {
    let files = &scene.evidence.driver.files;
    let is = |file: &DeviceFile| *file == DeviceFile::Missing;
    let missing: Vec<&str> =
        files.iter().filter(|(_, file)| is(file)).map(|(path, _)| path.as_str()).collect();
    if !missing.is_empty() {
        let text = format!("{} not there: {}", count(missing.len()), listed(&missing));
        report.push(Found::error(text).saw("access", "ENOENT"));
    }
    report.settle(files.len() - missing.len(), "file", "the driver's, all there", Vec::new());
}

fn count(files: usize) -> String {
    if files == 1 { "1 file is".to_owned() } else { format!("{files} files are") }
}

fn files_refused(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    let mut refused: Vec<(&str, &str)> = Vec::new();
    for (path, file) in &scene.evidence.driver.files {
        match file {
            DeviceFile::Usable => well += 1,
            DeviceFile::Missing => {}
            DeviceFile::Refused(why) => refused.push((path, why)),
        }
    }
    if let Some((path, why)) = refused.first() {
        let paths: Vec<&str> = refused.iter().map(|(path, _)| *path).collect();
        let text = format!("this process may not use {}", listed(&paths));
        report.push(Found::error(text).saw(format!("access to {path}"), why));
    }
    report.settle(well, "file", "the driver's, for reading and writing", Vec::new());
}

fn confidential(scene: &Scene<'_>, report: &mut Report) {
    let from = "nvmlSystemGetConfComputeState";
    report.one(&scene.evidence.confidential, from, |on| match on {
        false => Ok("off".to_owned()),
        true if scene.pairs().is_empty() => Ok("on, with one GPU".to_owned()),
        true => Err(Found::warning("it is on, and several GPUs are planned").saw(from, "on")),
    });
}

fn peers(scene: &Scene<'_>, report: &mut Report) {
    let pairs: Vec<Pair<'_>> =
        scene.pairs().into_iter().filter(|pair| !pair.has_nvlink()).collect();
    let refused: Vec<String> =
        pairs.iter().filter(|p| p.are_peers() == Some(false)).map(Pair::name).collect();
    let names: Vec<&str> = refused.iter().map(String::as_str).collect();
    if let Some(first) = names.first() {
        let guest = scene.evidence.system.virtual_machine.seen() == Some(&true);
        let place = if guest { "in this virtual machine " } else { "" };
        let text = format!("{place}{} of {} pairs have none", names.len(), pairs.len());
        let found = Found::note(text).about(listed(&names));
        report.push(found.saw(format!("nvmlDeviceGetP2PStatus of {first}"), "not supported"));
    }
    let well = pairs.iter().filter(|pair| pair.are_peers() == Some(true)).count();
    report.settle(well, "pair", "peer access over PCIe", Vec::new());
}

/// Clients of one MPS server, since Volta ("Limitations", before 60 in CUDA 13).
const MPS_CLIENTS: usize = 48;

fn mps(scene: &Scene<'_>, report: &mut Report) {
    let Look::Seen(pipe) = &scene.evidence.driver.mps_pipe else { return };
    let control = match &scene.evidence.services {
        Look::Seen(all) => Some(all.iter().any(|one| one.starts_with("nvidia-cuda-mps"))),
        Look::Unseen(_) | Look::NotThere => None,
    };
    let most = scene.gpus().into_iter().map(|gpu| scene.workers_on(gpu).len()).max().unwrap_or(0);
    match control {
        Some(false) => {
            let text = format!("there is a pipe at {pipe}, and nobody serves it");
            report.push(Found::error(text).saw("processes", "no nvidia-cuda-mps-control"));
        }
        _ if most > MPS_CLIENTS => {
            let text = format!("{most} workers are planned for one GPU, and MPS serves 48");
            report.push(Found::error(text).saw("plan", format!("{most} workers on a GPU")));
        }
        Some(true) => report.ok(format!("it serves {pipe}")),
        None => report.cannot_tell(format!("{pipe} is there; its server cannot be seen from here")),
    }
}

fn ucx(scene: &Scene<'_>, report: &mut Report) {
    let major = |version: &str| version.split('.').next()?.parse::<u32>().ok();
    let driver = scene.topology.cuda.as_deref().and_then(major);
    let (Some(driver), Some(package)) = (driver, &scene.evidence.driver.ucx) else { return };
    let built = package.split_whitespace().next().and_then(|name| name.strip_prefix("libucx-cu"));
    let Some(built) = built.and_then(|number| number.parse::<u32>().ok()) else { return };
    if built <= driver {
        return report.ok(format!("built for CUDA {built}, the driver has {driver}"));
    }
    let text = format!("UCX is built for CUDA {built}, and the driver has CUDA {driver}");
    report.push(Found::error(text).saw("package of libucp", package).saw("driver", driver));
}
