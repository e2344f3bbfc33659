//! Looks at this machine: NVML for GPUs, hwloc for CPUs and NUMA nodes, sysfs for PCI and NICs.
//!
//! Decides nothing. What could not be read becomes a note on the topology.
//!
//! *Invariant:* the answer states what was read, and notes what was not.
