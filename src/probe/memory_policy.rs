//! The memory policy that this process was started with, as `numactl` sets it.
//!
//! Sets none; the shim of each process does.
//!
//! *Invariant:* the usual policy, and one that the kernel does not tell, are `None`.

#![allow(unsafe_code)]

use nix::libc::{self, c_int, c_ulong};

use crate::cpuset::NodeSet;

/// Room for 1024 NUMA nodes, the kernel's largest `MAX_NUMNODES`.
const WORDS: usize = 16;

/// This process's policy in a word, with its nodes: `bind 1`, `interleave 0-3`.
pub(super) fn inherited() -> Option<String> {
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
        // Default and local are what processes have anyway.
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
}
