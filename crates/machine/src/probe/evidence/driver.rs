//! The NVIDIA driver's kernel side: versions, modules, device files, services.
//!
//! *Invariant:* device files are asked for, never opened: opening one wakes a GPU.

use std::path::PathBuf;

use super::super::Options;
use super::super::sysfs::{first_line, names};
use super::{device_file, text};
use cuda_cluster_model::preflight::{Driver, Look};
use cuda_cluster_model::topology::Topology;

/// Reads what belongs to the driver.
pub(super) fn look(options: &Options, topology: &Topology) -> Driver {
    let version = text(&options.procfs.join("driver/nvidia/version"));
    let modules = options.sysfs.join("module");
    let present = |there: bool| if modules.is_dir() { Look::Seen(there) } else { Look::NotThere };
    let mut driver = Driver {
        kernel_version: match &version {
            Look::Seen(text) => match number(text) {
                Some(number) => Look::Seen(number),
                None => Look::Unseen("/proc/driver/nvidia/version has no version".to_owned()),
            },
            Look::NotThere => Look::NotThere,
            Look::Unseen(why) => Look::Unseen(why.clone()),
        },
        open: match &version {
            Look::Seen(text) => Look::Seen(text.contains("Open Kernel Module")),
            Look::NotThere => Look::NotThere,
            Look::Unseen(why) => Look::Unseen(why.clone()),
        },
        peermem: present(modules.join("nvidia_peermem").is_dir()),
        memory_peers: {
            let folder = options.sysfs.join("kernel/mm/memory_peers");
            if folder.is_dir() { Look::Seen(names(&folder)) } else { Look::NotThere }
        },
        ..Driver::default()
    };
    if topology.driver.is_none() {
        return driver;
    }
    let channels = options.dev.join("nvidia-caps-imex-channels");
    driver.imex_channel = Look::Seen(channels.join("channel0").exists());
    // Beside a made-up procfs without these files nothing is known of them.
    if options.dev.is_dir() {
        driver.files = files(options)
            .into_iter()
            .map(|name| (format!("/dev/{name}"), device_file(&options.dev.join(&name))))
            .collect();
    }
    driver.mps_pipe = pipe();
    driver
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu …`.
fn number(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("NVRM"))?;
    let is_version = |word: &&str| {
        word.split('.').count() >= 2 && word.split('.').all(|part| part.parse::<u32>().is_ok())
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// The device files that the driver's GPUs need.
fn files(options: &Options) -> Vec<String> {
    let gpus = options.procfs.join("driver/nvidia/gpus");
    let minor = |name: &String| {
        let text = std::fs::read_to_string(gpus.join(name).join("information")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
        line.trim().parse::<u32>().ok()
    };
    let minors: Vec<u32> = names(&gpus).iter().filter_map(minor).collect();
    let own = minors.iter().map(|minor| format!("nvidia{minor}"));
    ["nvidiactl", "nvidia-uvm"].into_iter().map(str::to_owned).chain(own).collect()
}

/// The pipe of MPS's control, where it is asked for or where it usually is.
fn pipe() -> Look<String> {
    let named = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| "/tmp/nvidia-mps".into());
    let there = folder.join("control").exists();
    Look::of(there.then(|| folder.display().to_string()))
}

/// Names of the driver's services that run, by the first 15 characters of their names. In a PID
/// namespace of its own this process does not see them.
pub(super) fn services(options: &Options) -> Look<Vec<String>> {
    if super::process::own_namespace(&options.procfs, "pid") == Look::Seen(false) {
        return Look::Unseen("processes of the machine are in another PID namespace".to_owned());
    }
    let processes = names(&options.procfs);
    let name = |pid: &String| {
        pid.parse::<u32>().ok()?;
        first_line(&options.procfs.join(pid).join("comm"))
    };
    let is_ours =
        |name: &String| name.starts_with("nvidia-") || name.starts_with("nv-") || name == "nvlsm";
    let mut found: Vec<String> = processes.iter().filter_map(name).filter(is_ours).collect();
    found.sort_unstable();
    found.dedup();
    Look::Seen(found)
}
