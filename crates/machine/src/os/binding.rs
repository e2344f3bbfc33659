//! Sets CPU affinity and memory policy for this process, and reads them back.
//!
//! Does not choose CPUs and nodes; the plan does.
//!
//! *Invariant:* reported bindings have been read from the kernel.

use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;

use cuda_cluster_model::cpuset::{Cpu, CpuSet, IdSet, LIMIT, NodeSet};
use cuda_cluster_model::plan::{Binding, MemoryPolicy};
use cuda_cluster_wire::process::Observed;

// The kernel's `include/uapi/linux/mempolicy.h`.
const MPOL_DEFAULT: libc::c_int = 0;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_BIND: libc::c_int = 2;
const MPOL_PREFERRED_MANY: libc::c_int = 5;

/// The CPUs and memory nodes in effect, and how they differ from the requested ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// CPUs that this thread may run on.
    pub cpus: CpuSet,
    /// Nodes of the memory policy; empty for the default policy.
    pub mems: NodeSet,
    /// What could not be applied, one sentence each.
    pub notes: Vec<String>,
}

/// Applies a binding to this thread, and so to any program it executes, and reads it back. Other
/// threads of this process are not affected.
pub fn apply(binding: &Binding) -> InForce {
    let mut notes = Vec::new();
    if let Some(cpus) = &binding.cpus
        && let Err(errno) = set_cpus(cpus)
    {
        notes.push(format!("CPUs {cpus} could not be set: {}", errno.desc()));
    }
    if let Some(mems) = &binding.mems {
        set_memory(binding.memory_policy, mems, &mut notes);
    }
    let cpus = own_cpus().unwrap_or_else(|errno| {
        notes.push(format!("CPUs could not be read back: {}", errno.desc()));
        CpuSet::new()
    });
    if let Some(asked) = &binding.cpus
        && notes.is_empty()
        && *asked != cpus
    {
        notes.push(format!("CPUs {asked} were asked for, {cpus} are in force"));
    }
    // The default policy needs no check, and a kernel without NUMA is not an error.
    let mems = memory_nodes().unwrap_or_default();
    InForce { cpus, mems, notes }
}

/// Restricts this thread to `cpus`. The kernel ignores CPUs that don't exist, and fails (`EINVAL`)
/// only if none is left, `sched_setaffinity(2)`.
fn set_cpus(cpus: &CpuSet) -> Result<(), Errno> {
    let mask = mask_of(cpus);
    let size = size_of_val(mask.as_slice());
    // SAFETY: `mask` outlives the call and has `size` bytes, which the kernel only reads.
    let result = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, mask.as_ptr()) };
    Errno::result(result).map(drop)
}

fn own_cpus() -> Result<CpuSet, Errno> {
    let mut mask = [0u64; LIMIT as usize / 64];
    let size = size_of_val(&mask);
    // SAFETY: `mask` outlives the call and has `size` bytes, which the kernel only writes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size, mask.as_mut_ptr()) };
    Errno::result(result)?;
    Ok(set_of(&mask))
}

/// Sets the memory policy; a refusal by the kernel or a sandbox becomes a note.
fn set_memory(policy: MemoryPolicy, mems: &NodeSet, notes: &mut Vec<String>) {
    let applied = match policy {
        MemoryPolicy::None => return,
        MemoryPolicy::Bind => set_mempolicy(MPOL_BIND, mems),
        MemoryPolicy::Preferred => match set_mempolicy(MPOL_PREFERRED_MANY, mems) {
            // Before Linux 5.15 only one node can be preferred. The kernel gives the same error for
            // nodes that don't exist; then the second call fails too.
            Err(Errno::EINVAL) => {
                let first: NodeSet = mems.first().into_iter().collect();
                let applied = set_mempolicy(MPOL_PREFERRED, &first);
                if applied.is_ok() && first != *mems {
                    notes.push(format!("of memory nodes {mems} only {first} could be preferred"));
                }
                applied
            }
            applied => applied,
        },
    };
    if let Err(errno) = applied {
        notes.push(format!("memory nodes {mems} could not be set: {}", errno.desc()));
    }
}

fn set_mempolicy(mode: libc::c_int, nodes: &NodeSet) -> Result<(), Errno> {
    let mask = mask_of(nodes);
    // One bit more than the mask has, because the kernel subtracts one, `set_mempolicy(2)` "BUGS".
    let bits = mask.len() * 64 + 1;
    // SAFETY: `mask` outlives the call and has at least `bits - 1` bits, which it only reads.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), bits) };
    Errno::result(result).map(drop)
}

