//! The CPUs and memory nodes that this process may use, and its memory policy.
//!
//! Sets nothing; the shim of each process does. Can't tell which mechanism restricts the process:
//! affinity and cgroup cpuset look the same from here.
//!
//! *Invariant:* what the kernel does not report is `None`, not everything.

#![allow(unsafe_code)]

use std::path::Path;

use nix::libc::{self, c_int, c_ulong};

use crate::status::field;
use cuda_cluster_model::cpuset::NodeSet;
use cuda_cluster_model::topology::Allowed;

/// Reads `self/status` below `procfs`, where the kernel has already intersected the affinity mask
/// (what `sched_getaffinity` answers) with the cgroup's cpuset.
pub(super) fn allowed(procfs: &Path) -> Option<Allowed> {
    let status = std::fs::read_to_string(procfs.join("self/status")).ok()?;
    parse(&status)
}

fn parse(status: &str) -> Option<Allowed> {
    let cpus = field(status, "Cpus_allowed_list")?.parse().ok()?;
    let mems = field(status, "Mems_allowed_list")?.parse().ok()?;
    Some(Allowed { cpus, mems })
}

/// Room for 1024 NUMA nodes, the kernel's largest `MAX_NUMNODES`.
const WORDS: usize = 16;

/// The memory policy with which this process was started, in the words of `numactl`: `bind 1`,
/// `interleave 0-3`. `None` for the default.
pub(super) fn memory_policy() -> Option<String> {
    let mut mode: c_int = 0;
    let mut nodes: [c_ulong; WORDS] = [0; WORDS];
    let bits = WORDS * 64;
    // SAFETY: the kernel writes one `int` and at most `bits` bits (mm/mempolicy.c,
    // `kernel_get_mempolicy`); without flags it takes no address.
    let done = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            nodes.as_mut_ptr(),
            bits,
            std::ptr::null_mut::<libc::c_void>(),
            0,
        )
    };
    if done != 0 {
        return None;
    }
    shown(mode, &nodes)
}

/// A policy in the words of `numactl`; the numbers are those of `linux/mempolicy.h`.
fn shown(mode: c_int, nodes: &[c_ulong]) -> Option<String> {
    // The upper bits are flags.
    let word = match mode & 0xfff {
        1 => "preferred",
        2 => "bind",
        3 => "interleave",
        5 => "preferred-many",
        6 => "weighted-interleave",
        // Default and local are the usual policies.
        _ => return None,
    };
    let bits = (0u32..).step_by(64).zip(nodes);
    let nodes: NodeSet = bits
        .flat_map(|(base, word)| {
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| base + bit)
        })
        .collect();
    Some(format!("{word} {nodes}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_as_numactl_names_them() {
        assert_eq!(shown(2, &[0b10]), Some("bind 1".to_owned()));
        assert_eq!(shown(3, &[0b1111]), Some("interleave 0-3".to_owned()));
        assert_eq!((shown(0, &[0]), shown(4, &[0])), (None, None));
    }

    #[test]
    fn the_kernels_status_file_tells_cpus_and_memory() {
        let status =
            "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,8\nMems_allowed_list:\t0\n";
        let allowed = parse(status).unwrap();
        assert_eq!(
            (allowed.cpus.to_string(), allowed.mems.to_string()),
            ("0-3,8".into(), "0".into())
        );
        assert_eq!(parse("Name:\tx\n"), None);
    }
}
