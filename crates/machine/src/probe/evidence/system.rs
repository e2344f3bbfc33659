//! The system: memory, shared memory, settings of the kernel.
//!
//! *Invariant:* everything is read from procfs, sysfs and one call for a file system's room.

use std::collections::BTreeMap;
use std::path::Path;

use nix::sys::statvfs::{FsFlags, statvfs};

use super::super::Options;
use super::super::sysfs::{first_line, names};
use super::{text, value};
use cuda_cluster_model::preflight::{Look, Room, System};

/// Reads it.
pub(super) fn look(options: &Options) -> System {
    let (sysfs, kernel) = (&options.sysfs, options.procfs.join("sys"));
    let memory = std::fs::read_to_string(options.procfs.join("meminfo")).unwrap_or_default();
    let bytes = |name: &str| kibibytes(&memory, name);
    let swap = bytes("SwapTotal:").zip(bytes("SwapFree:"));
    System {
        architecture: std::env::consts::ARCH.to_owned(),
        kernel: first_line(&kernel.join("kernel/osrelease")),
        virtual_machine: guest(&options.procfs.join("cpuinfo")),
        shared_memory: room(&options.dev.join("shm")),
        available_bytes: bytes("MemAvailable:"),
        numa_free_bytes: nodes(&sysfs.join("devices/system/node")),
        overcommit: value(&kernel.join("vm/overcommit_memory")),
        ptrace_scope: value(&kernel.join("kernel/yama/ptrace_scope")),
        huge_pages: chosen(&sysfs.join("kernel/mm/transparent_hugepage/enabled")),
        numa_balancing: value(&kernel.join("kernel/numa_balancing")),
        swap_used_bytes: swap.map(|(total, free)| total.saturating_sub(free)),
        smt: match value::<u32>(&sysfs.join("devices/system/cpu/smt/active")) {
            Look::Seen(active) => Look::Seen(active != 0),
            Look::NotThere => Look::NotThere,
            Look::Unseen(why) => Look::Unseen(why),
        },
        governor: text(&sysfs.join("devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        waking_us: waking(&sysfs.join("devices/system/cpu/cpu0/cpuidle")),
        clock: text(&sysfs.join("devices/system/clocksource/clocksource0/current_clocksource")),
    }
}

/// The longest latency of the states of rest that are not disabled (Documentation/admin-guide/pm/
/// cpuidle.rst).
fn waking(states: &Path) -> Look<u32> {
    let latency = |state: String| {
        let state = states.join(state);
        let disabled = value::<u32>(&state.join("disable")).seen() == Some(&1);
        value::<u32>(&state.join("latency")).seen().copied().filter(|_| !disabled)
    };
    names(states).into_iter().filter_map(latency).max().map_or(Look::NotThere, Look::Seen)
}

/// A line of a `meminfo`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let at = text.find(name)? + name.len();
    let rest = text[at..].lines().next()?.trim();
    Some(rest.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
}

/// Whether the processor says that a hypervisor is below it.
fn guest(cpuinfo: &Path) -> Look<bool> {
    match text(cpuinfo) {
        Look::Seen(text) => {
            let flags = text.lines().find(|line| line.starts_with("flags"));
            // Arm has no such flag.
            Look::of(flags.map(|flags| flags.split_whitespace().any(|one| one == "hypervisor")))
        }
        Look::NotThere => Look::NotThere,
        Look::Unseen(why) => Look::Unseen(why),
    }
}

fn room(path: &Path) -> Look<Room> {
    match statvfs(path) {
        Ok(system) => Look::Seen(Room {
            free_bytes: system.blocks_available().saturating_mul(system.fragment_size()),
            total_bytes: system.blocks().saturating_mul(system.fragment_size()),
            read_only: system.flags().contains(FsFlags::ST_RDONLY),
        }),
        Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENOTDIR) => Look::NotThere,
        Err(errno) => Look::Unseen(format!("{}: {}", path.display(), errno.desc())),
    }
}

/// Memory of each node that processes can get: free, and used for files.
fn nodes(folder: &Path) -> BTreeMap<u32, u64> {
    let node = |name: String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let text = std::fs::read_to_string(folder.join(&name).join("meminfo")).ok()?;
        let free = kibibytes(&text, "MemFree:")?;
        Some((number, free + kibibytes(&text, "FilePages:").unwrap_or(0)))
    };
    names(folder).into_iter().filter_map(node).collect()
}

/// The word in brackets: `always [madvise] never`.
fn chosen(path: &Path) -> Look<String> {
    match text(path) {
        Look::Seen(text) => {
            let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            Look::of(word.map(|(word, _)| word.to_owned()))
        }
        look => look,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_reads_as_the_kernel_writes_it() {
        let node = "Node 0 MemTotal:       527 kB\nNode 0 MemFree:        12 kB\n";
        assert_eq!(kibibytes(node, "MemFree:"), Some(12 << 10));
        assert_eq!(kibibytes("MemAvailable:   20971520 kB\n", "MemAvailable:"), Some(20 << 30));
        assert_eq!(kibibytes("MemFree: many\n", "MemFree:"), None);
    }

    #[test]
    fn there_is_room_where_there_is_a_file_system() {
        assert!(matches!(room(Path::new("/")), Look::Seen(Room { total_bytes: 1.., .. })));
        assert_eq!(room(Path::new("/nowhere")), Look::NotThere);
    }
}
