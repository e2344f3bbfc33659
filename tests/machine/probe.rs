//! A person inspects their machine, whatever it is.

#![allow(clippy::unwrap_used)]

use crate::fake_machine;
use std::fs;

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::ids::GpuIndex;
use cuda_cluster::probe::{self, Libraries, Options};
use cuda_cluster::topology::{self, Device, DmaFunction, LinkKind, Nic, NicKind, Topology};

use crate::fake_machine::{FakeMachine, random};
use proptest::prelude::*;

/// A machine of the catalogue.
fn builtin(name: &str) -> Topology {
    topology::parse(topology::builtin(name).unwrap()).unwrap()
}

/// Removes what a live probe cannot or need not reproduce from a file. This list is the whole
/// difference: everything else must be equal.
fn comparable(machine: &Topology) -> Topology {
    let mut machine = machine.clone();
    // Where the facts come from.
    machine.source = None;
    // The files describe hardware; the driver is whatever is installed.
    (machine.driver, machine.cuda) = (None, None);
    // A file without limits allows everything; a process always has limits.
    let everything = fake_machine::everything(&machine);
    machine.allowed.get_or_insert(everything);
    // Notes are about the source.
    machine.notes.clear();
    // Any order with parents first will do.
    machine.bridges.sort_by(|a, b| a.id.cmp(&b.id));
    machine
}

fn assert_seen_as_described(seen: &Topology, described: &Topology) {
    let (seen, described) = (comparable(seen), comparable(described));
    let name = described.name.as_deref().unwrap_or_default();
    // Compare the texts first: their difference is readable.
    assert_eq!(seen.to_yaml(), described.to_yaml(), "{name}");
    assert_eq!(seen, described, "{name}");
}

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

#[test]
fn every_machine_of_the_catalogue_is_seen_as_it_is_described() {
    for name in topology::builtin_names() {
        let described = builtin(name);
        let dir = tempfile::tempdir().unwrap();
        let seen = FakeMachine::write(&described, dir.path()).unwrap().seen();
        assert_seen_as_described(&seen, &described);
        // No fall-back was needed; the only notes are about narrow links.
        let narrow = |text: &str| text.starts_with("its PCIe link runs at");
        let notes = seen.notes.iter().filter(|note| !narrow(&note.text));
        assert_eq!(notes.collect::<Vec<_>>(), Vec::<&topology::Note>::new(), "{name}");
    }
}

#[test]
fn an_ordinary_user_sees_the_same_tree_as_root() {
    for name in topology::builtin_names() {
        let described = builtin(name);
        let dir = tempfile::tempdir().unwrap();
        let fake = FakeMachine::write(&described, dir.path()).unwrap();
        for bridge in described.bridges.iter().filter(|bridge| bridge.parent.is_some()) {
            let config = fake.function(&bridge.id).join("config");
            let whole = fs::read(&config).unwrap();
            fs::write(&config, &whole[..64]).unwrap();
        }
        assert_seen_as_described(&fake.seen(), &described);
    }
}

/// The tray as it is seen after its vital product data were spoiled, and the note about them.
fn spoiled_data(spoil: impl Fn(&FakeMachine)) -> (Topology, Option<String>) {
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeMachine::write(&builtin("gb300-nvl72-tray"), dir.path()).unwrap();
    spoil(&fake);
    let seen = fake.seen();
    let note = seen.notes.iter().find(|note| note.text.contains("vital product data"));
    let note = note.map(|note| note.text.clone());
    (seen, note)
}

#[test]
fn an_adapter_of_the_baseboard_is_known_by_its_subsystem_or_its_data() {
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeMachine::write(&builtin("aws-p6-b200"), dir.path()).unwrap();
    let kind = || fake.seen().nics.iter().find(|nic| nic.name == "ibp115s0f0").unwrap().kind;
    let adapter = fake.function("0000:73:00.0");
    assert_eq!(kind(), NicKind::SwitchManager);
    fs::write(adapter.join("subsystem_device"), "0x0023\n").unwrap();
    assert_eq!(kind(), NicKind::Physical, "any ConnectX-7");
    fs::write(adapter.join("vpd"), b"\x90\x10\0VB\x0dSMDL=SW_MNG\0\0\x78").unwrap();
    assert_eq!(kind(), NicKind::SwitchManager);
    // A network's adapter has more lanes, and its data are not read.
    fs::write(adapter.join("current_link_width"), "16\n").unwrap();
    assert_eq!(kind(), NicKind::Physical);
}

