//! What a healthy machine has beside its topology: the driver's files, IOMMU groups, limits, the
//! kernel's log and settings. Tests spoil single files of it.
//!
//! Written as the kernel writes it (`fs/proc/base.c`, Documentation/admin-guide/…).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use cuda_cluster::ids::PciAddress;
use cuda_cluster::topology::{LinkLayer, Topology};

/// Writes it below `root`, where sysfs and procfs are already.
pub fn write(machine: &Topology, root: &Path) -> io::Result<()> {
    for (path, text) in FILES {
        file(root, path, text)?;
    }
    namespaces(root)?;
    memory(machine, root)?;
    driver(machine, root)?;
    functions(machine, root)?;
    adapters(machine, root)
}

/// Writes a file below the machine's directory.
pub fn file(root: &Path, path: &str, text: &str) -> io::Result<()> {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("it is below the root"))?;
    fs::write(path, text)
}

const FILES: &[(&str, &str)] = &[
    ("proc/self/limits", LIMITS),
    ("proc/self/cgroup", "0::/\n"),
    ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sse2 avx512f\n"),
    ("proc/uptime", "90000.50 8000000.00\n"),
    ("proc/net/route", ROUTES),
    ("proc/sys/vm/overcommit_memory", "0\n"),
    ("proc/sys/kernel/osrelease", "6.8.0-60-generic\n"),
    ("proc/sys/kernel/numa_balancing", "0\n"),
    ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ("sys/devices/system/cpu/smt/active", "1\n"),
    ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "0\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state2/latency", "290\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state2/disable", "1\n"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("dev/kmsg", "6,1,1000000,-;Linux version 6.8.0-60-generic\n"),
    ("dev/shm/.there", ""),
    ("etc/hosts", "127.0.0.1 localhost\n"),
];

const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max processes             1030000              1030000              processes 
Max open files            1048576              1048576              files     
Max locked memory         unlimited            unlimited            bytes     
Max address space         unlimited            unlimited            bytes     
";

const ROUTES: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
";

fn namespaces(root: &Path) -> io::Result<()> {
    let folder = root.join("proc/self/ns");
    fs::create_dir_all(&folder)?;
    // The machine's own (`linux/proc_ns.h`).
    symlink("pid:[4026531836]", folder.join("pid"))?;
    symlink("ipc:[4026531839]", folder.join("ipc"))
}

/// All memory is free.
fn memory(machine: &Topology, root: &Path) -> io::Result<()> {
    let kibibytes = |bytes: Option<u64>| bytes.unwrap_or(1 << 40) / 1024;
    let all: u64 = machine.numa.iter().map(|node| kibibytes(node.memory_bytes)).sum();
    let text = format!(
        "MemTotal:       {all} kB\nMemFree:        {all} kB\nMemAvailable:   {all} kB\n\
         SwapTotal:      0 kB\nSwapFree:       0 kB\n"
    );
    file(root, "proc/meminfo", &text)?;
    for node in &machine.numa {
        let (id, bytes) = (node.id, kibibytes(node.memory_bytes));
        let text =
            format!("Node {id} MemTotal:       {bytes} kB\nNode {id} MemFree:        {bytes} kB\n");
        file(root, &format!("sys/devices/system/node/node{id}/meminfo"), &text)?;
    }
    Ok(())
}

fn driver(machine: &Topology, root: &Path) -> io::Result<()> {
    if machine.gpus.is_empty() {
        return Ok(());
    }
    let version = machine.driver.as_deref().unwrap_or("580.95.05");
    let text = format!(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n\
         GCC version:  gcc version 13.3.0\n"
    );
    file(root, "proc/driver/nvidia/version", &text)?;
    for name in ["nvidiactl", "nvidia-uvm"] {
        file(root, &format!("dev/{name}"), "")?;
    }
    for gpu in &machine.gpus {
        let (Some(pci), index) = (gpu.pci, gpu.index) else { continue };
        let text = format!("Model: \t\t NVIDIA\nDevice Minor: \t {index}\n");
        file(root, &format!("proc/driver/nvidia/gpus/{pci}/information"), &text)?;
        file(root, &format!("dev/nvidia{index}"), "")?;
    }
    file(root, "sys/module/nvidia/version", &format!("{version}\n"))
}

/// Each function is in a group of its own, which the IOMMU passes through; where a GPU is beside a
/// DMA function, the whole domain is one group (rdma-core, `rdma_topo`).
fn functions(machine: &Topology, root: &Path) -> io::Result<()> {
    let dma = machine.nics.iter().filter_map(|nic| nic.dma.as_ref()?.pci);
    let joint: BTreeSet<u32> = dma.map(|pci| pci.domain).collect();
    let mut group_of: BTreeMap<u32, usize> = BTreeMap::new();
    let mut entries: Vec<_> =
        fs::read_dir(root.join("sys/bus/pci/devices"))?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for (at, entry) in entries.iter().enumerate() {
        let place = entry.file_name().to_str().and_then(|name| name.parse::<PciAddress>().ok());
        let domain = place.map(|place| place.domain).filter(|domain| joint.contains(domain));
        let group = domain.map_or(at, |domain| *group_of.entry(domain).or_insert(at));
        let folder = format!("sys/kernel/iommu_groups/{group}");
        file(root, &format!("{folder}/type"), "identity\n")?;
        let path = entry.path().canonicalize()?;
        symlink(root.join(&folder), path.join("iommu_group"))?;
        let config = path.join("config");
        if !config.exists() {
            fs::write(config, endpoint())?;
        }
    }
    Ok(())
}

/// The configuration space of a GPU or an adapter: MaxPayload 256, MaxReadRequest 4096.
fn endpoint() -> Vec<u8> {
    let mut config = vec![0; 4096];
    config[0x34] = 0x60;
    config[0x60..0x63].copy_from_slice(&[0x10, 0x00, 0x02]);
    config[0x68..0x6a].copy_from_slice(&(1_u16 << 5 | 5 << 12).to_le_bytes());
    config
}

/// RDMA adapters: verbs, addresses, counters, and who has registered for GPUs' memory.
fn adapters(machine: &Topology, root: &Path) -> io::Result<()> {
    for (at, nic) in machine.nics.iter().enumerate() {
        let verbs = format!("sys/class/infiniband_verbs/uverbs{at}");
        file(root, &format!("{verbs}/ibdev"), &format!("{}\n", nic.name))?;
        file(root, &format!("dev/infiniband/uverbs{at}"), "")?;
        for port in &nic.ports {
            let folder =
                root.join(format!("sys/class/infiniband/{}/ports/{}", nic.name, port.port));
            let gid = match port.link_layer {
                Some(LinkLayer::Ethernet) => "0000:0000:0000:0000:0000:ffff:0a00:0001",
                _ => "fe80:0000:0000:0000:0002:c903:0000:0001",
            };
            file(&folder, "gids/0", &format!("{gid}\n"))?;
            file(&folder, "gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n")?;
            file(&folder, "counters/link_downed", "0\n")?;
        }
    }
    if !machine.nics.is_empty() && !machine.gpus.is_empty() {
        fs::create_dir_all(root.join("sys/kernel/mm/memory_peers/nv_mem"))?;
        fs::create_dir_all(root.join("sys/module/nvidia_peermem"))?;
    }
    Ok(())
}
