//! What each link carries by itself, whoever uses it.
//!
//! *Invariant:* a rate is the capacity that the predictions of copies count with.

use super::ways::{Part, Parts, is_switched};
use crate::topology::{Device, Gpu, LinkKind, LinkRates, Topology};

/// What the links of a machine should carry, as far as the topology tells.
pub fn link_rates(topology: &Topology) -> LinkRates {
    let mut parts = Parts::of(topology);
    let mut rates = LinkRates::default();
    for device in topology.devices() {
        let rate = parts.capacity(&Part::Pcie(device));
        rates.devices.extend(rate.map(|rate| (device, rate)));
    }
    for bridge in &topology.bridges {
        if !parts.is_uplink(bridge) {
            continue;
        }
        let rate = parts.capacity(&Part::Uplink(bridge.id.clone()));
        rates.uplinks.extend(rate.map(|rate| (bridge.id.clone(), rate)));
    }
    rates.sockets = parts.capacity(&Part::Sockets);
    for gpu in topology.gpus.iter().filter(|gpu| is_switched(gpu)) {
        let rate = parts.capacity(&Part::Switched(gpu.index));
        rates.switched.extend(rate.map(|rate| (gpu.index, rate)));
    }
    for gpu in &topology.gpus {
        let rate = parts.to_cpu(gpu).and_then(|part| parts.capacity(&part));
        rates.chips.extend(rate.map(|rate| (gpu.index, rate)));
    }
    let find = |device| match device {
        Device::Gpu(index) => topology.gpus.iter().find(|gpu| gpu.index == index),
        Device::Nic(_) => None,
    };
    for (a, b, kind) in topology.links.iter() {
        let (Some(a), Some(b), LinkKind::Nv(_)) = (find(a), find(b), kind) else { continue };
        let rate = between(&mut parts, a, b);
        rates.pairs.extend(rate.map(|rate| ((a.index, b.index), rate)));
    }
    rates
}

/// What the NVLinks of a pair carry: the narrower end where they meet at NVSwitches.
fn between(parts: &mut Parts<'_>, a: &Gpu, b: &Gpu) -> Option<f64> {
    let (ups, downs) = parts.over_nvlinks(a, b);
    let rates = ups.iter().chain(&downs).map(|part| parts.capacity(part));
    rates.collect::<Option<Vec<f64>>>()?.into_iter().min_by(f64::total_cmp)
}
