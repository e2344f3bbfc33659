//! What a description of a machine knows of its PCI switches, and the machine itself does not show.
//!
//! Virtual machines put every device at a root port of their own, and a container may lack sysfs;
//! then what reads sysfs, as NCCL does, takes each device for one beside the CPU.
//!
//! *Invariant:* a device keeps the address that it has on the machine, and one that is not there is
//! left out.

use std::collections::BTreeMap;

use super::{Ancestry, Bridge, BridgeKind, Gpu, Nic, Topology};
use crate::ids::PciAddress;

/// Where bridges are put that the machine does not have: no device is on the last bus of the last
/// domain. Files for clouds' machines do the same.
const NOWHERE: &str = "ffff:ff";

/// The most bridges that have a place there.
const MOST: usize = 32 * 8;

impl Topology {
    /// This description by the addresses of `here`, of what is there, if it has switches above
    /// GPUs that are there and `here` shows no bridges above those.
    pub fn hidden_from(&self, here: &Topology) -> Option<Topology> {
        let (known, shown) = (self.ancestry(), here.ancestry());
        let hidden = |(gpu, own): (&Gpu, &Gpu)| {
            has_switches(&known, gpu.parent.as_deref())
                && !has_switches(&shown, own.parent.as_deref())
        };
        if !self.both(here).any(hidden) || self.bridges.len() > MOST {
            return None;
        }
        let gpus: Vec<Gpu> = self.both(here).map(|(gpu, own)| placed(gpu, own, here)).collect();
        let nics: Vec<Nic> = self.nics.iter().filter_map(|nic| nic_there(nic, here)).collect();
        let mut moved = Topology { gpus, nics, numa: here.numa.clone(), ..self.clone() };
        if self.both(here).any(|(gpu, own)| gpu.pci != own.pci) {
            moved.move_bridges();
        }
        Some(moved)
    }

    /// The GPUs of this description that are in `here`, with what they are there.
    fn both<'a>(&'a self, here: &'a Topology) -> impl Iterator<Item = (&'a Gpu, &'a Gpu)> {
        self.gpus.iter().filter_map(|gpu| {
            let uuid = gpu.uuid.as_ref()?;
            let own = here.gpus.iter().find(|own| own.uuid.as_ref() == Some(uuid))?;
            own.pci.is_some().then_some((gpu, own))
        })
    }

    /// Puts the bridges where no device of the machine can be.
    fn move_bridges(&mut self) {
        let names: BTreeMap<String, String> = (self.bridges.iter().enumerate())
            .map(|(at, bridge)| (bridge.id.clone(), format!("{NOWHERE}:{:02x}.{}", at / 8, at % 8)))
            .collect();
        let moved = |id: &mut Option<String>| {
            *id = id.as_ref().and_then(|id| names.get(id).cloned());
        };
        for Bridge { id, parent, .. } in &mut self.bridges {
            if let Some(name) = names.get(id) {
                id.clone_from(name);
            }
            moved(parent);
        }
        self.gpus.iter_mut().for_each(|gpu| moved(&mut gpu.parent));
        self.nics.iter_mut().for_each(|nic| moved(&mut nic.parent));
    }
}

/// Whether there is a switch above what is attached to `parent`.
fn has_switches(ancestry: &Ancestry<'_>, parent: Option<&str>) -> bool {
    let above = ancestry.above(parent);
    let of_switch =
        |kind| matches!(kind, BridgeKind::SwitchUp | BridgeKind::SwitchDown | BridgeKind::Bridge);
    above.iter().any(|bridge| of_switch(bridge.kind))
}

/// A GPU as it is known, where it is here.
fn placed(known: &Gpu, own: &Gpu, here: &Topology) -> Gpu {
    let node = known.numa.filter(|node| here.numa_node(*node).is_some());
    Gpu { index: own.index, pci: own.pci, numa: own.numa.or(node), ..known.clone() }
}

/// A NIC as it is known, where it is here; `None` if it is not here.
fn nic_there(known: &Nic, here: &Topology) -> Option<Nic> {
    let own = here.nics.iter().find(|own| own.name == known.name)?;
    let pci: PciAddress = own.pci?;
    let node = known.numa.filter(|node| here.numa_node(*node).is_some());
    // NCCL finds DMA functions by their driver.
    Some(Nic { pci: Some(pci), numa: own.numa.or(node), dma: None, ..known.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{builtin, parse};

    fn known() -> Topology {
        parse(builtin("dgx-h100").expect("built in")).expect("right")
    }

    /// The same machine as a guest sees it: no switches, other addresses, one adapter less.
    fn guest(known: &Topology) -> Topology {
        let mut guest = known.clone();
        guest.bridges.clear();
        guest.nics.truncate(7);
        for (at, gpu) in guest.gpus.iter_mut().enumerate() {
            gpu.parent = None;
            gpu.pci = format!("0000:00:{at:02x}.0").parse().ok();
        }
        for (at, nic) in guest.nics.iter_mut().enumerate() {
            nic.parent = None;
            nic.pci = format!("0000:01:{at:02x}.0").parse().ok();
        }
        guest
    }

    #[test]
    fn what_a_guest_hides_is_told_by_its_addresses() {
        let known = known();
        let guest = guest(&known);
        let told = known.hidden_from(&guest).expect("hidden");
        let places = |of: &Topology| of.gpus.iter().map(|gpu| gpu.pci).collect::<Vec<_>>();
        assert_eq!((places(&told), told.nics.len()), (places(&guest), 7));
        let text = told.to_nccl().expect("addresses");
        assert!(
            text.contains(r#"<pci busid="ffff:ff:"#) && text.contains("0000:01:06.0"),
            "{text}"
        );
        for old in known.bridges.iter().filter(|one| one.kind != BridgeKind::Host) {
            assert!(!text.contains(&format!("\"{}\"", old.id)), "{} is no place here", old.id);
        }
        // The same pairs share switches.
        let shared = |of: &Topology, nic: usize| {
            let ancestry = of.ancestry();
            let above = ancestry.above(of.nics[nic].parent.as_deref());
            let own = ancestry.above(of.gpus[nic].parent.as_deref());
            above.iter().filter(|one| own.iter().any(|other| other.id == one.id)).count()
        };
        assert!((0..7).all(|at| shared(&told, at) == shared(&known, at)));
        assert!((0..7).any(|at| shared(&told, at) > 1), "some GPU and NIC share a switch");
    }

    #[test]
    fn a_container_without_sysfs_keeps_every_address() {
        let known = known();
        let mut here = known.clone();
        here.bridges.clear();
        let told = known.hidden_from(&here).expect("hidden");
        assert_eq!((&told.bridges, &told.gpus), (&known.bridges, &known.gpus));
    }

    #[test]
    fn where_the_machine_shows_its_switches_or_is_another_one_nothing_is_told() {
        let known = known();
        assert_eq!(known.hidden_from(&known), None);
        let mut other = guest(&known);
        other.gpus.iter_mut().for_each(|gpu| gpu.uuid = None);
        assert_eq!(known.hidden_from(&other), None, "not these GPUs");
        let mut flat = known.clone();
        flat.bridges.clear();
        assert_eq!(flat.hidden_from(&guest(&known)), None, "knows no more");
    }
}