#[test]
fn dma_functions_are_known_by_the_card_that_their_data_name() {
    let dma = |seen: &Topology, at: usize| seen.nics[at].dma.clone();
    let untold = Some(DmaFunction::default());
    let (whole, note) = spoiled_data(|_| {});
    let described = builtin("gb300-nvl72-tray");
    assert_eq!((&whole.nics, note), (&described.nics, None));
    // A file that is there and says nothing.
    let (seen, note) = spoiled_data(|fake| {
        fs::write(fake.function("0009:03:00.0").join("vpd"), [0x90, 0xff, 0xff, b'V']).unwrap();
    });
    assert_eq!(dma(&seen, 3), untold);
    assert_eq!(dma(&seen, 0), dma(&whole, 0), "it names a function that says the same");
    let text = "which of ibp3s0 has which of the DMA functions beside GPUs";
    assert!(note.is_some_and(|note| note.starts_with(text) && note.ends_with("do not tell it")));
    // None at all, as in a container with a sysfs of its own.
    let (seen, note) = spoiled_data(|fake| {
        for nic in ["0000:03:00.0", "0002:03:00.0", "0010:03:00.0", "0012:03:00.0"] {
            fs::remove_file(fake.function(nic).join("vpd")).unwrap();
        }
    });
    assert!((0..4).all(|at| dma(&seen, at) == untold));
    assert!(note.is_some());
    // The way to the GPU is then the NIC's own.
    let gpu = Device::Gpu(GpuIndex(1));
    assert_eq!(whole.links.between(gpu, Device::Nic(3)), Some(LinkKind::Pxb));
    assert_eq!(seen.links.between(gpu, Device::Nic(3)), Some(LinkKind::Node));
}

#[test]
fn drivers_that_tell_less_of_nvlinks_give_the_same_links() {
    for name in ["dgx-1-v100", "dgx-a100", "a100-pcie-4-bridges"] {
        let described = builtin(name);
        let dir = tempfile::tempdir().unwrap();
        let fake = FakeMachine::write(&described, dir.path()).unwrap();
        // Drivers before 470 do not report what an NVLink ends at: its PCI address tells.
        let fake = fake.with_faults("far-ends=untold unsupported=NVML_FI_DEV_NVLINK_GET_SPEED");
        assert_seen_as_described(&fake.seen(), &described);
    }
}

#[test]
fn switches_without_a_place_are_counted_on_the_bus() {
    let described = builtin("dgx-h100");
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeMachine::write(&described, dir.path()).unwrap().with_faults("far-ends=hidden");
    assert_seen_as_described(&fake.seen(), &described);
}

#[test]
fn mig_profiles_follow_from_sizes_when_the_name_does_not_tell() {
    let described = builtin("dgx-a100-mig");
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeMachine::write(&described, dir.path()).unwrap();
    let seen = fake.with_faults("unsupported=nvmlDeviceGetName").seen();
    let profiles = |machine: &Topology| -> Vec<String> {
        let instances = machine.gpus.iter().flat_map(|gpu| &gpu.mig);
        instances.map(|mig| mig.profile.clone()).collect()
    };
    assert_eq!(profiles(&seen), profiles(&described));
}

/// Features that no machine of the catalogue has: limits, software and virtual NICs, bonds,
/// multiple ports, chip-to-chip links, peer access, processes.
const ODD: &str = r#"
version: 1
name: odd
nvswitch: 0
gpus:
  - {index: 0, uuid: GPU-a, name: X, pci: "0000:01:00.0", parent: "0000:00:01.0",
     memory_bytes: 1073741824, compute_capability: "9.0", peers: [1], processes: [11, 4242],
     c2c: {links: 10, gb_per_s: 450}, memory_numa: 5,
     pcie: {gt_per_s: 2.5, width: 16, max_gt_per_s: 32, max_width: 16}}
  - {index: 1, uuid: GPU-b, name: X, pci: "0000:02:00.0", parent: "pci0000:00",
     memory_bytes: 1073741824, compute_capability: "9.0", peers: [0],
     pcie: {gt_per_s: 8, width: 4, max_gt_per_s: 32, max_width: 16}}