/// The nodes of this thread's memory policy; none for the default policy.
fn memory_nodes() -> Result<NodeSet, Errno> {
    let mut mode: libc::c_int = MPOL_DEFAULT;
    let mut mask = [0u64; 1024 / 64];
    let bits = mask.len() * 64;
    // SAFETY: `mode` and `mask` outlive the call, `mask` has `bits` bits, the kernel only writes;
    // with flags 0 the address (null) is not used.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            bits,
            std::ptr::null::<libc::c_void>(),
            0,
        )
    };
    Errno::result(result)?;
    Ok(if mode == MPOL_DEFAULT { NodeSet::new() } else { set_of(&mask) })
}

fn mask_of<Kind>(set: &IdSet<Kind>) -> Vec<u64> {
    let words = set.iter().last().map_or(1, |last| last as usize / 64 + 1);
    let mut mask = vec![0u64; words];
    for id in set.iter() {
        mask[id as usize / 64] |= 1 << (id % 64);
    }
    mask
}

fn set_of<Kind>(mask: &[u64]) -> IdSet<Kind> {
    let bits = (0u32..).zip(mask.iter().flat_map(|word| (0..64).map(move |bit| word >> bit & 1)));
    bits.filter(|(_, set)| *set == 1).map(|(id, _)| id).collect()
}

/// Reads the binding of every thread of a process (`/proc/PID/task/*/status`) and the nodes of its
/// pages (`numa_maps`).
///
/// # Errors
/// If the process is gone or another user's.
pub fn observe(pid: u32, asked: &Binding) -> io::Result<Observed> {
    let process = Path::new("/proc").join(pid.to_string());
    let mut seen = Observed {
        threads: 0,
        cpus: CpuSet::new(),
        threads_outside: 0,
        local_memory: local_share(&process, asked),
    };
    for thread in fs::read_dir(process.join("task"))? {
        // Ignore threads that have ended since the directory was read.
        let Ok(status) = fs::read_to_string(thread?.path().join("status")) else { continue };
        let Some(cpus) = allowed_cpus(&status) else { continue };
        seen.threads += 1;
        let inside = asked.cpus.as_ref().is_none_or(|asked| cpus.is_subset(asked));
        seen.threads_outside += usize::from(!inside);
        seen.cpus = seen.cpus.union(&cpus);
    }
    Ok(seen)
}

fn allowed_cpus(status: &str) -> Option<IdSet<Cpu>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    list.trim().parse().ok()
}

fn local_share(process: &Path, asked: &Binding) -> Option<f64> {
    let nodes = asked.mems.as_ref().filter(|nodes| !nodes.is_empty())?;
    let maps = fs::read_to_string(process.join("numa_maps")).ok()?;
    share_on(nodes, &maps)
}

/// The share of pages on `nodes` in a `numa_maps` text: fields such as `N0=12` count pages, and
/// `kernelpagesize_kB=4` gives their size, proc(5).
fn share_on(nodes: &NodeSet, maps: &str) -> Option<f64> {
    let (mut local, mut all) = (0.0, 0.0);
    for line in maps.lines() {
        let size = line.split(' ').find_map(|field| field.strip_prefix("kernelpagesize_kB="));
        let size: f64 = size.and_then(|size| size.parse().ok()).unwrap_or(4.0);
        let pages = line.split(' ').filter_map(|field| field.strip_prefix('N')?.split_once('='));
        for (node, count) in pages {
            let (Ok(node), Ok(count)) = (node.parse::<u32>(), count.parse::<f64>()) else {
                continue;
            };
            all += count * size;
            local += if nodes.contains(node) { count * size } else { 0.0 };
        }
    }
    (all > 0.0).then(|| local / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_local_pages_counts_bytes_not_pages() {
        let maps = "\
7f00 default anon=4 dirty=4 N0=4 kernelpagesize_kB=4
7f01 prefer:1 anon=1 N1=1 kernelpagesize_kB=16
7f02 default file=/lib/Name=with N2=oddities
";
        let nodes: NodeSet = "1".parse().expect("a set");
        assert_eq!(share_on(&nodes, maps), Some(0.5));
        assert_eq!(share_on(&nodes, ""), None);
    }

    #[test]
    fn a_thread_of_this_process_is_where_it_is_said_to_be() {
        let seen = observe(std::process::id(), &Binding::default()).expect("this process");
        assert!(seen.threads >= 1);
        assert_eq!(seen.threads_outside, 0);
        assert_eq!(seen.cpus, own_cpus().expect("this thread's"));
    }

    #[test]
    fn a_mask_survives_its_words() {
        let set: CpuSet = "0,63-64,1000".parse().expect("a set");
        assert_eq!(set_of::<Cpu>(&mask_of(&set)), set);
        assert_eq!(mask_of(&CpuSet::new()), [0]);
    }
}
