//! What this process may use of the machine: `Cpus_allowed_list` and `Mems_allowed_list`.
//!
//! Does not tell who restricted it; affinity and cgroup cpuset look the same from here.
//!
//! *Invariant:* what the kernel does not tell is `None`, not everything.

use std::path::Path;

use crate::topology::Allowed;

/// Reads `self/status` below `procfs`, where the kernel has already intersected the affinity mask
/// (what `sched_getaffinity` answers) with the cgroup's cpuset.
pub(super) fn of_this_process(procfs: &Path) -> Option<Allowed> {
    let status = std::fs::read_to_string(procfs.join("self/status")).ok()?;
    parse(&status)
}

fn parse(status: &str) -> Option<Allowed> {
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let cpus = field("Cpus_allowed_list")?.parse().ok()?;
    let mems = field("Mems_allowed_list")?.parse().ok()?;
    Some(Allowed { cpus, mems })
}

#[cfg(test)]
mod tests {
    use super::*;

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
