//! The text forms of a topology: what is written reads back, as far as the form can express it.

use std::collections::BTreeMap;

use cuda_cluster::ids::{GpuIndex, PciAddress};
use cuda_cluster::predict::link_rates;
use cuda_cluster::topology::{
    Device, Gpu, LinkKind, Links, Nic, Note, Port, Topology, builtin, builtin_names, parse,
};
use proptest::prelude::*;

fn machine(name: &str) -> Topology {
    parse(builtin(name).expect(name)).expect(name)
}

fn machines() -> impl Iterator<Item = (&'static str, Topology)> {
    builtin_names().map(|name| (name, machine(name)))
}

fn json(topology: &Topology) -> String {
    serde_json::to_string_pretty(topology).expect("a topology is JSON")
}

/// What the matrix can express of a topology.
fn as_matrix(topology: &Topology) -> Topology {
    let gpu = |gpu: &Gpu| Gpu {
        index: gpu.index,
        numa: gpu.numa,
        numa_set: gpu.numa_set.clone(),
        cpus: gpu.cpus.clone(),
        memory_numa: gpu.memory_numa,
        ..Gpu::default()
    };
    let nic = |nic: &Nic| Nic { name: nic.name.clone(), ..Nic::default() };
    Topology {
        version: topology.version,
        source: Some("nvidia-smi topo -m".to_owned()),
        gpus: topology.gpus.iter().map(gpu).collect(),
        nics: topology.nics.iter().map(nic).collect(),
        links: topology.links.clone(),
        ..Topology::default()
    }
}

#[test]
fn yaml_and_json_say_everything() {
    for (name, topology) in machines() {
        assert_eq!(parse(&topology.to_yaml()), Ok(topology.clone()), "{name}");
        assert_eq!(parse(&json(&topology)), Ok(topology), "{name}");
    }
}

#[test]
fn the_matrix_says_links_affinities_and_names() {
    for (name, topology) in machines() {
        assert_eq!(parse(&topology.to_matrix()), Ok(as_matrix(&topology)), "{name}");
    }
}

#[test]
fn nccls_form_says_devices_places_and_links_but_not_host_bridges() {
    for (name, topology) in machines() {
        let text = topology.to_nccl().expect(name);
        assert!(text.starts_with("<system version=\"1\">\n"), "{name}");
        assert!(!text.contains('\t'), "{name}");
        let read = parse(&text).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"));
        // NCCL knows one host bridge for each NUMA node.
        let links = |topology: &Topology| -> BTreeMap<(String, String), LinkKind> {
            let called = |device: Device| match device {
                Device::Gpu(index) => format!("GPU{index}"),
                Device::Nic(at) => topology.nics[at as usize].name.clone(),
            };
            let kind = |kind: LinkKind| if kind == LinkKind::Node { LinkKind::Phb } else { kind };
            let pair = |(a, b, link): (Device, Device, LinkKind)| {
                let (a, b) = (called(a), called(b));
                ((a.clone().min(b.clone()), a.max(b)), kind(link))
            };
            topology.links.iter().map(pair).collect()
        };
        assert_eq!(links(&read), links(&topology), "{name}");
        let gpus = |topology: &Topology| -> Vec<_> {
            let gpus = topology.gpus.iter();
            gpus.map(|gpu| {
                let active = gpu.nvlinks.iter().filter(|link| link.active).count();
                let sm = gpu.compute_capability;
                (gpu.index, gpu.pci, gpu.numa, gpu.cpus.clone(), sm, active)
            })
            .collect()
        };
        assert_eq!(gpus(&read), gpus(&topology), "{name}");
        let nics = |topology: &Topology| -> BTreeMap<String, _> {
            let rates = |ports: &[Port]| -> Vec<_> {
                ports
                    .iter()
                    .map(|port| (port.port, port.rate_gbps.map(|rate| rate.to_bits())))
                    .collect()
            };
            let nics = topology.nics.iter();
            nics.map(|nic| (nic.name.clone(), (nic.pci, nic.numa, rates(&nic.ports)))).collect()
        };
        assert_eq!(nics(&read), nics(&topology), "{name}");
    }
}

