//! Story: a person looks at the machine in front of them, whatever it is.

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::probe::{self, Libraries, Options};

#[test]
fn this_machine_has_processors_that_this_process_may_use() {
    let options = Options { nvml: Libraries::None, ..Options::default() };
    let machine = probe::probe(&options).expect("no driver is asked for").topology;
    let cpus = machine.cpus().expect("Linux tells its CPUs");
    let allowed = machine.allowed.expect("Linux tells what is allowed");
    assert!(!allowed.cpus.is_empty());
    assert!(allowed.cpus.is_subset(&cpus), "{} of {cpus}", allowed.cpus);
    let in_cores = machine.cores.iter().fold(CpuSet::new(), |all, core| all.union(core));
    assert!(in_cores.is_subset(&cpus));
    assert!(machine.numa.iter().any(|node| node.memory_bytes.is_some_and(|bytes| bytes > 1 << 28)));
}
