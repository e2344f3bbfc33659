//! What a plan of another machine is cut down to: this machine's CPUs, memory and network devices.
//!
//! Cuts nothing itself; `plan::adapt_to_here` does.
//!
//! *Invariant:* what cannot be read counts as not there.

use crate::plan::Here;
use crate::topology::{PortState, Topology};

/// The part of a live topology, and of this machine's network, that a foreign plan depends on.
pub fn here(live: &Topology) -> Here {
    let allowed = live.allowed.clone();
    let cpus = allowed.as_ref().map(|allowed| allowed.cpus.clone()).or_else(|| live.cpus());
    let interfaces = super::caller().interfaces.into_iter().map(|interface| interface.name);
    let ports = live.nics.iter().flat_map(|nic| {
        let active = nic.ports.iter().filter(|port| port.state == Some(PortState::Active));
        active.map(|port| format!("{}:{}", nic.name, port.port))
    });
    Here {
        cpus: cpus.unwrap_or_default(),
        mems: allowed.map(|allowed| allowed.mems).unwrap_or_default(),
        net_devices: interfaces.chain(ports).collect(),
        gpu: !live.gpus.is_empty(),
    }
}