#[test]
fn a_machine_without_addresses_is_not_written_for_nccl() {
    let read = parse(&machine("dgx-1-v100").to_matrix()).expect("a matrix");
    let refusal = read.to_nccl().expect_err("no addresses").to_string();
    assert!(refusal.contains("the PCI address of GPU0 is unknown"), "{refusal}");
}

#[test]
fn pictures_and_graphs_are_well_formed_and_show_every_device() {
    for (name, topology) in machines() {
        let without = parse(&topology.to_matrix()).expect(name);
        for topology in [topology, without] {
            let svg = topology.to_svg_with(&[], &link_rates(&topology));
            roxmltree::Document::parse(&svg).expect(name);
            let (dot, tree) = (topology.to_dot(), topology.to_tree());
            assert_eq!(dot.matches('{').count(), dot.matches('}').count(), "{name}");
            for nic in &topology.nics {
                assert!(svg.contains(&nic.name) && dot.contains(&nic.name), "{name}: {}", nic.name);
                assert!(tree.contains(&nic.name), "{name}: {}", nic.name);
            }
            for gpu in &topology.gpus {
                let gpu = format!("GPU{}", gpu.index);
                assert!(svg.contains(&gpu) && dot.contains(&gpu) && tree.contains(&gpu), "{name}");
            }
        }
    }
}

#[test]
fn trees_are_as_people_draw_them() {
    for name in
        ["dgx-1-v100", "dgx-h100", "dgx-a100-mig", "gb300-nvl72-tray", "ibm-ac922", "rtx-4090-2"]
    {
        insta::assert_snapshot!(format!("tree-{name}"), machine(name).to_tree());
    }
}

#[test]
fn a_captured_file_is_pleasant_to_read() {
    insta::assert_snapshot!("yaml-a100-pcie-4-bridges", machine("a100-pcie-4-bridges").to_yaml());
    insta::assert_snapshot!("nccl-dgx-h100", machine("dgx-h100").to_nccl().expect("places"));
}

/// The machine with its GPUs and NICs in another order, renumbered.
fn shuffled(topology: &Topology, gpus: &[usize], nics: &[usize]) -> Topology {
    let gpu =
        |(at, from): (u32, &usize)| Gpu { index: GpuIndex(at), ..topology.gpus[*from].clone() };
    Topology {
        gpus: (0u32..).zip(gpus).map(gpu).collect(),
        nics: nics.iter().map(|from| topology.nics[*from].clone()).collect(),
        links: Links::default(),
        ..topology.clone()
    }
}

/// Where each device of the original went.
fn renumbered(gpus: &[usize], nics: &[usize]) -> impl Fn(Device) -> Device {
    let (gpus, nics) = (gpus.to_vec(), nics.to_vec());
    move |device| {
        let at = |order: &[usize], old: u32| {
            let found = order.iter().position(|from| *from == old as usize);
            u32::try_from(found.expect("a permutation")).expect("few devices")
        };
        match device {
            Device::Gpu(index) => Device::Gpu(GpuIndex(at(&gpus, index.0))),
            Device::Nic(nic) => Device::Nic(at(&nics, nic)),
        }
    }
}

fn any_order(length: usize) -> impl Strategy<Value = Vec<usize>> {
    Just((0..length).collect::<Vec<usize>>()).prop_shuffle()
}

/// A built-in machine with an order for its GPUs and one for its NICs.
fn any_renumbering() -> impl Strategy<Value = (Topology, Vec<usize>, Vec<usize>)> {
    let names: Vec<&str> = builtin_names().collect();
    prop::sample::select(names).prop_flat_map(|name| {
        let topology = machine(name);
        let (gpus, nics) = (topology.gpus.len(), topology.nics.len());
        (Just(topology), any_order(gpus), any_order(nics))
    })
}

/// Any text that a topology may hold as a name.
fn any_name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z][a-z0-9_]{0,12}",
        "\\PC{1,12}",
        ".{1,12}",
        Just("no".to_owned()),
        Just("1e3".to_owned())
    ]
}

fn any_kind() -> impl Strategy<Value = LinkKind> {
    use LinkKind::{Node, Nv, Phb, Pix, Pxb, Sys};
    prop_oneof![(1u8..=18).prop_map(Nv), Just(Pix), Just(Pxb), Just(Phb), Just(Node), Just(Sys)]
}