nics:
  - {name: mlx4_0, pci: "0000:03:00.0", parent: "0000:00:02.0", ports: [
     {port: 1, state: ACTIVE, link_layer: InfiniBand, rate_gbps: 56, netdev: ib0},
     {port: 2, state: INIT, link_layer: InfiniBand, rate_gbps: 2.5, netdev: ib1}]}
  - {name: mlx5_9, pci: "0000:04:00.0", parent: "0000:00:03.0", ports: [
     {port: 1, state: ACTIVE, link_layer: Ethernet, rate_gbps: 100, netdev: eth2}],
     pcie: {gt_per_s: 8, width: 16, max_gt_per_s: 16, max_width: 16}}
  - {name: mlx5_10, pci: "0000:04:00.2", parent: "0000:00:03.0", kind: virtual_function, ports: [
     {port: 1, state: DOWN, link_layer: Ethernet, rate_gbps: 100, netdev: eth3}]}
  - {name: mlx5_bond_0, pci: "0000:05:00.0", parent: "0000:00:04.0", kind: bond, ports: [
     {port: 1, state: ACTIVE, link_layer: Ethernet, rate_gbps: 200, netdev: bond0}]}
  - {name: rocep6s0, pci: "0000:06:00.0", parent: "0000:00:05.0", kind: bond_slave, ports: [
     {port: 1, state: ARMED, link_layer: Ethernet, rate_gbps: 25, netdev: ens6}]}
  - {name: rocep7s0, pci: "0000:07:00.0", parent: "0000:00:05.0", kind: bond_slave, ports: [
     {port: 1, state: ACTIVE, link_layer: Ethernet, rate_gbps: 25, netdev: ens7}]}
  - {name: rxe0, pci: null, kind: software, ports: [
     {port: 1, state: ACTIVE, link_layer: Ethernet, rate_gbps: 2.5, netdev: null}]}
numa:
  - {id: 0, package: 0, cpus: "0-3", memory_bytes: 1048576}
  - {id: 1, package: 0, cpus: "4-7", memory_bytes: 1048576}
  - {id: 5, package: 0, cpus: "", memory_bytes: 1048576, gpu_memory: true}
cores: ["0,2", "1,3", "4,6", "5,7"]
bridges:
  - {id: "pci0000:00", kind: host, numa: 0, package: 0}
  - {id: "0000:00:01.0", parent: "pci0000:00", kind: root_port}
  - {id: "0000:00:02.0", parent: "pci0000:00", kind: root_port}
  - {id: "0000:00:03.0", parent: "pci0000:00", kind: root_port}
  - {id: "0000:00:04.0", parent: "pci0000:00", kind: bridge}
  - {id: "0000:00:05.0", parent: "pci0000:00", kind: root_port, numa: 1}
allowed: {cpus: "1-2,5", mems: "0"}
"#;

#[test]
fn an_odd_machine_is_seen_as_it_is_described() {
    let described = topology::parse(ODD).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let seen = FakeMachine::write(&described, dir.path()).unwrap().seen();
    assert_seen_as_described(&seen, &described);
    let notes: Vec<String> = seen.notes.iter().map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "GPU1: its PCIe link runs at 8 GT/s ×4 now; it can do 32 GT/s ×16 \
             (an idle GPU lowers the speed, not the lanes)",
            "mlx5_9: its PCIe link runs at 8 GT/s ×16 now; it can do 16 GT/s ×16",
        ]
    );
}

proptest! {
    #[test]
    fn a_nic_is_as_near_as_the_nearer_of_its_functions(
        bytes in proptest::collection::vec(any::<u8>(), 97)
    ) {
        let machine = random::machine(&mut random::Dice::new(&bytes));
        let (mut own, mut moved) = (machine.clone(), machine.clone());
        for (own, moved) in own.nics.iter_mut().zip(&mut moved.nics) {
            if let Some(dma) = own.dma.take() {
                *moved = Nic { parent: dma.parent, numa: None, dma: None, ..moved.clone() };
            }
        }
        let (own, moved) = (own.derive_links(), moved.derive_links());
        for (a, b, kind) in machine.links.iter() {
            let between_both = matches!((a, b), (Device::Gpu(_), Device::Nic(_)));
            let nearer = own.between(a, b).into_iter().chain(moved.between(a, b)).min();
            let expected = if between_both { nearer } else { own.between(a, b) };
            prop_assert_eq!(Some(kind), expected, "{} {}", a, b);
        }
    }
}

proptest! {
    // Every case starts a process.
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_machine_is_seen_as_it_is_described(bytes in proptest::collection::vec(any::<u8>(), 97)) {
        let described = random::machine(&mut random::Dice::new(&bytes));
        let dir = tempfile::tempdir().unwrap();
        let seen = FakeMachine::write(&described, dir.path()).unwrap().seen();
        assert_seen_as_described(&seen, &described);
    }
}