prop_compose! {
    fn any_gpu()(
        numa in prop::option::of(0u32..16),
        cpus in prop::option::of(prop::collection::btree_set(0u32..256, 0..8)),
        memory_bytes in prop::option::of(any::<u64>()),
        name in prop::option::of(any_name()),
        bus in any::<u8>(),
    ) -> Gpu {
        Gpu {
            numa: numa.map(cuda_cluster::ids::NumaId),
            cpus: cpus.map(|cpus| cpus.into_iter().collect()),
            memory_bytes,
            name,
            pci: Some(PciAddress { domain: 0, bus, device: 0, function: 0 }),
            ..Gpu::default()
        }
    }
}

prop_compose! {
    fn any_nic()(
        name in any_name(),
        rate_gbps in prop::option::of(0.0f64..1000.0),
        netdev in prop::option::of(any_name()),
    ) -> Nic {
        let port = Port { port: 1, state: None, link_layer: None, rate_gbps, netdev };
        Nic { name, ports: vec![port], ..Nic::default() }
    }
}

prop_compose! {
    /// Any machine, with any links.
    fn any_topology()(
        gpus in prop::collection::vec(any_gpu(), 0..6),
        nics in prop::collection::vec(any_nic(), 0..6),
    )(
        kinds in prop::collection::vec(prop::option::of(any_kind()), 66),
        notes in prop::collection::vec((any_name(), any_name()), 0..3),
        gpus in Just(gpus),
        nics in Just(nics),
        name in prop::option::of(any_name()),
    ) -> Topology {
        let mut topology = Topology { version: 1, name, gpus, nics, ..Topology::default() };
        for (at, gpu) in (0u32..).zip(&mut topology.gpus) {
            gpu.index = GpuIndex(at);
            gpu.pci = gpu.pci.map(|pci| PciAddress { domain: at, ..pci });
        }
        for (at, nic) in topology.nics.iter_mut().enumerate() {
            nic.name.push_str(&at.to_string());
        }
        topology.notes = notes.into_iter().map(|(about, text)| Note { about, text }).collect();
        let devices: Vec<Device> = topology.devices().collect();
        let mut kinds = kinds.into_iter();
        for (at, a) in devices.iter().enumerate() {
            for b in &devices[at + 1..] {
                if let Some(Some(kind)) = kinds.next() {
                    topology.links.set(*a, *b, kind);
                }
            }
        }
        topology
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn links_are_symmetric(topology in any_topology()) {
        for a in topology.devices() {
            for b in topology.devices() {
                prop_assert_eq!(topology.links.between(a, b), topology.links.between(b, a));
            }
        }
    }

    #[test]
    fn any_machine_survives_yaml_and_json(topology in any_topology()) {
        prop_assert_eq!(parse(&topology.to_yaml()), Ok(topology.clone()));
        prop_assert_eq!(parse(&json(&topology)), Ok(topology));
    }

    #[test]
    fn any_machine_can_be_drawn(topology in any_topology()) {
        let svg = topology.to_svg_with(&[], &link_rates(&topology));
        prop_assert!(roxmltree::Document::parse(&svg).is_ok(), "{}", svg);
        prop_assert_eq!(topology.to_tree().lines().filter(|line| line.contains("GPU")).count() >= topology.gpus.len(), true);
        let _ = (topology.to_dot(), topology.to_matrix(), topology.to_nccl());
    }

    #[test]
    fn renumbering_devices_renumbers_their_links((topology, gpus, nics) in any_renumbering()) {
        let other = shuffled(&topology, &gpus, &nics);
        let new = renumbered(&gpus, &nics);
        let mut expected = Links::default();
        for (a, b, kind) in topology.links.iter() {
            expected.set(new(a), new(b), kind);
        }
        prop_assert_eq!(other.derive_links(), expected);
    }

    #[test]
    fn renumbering_a_matrix_renumbers_what_is_read((topology, gpus, nics) in any_renumbering()) {
        let mut other = shuffled(&topology, &gpus, &nics);
        other.links = other.derive_links();
        prop_assert_eq!(parse(&other.to_matrix()), Ok(as_matrix(&other)));
    }
}
