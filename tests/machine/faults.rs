//! Something about the machine is broken, and the program says what, and what to do.

#![allow(clippy::unwrap_used)]

use crate::fake_machine;
use std::fs;
use std::process::Output;

use cuda_cluster::ids::{GpuIndex, NumaId};
use cuda_cluster::topology::{self, Device, LinkKind, Topology};

use crate::fake_machine::FakeMachine;

fn builtin(name: &str) -> Topology {
    topology::parse(topology::builtin(name).unwrap()).unwrap()
}

fn notes(machine: &Topology) -> Vec<String> {
    machine.notes.iter().map(ToString::to_string).collect()
}

/// A machine of the catalogue, in a directory that lives while it is inspected.
fn spoiled<T>(name: &str, look: impl FnOnce(FakeMachine) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    look(FakeMachine::write(&builtin(name), dir.path()).unwrap())
}

fn topo(fake: &FakeMachine) -> Output {
    fake.command().arg("topo").output().unwrap()
}

/// The exit code and standard error.
fn failure(output: &Output) -> (Option<i32>, String) {
    let folder = fake_machine::library();
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    (output.status.code(), text.replace(&folder.display().to_string(), "LIBRARY"))
}

#[test]
fn a_broken_driver_is_told_from_none_and_ends_with_what_to_do() {
    let said = |faults: &str| spoiled("dgx-h100", |fake| failure(&topo(&fake.with_faults(faults))));
    insta::assert_snapshot!("driver_mismatch", said("init=mismatch").1);
    insta::assert_snapshot!("driver_permission", said("init=permission").1);
    insta::assert_snapshot!("driver_unknown_error", said("init=unknown").1);
    for faults in ["init=mismatch", "init=permission", "init=unknown"] {
        assert_eq!(said(faults).0, Some(1), "{faults}");
    }
}

#[test]
fn an_unloaded_driver_is_no_error_and_its_gpus_are_named() {
    let seen = spoiled("rtx-4090-2", |fake| fake.with_faults("init=not-loaded").seen());
    assert!(seen.gpus.is_empty());
    assert_eq!(seen.driver, None);
    assert_eq!(
        notes(&seen),
        ["nvml: there is no NVIDIA driver: its kernel module is not loaded, but 2 NVIDIA GPUs \
             are on the bus (0000:01:00.0, 0000:02:00.0)"]
    );
}

#[test]
fn a_library_that_cannot_be_loaded_is_named() {
    let said = spoiled("rtx-4090-2", |fake| {
        let broken = fake.function("0000:01:00.0").join("uevent");
        let mut command = fake.command();
        let output = command.arg("topo").env("CUDA_CLUSTER_NVML", &broken).output().unwrap();
        let (code, text) = failure(&output);
        (code, text.replace(&broken.display().to_string(), "FILE"))
    });
    assert_eq!(said.0, Some(1));
    insta::assert_snapshot!("library_is_no_library", said.1);
}

#[test]
fn a_driver_that_hangs_is_not_waited_for() {
    let said = spoiled("rtx-4090-2", |fake| {
        let fake = fake.with_faults("slow=nvmlDeviceGetCount_v2:60000");
        let mut command = fake.command();
        failure(&command.arg("topo").env("CUDA_CLUSTER_NVML_LIMIT", "100ms").output().unwrap())
    });
    assert_eq!(said.0, Some(1));
    insta::assert_snapshot!("driver_hangs", said.1);
}

#[test]
fn a_limit_that_is_none_is_refused() {
    let said = spoiled("rtx-4090-2", |fake| {
        failure(
            &fake.command().arg("topo").env("CUDA_CLUSTER_NVML_LIMIT", "soon").output().unwrap(),
        )
    });
    assert_eq!(said.0, Some(2));
    insta::assert_snapshot!("wrong_limit", said.1);
}

#[test]
fn a_slow_call_shows_in_the_timings() {
    let said = spoiled("rtx-4090-2", |fake| {
        let fake = fake.with_faults("slow=nvmlDeviceGetCount_v2:120");
        failure(&fake.command().args(["topo", "--timings"]).output().unwrap()).1
    });
    let nvml = said.split_once("NVML ").and_then(|(_, rest)| rest.split_once(" ms"));
    let millis: f64 = nvml.unwrap().0.parse().unwrap();
    assert!(millis >= 120.0, "{said}");
}

#[test]
fn a_lost_gpu_is_left_out_and_the_others_keep_their_numbers() {
    let seen = spoiled("dgx-1-v100", |fake| fake.with_faults("lost=3 forbidden=5").seen());
    let indices: Vec<u32> = seen.gpus.iter().map(|gpu| gpu.index.0).collect();
    assert_eq!(indices, [0, 1, 2, 4, 6, 7]);
    let link = |a, b| seen.links.between(Device::Gpu(GpuIndex(a)), Device::Gpu(GpuIndex(b)));
    assert_eq!(link(0, 4), Some(LinkKind::Nv(2)));
    assert_eq!(
        notes(&seen),
        [
            "GPU3: left out: device fell off the bus or has otherwise become inacessible",
            "GPU5: left out: the current user does not have permission to perform this operation",
            "nvml: NVML does not list 0000:0b:00.0, though the driver has it",
            "nvml: NVML does not list 0000:86:00.0, though the driver has it",
        ]
    );
}

#[test]
fn a_gpu_that_the_driver_does_not_serve_is_noted() {
    let seen = spoiled("dgx-station-a100", |fake| {
        let mut fewer = builtin("dgx-station-a100");
        fewer.gpus.truncate(1);
        let held = fake.function("0000:47:00.0").join("uevent");
        let text = fs::read_to_string(&held).unwrap();
        fs::write(&held, text.replace("DRIVER=nvidia", "DRIVER=vfio-pci")).unwrap();
        let unbound = fake.function("0000:81:00.0").join("uevent");
        let text = fs::read_to_string(&unbound).unwrap();
        fs::write(&unbound, text.replace("DRIVER=nvidia\n", "")).unwrap();
        fake.with_nvml_of(&fewer).unwrap().seen()
    });
    assert_eq!(
        notes(&seen),
        [
            "nvml: 0000:47:00.0 is an NVIDIA GPU that the driver vfio-pci holds",
            "nvml: 0000:81:00.0 is an NVIDIA GPU without a driver",
            "nvml: NVML does not list 0000:c1:00.0, though the driver has it",
            "nvml: NVML does not list 0000:c2:00.0, though the driver has it",
        ]
    );
}

#[test]
fn calls_that_are_not_supported_leave_facts_unknown_and_notes() {
    let faults = "unsupported=nvmlDeviceGetMemoryInfo_v2 unsupported=nvmlDeviceGetUUID \
                  unsupported=nvmlDeviceGetNvLinkState unsupported=nvmlDeviceGetCpuAffinity";
    let seen = spoiled("a100-pcie-4-bridges", |fake| fake.with_faults(faults).seen());
    let gpu = &seen.gpus[0];
    assert_eq!((gpu.memory_bytes, &gpu.uuid, gpu.nvlinks.len()), (None, &None, 0));
    assert_eq!(gpu.cpus.as_ref().unwrap().to_string(), "0-31,64-95");
    let unavailable = "the requested operation is not available on the target device";
    // Memory that is not told is the host's.
    let expected =
        (0..4).map(|gpu| format!("GPU{gpu}: NVML does not tell its UUID: {unavailable}"));
    assert_eq!(notes(&seen), expected.collect::<Vec<_>>());
}

#[test]
fn without_affinity_from_kernel_and_nvml_the_numa_node_counts() {
    let seen = spoiled("rtx-4090-2", |fake| {
        fs::remove_file(fake.function("0000:01:00.0").join("local_cpulist")).unwrap();
        fs::write(fake.function("0000:02:00.0").join("local_cpulist"), "0-7\n").unwrap();
        fake.with_faults("affinity=empty").seen()
    });
    let cpus: Vec<String> =
        seen.gpus.iter().flat_map(|gpu| &gpu.cpus).map(ToString::to_string).collect();
    assert_eq!(cpus, ["0-31", "0-7"]);
    assert_eq!(
        notes(&seen)[0],
        "GPU0: sysfs names no CPUs near it, and NVML none either; its CPUs are those of NUMA node 0"
    );
}

#[test]
fn a_virtual_machine_that_hides_locality_gets_all_cpus_and_says_so() {
    let (seen, told) = spoiled("a100-pcie-4-bridges", |fake| {
        for gpu in builtin("a100-pcie-4-bridges").gpus {
            let function = fake.function(&gpu.pci.unwrap().to_string());
            fs::write(function.join("numa_node"), "-1\n").unwrap();
            fs::write(function.join("local_cpulist"), "0-127\n").unwrap();
        }
        let told = fake.seen();
        (fake.with_faults("affinity=empty").seen(), told)
    });
    assert_eq!(
        notes(&told)[..2],
        [
            "GPU0: sysfs does not tell its NUMA node; NVML says 0",
            "GPU0: sysfs names all CPUs as near it; its CPUs 0-31,64-95 are those that NVML names",
        ]
    );
    assert_eq!(seen.gpus[0].numa, None);
    assert_eq!(seen.gpus[0].numa_set.as_ref().unwrap().to_string(), "0-1");
    assert_eq!(
        notes(&seen)[0],
        "GPU0: sysfs names all CPUs as near it, and NVML tells no more; all CPUs (0-127) count as near"
    );
}

/// What the program detects on a machine where sysfs is not mounted, as in a sandbox.
fn seen_without_sysfs(name: &str) -> Topology {
    spoiled(name, |fake| {
        let nowhere = tempfile::tempdir().unwrap();
        let mut command = fake.command();
        let output = command.args(["topo", "-o", "json"]).env("CUDA_CLUSTER_SYSFS", nowhere.path());
        topology::parse(&String::from_utf8(output.output().unwrap().stdout).unwrap()).unwrap()
    })
}

#[test]
fn without_sysfs_nvml_tells_paths_cpus_and_pcie_generation() {
    let (seen, described) = (seen_without_sysfs("l40s-8"), builtin("l40s-8"));
    let gpus = |machine: &Topology| -> Vec<_> {
        let pairs = machine.links.iter();
        pairs.filter(|(a, b, _)| matches!((a, b), (Device::Gpu(_), Device::Gpu(_)))).collect()
    };
    assert_eq!(gpus(&seen), gpus(&described));
    assert!(gpus(&seen).iter().any(|(_, _, kind)| *kind == LinkKind::Pix));
    for (seen, described) in seen.gpus.iter().zip(&described.gpus) {
        assert_eq!((&seen.cpus, seen.numa), (&described.cpus, described.numa));
        assert_eq!(seen.pcie, described.pcie);
    }
    let paths = "links: the PCI paths of 28 pairs of GPUs are those that NVML names";
    assert!(notes(&seen).iter().any(|note| note == paths), "{:?}", notes(&seen));
}

/// The machine as NVML describes it: two pairs of GPUs behind a switch each, on other NUMA nodes
/// than the kernel has them.
fn nvml_of_switches(numa: [u32; 4]) -> Topology {
    let mut machine = builtin("l40s-8");
    machine.gpus.truncate(4);
    machine.links = topology::Links::default();
    for (at, numa) in numa.into_iter().enumerate() {
        machine.gpus[at].numa = Some(NumaId(numa));
        let node = machine.numa_node(NumaId(numa)).unwrap();
        machine.gpus[at].cpus = node.cpus.clone();
    }
    let gpu = |index| Device::Gpu(GpuIndex(index));
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        let beside = (a, b) == (0, 1) || (a, b) == (2, 3);
        machine.links.set(gpu(a), gpu(b), if beside { LinkKind::Pix } else { LinkKind::Sys });
    }
    machine
}

#[test]
fn without_sysfs_nvmls_level_stands_where_numa_nodes_differ_and_says_so() {
    let nvml = nvml_of_switches([0, 1, 1, 1]);
    let seen = spoiled("l40s-8", |fake| {
        let nowhere = tempfile::tempdir().unwrap();
        let mut command = fake.with_nvml_of(&nvml).unwrap().command();
        let output = command.args(["topo", "-o", "json"]).env("CUDA_CLUSTER_SYSFS", nowhere.path());
        topology::parse(&String::from_utf8(output.output().unwrap().stdout).unwrap()).unwrap()
    });
    assert_eq!(seen.links, nvml.links);
    let said = notes(&seen);
    let text = "links: NVML's PCI paths stand, though the NUMA nodes differ: GPU0 to GPU1";
    assert!(said.iter().any(|note| note == text), "{said:?}");
}

#[test]
fn nvmls_level_stands_where_every_gpu_has_a_root_of_its_own() {
    let mut flat = nvml_of_switches([0, 1, 1, 1]);
    let links = std::mem::take(&mut flat.links);
    flat.bridges.clear();
    for gpu in &mut flat.gpus {
        // As a hypervisor gives them: each in a domain of its own.
        let domain = 0x100 + gpu.index.0;
        gpu.pci = format!("{domain:04x}:00:00.0").parse().ok();
        let id = format!("pci{domain:04x}:00");
        gpu.parent = Some(id.clone());
        let kind = topology::BridgeKind::Host;
        let numa = gpu.numa;
        flat.bridges.push(topology::Bridge {
            id,
            parent: None,
            kind,
            numa,
            package: None,
            pcie: None,
        });
    }
    flat.nics.clear();
    let nvml = Topology { links: links.clone(), ..flat.clone() };
    let dir = tempfile::tempdir().unwrap();
    let fake = FakeMachine::write(&flat, dir.path()).unwrap().with_nvml_of(&nvml).unwrap();
    let seen = fake.seen();
    let gpu = |index| Device::Gpu(GpuIndex(index));
    let link = |a, b| seen.links.between(gpu(a), gpu(b));
    assert_eq!((link(0, 1), link(2, 3)), (Some(LinkKind::Pix), Some(LinkKind::Pix)));
    // NVML says no more than sysfs does.
    assert_eq!((link(0, 2), link(1, 2)), (Some(LinkKind::Sys), Some(LinkKind::Node)));
    let said = notes(&seen);
    let text = "links: NVML names nearer PCI paths than sysfs shows, which are taken: GPU0 to GPU1 PIX \
                instead of SYS, GPU2 to GPU3 PIX instead of NODE";
    assert!(said.iter().any(|note| note == text), "{said:?}");
}

#[test]
fn without_sysfs_nvlinks_are_known_and_nothing_is_placed() {
    let seen = seen_without_sysfs("dgx-1-v100");
    assert_eq!(seen.gpus.len(), 8);
    let joined = seen.links.iter().filter(|(_, _, kind)| matches!(kind, LinkKind::Nv(_)));
    assert_eq!(joined.count(), 16);
    assert!(seen.bridges.is_empty() && seen.nics.is_empty());
    let said = notes(&seen);
    assert!(
        said[0].starts_with("pci: ") && said[0].contains("no PCI device can be placed"),
        "{said:?}"
    );
    assert!(said.iter().any(|note| note.starts_with("GPU0: sysfs does not have it; its CPUs")));
}

#[test]
fn nvlinks_that_end_nowhere_known_join_nothing_and_are_noted() {
    let faults = "far-ends=untold far-ends=hidden";
    let seen = spoiled("dgx-1-v100", |fake| fake.with_faults(faults).seen());
    assert!(seen.links.iter().all(|(_, _, kind)| !matches!(kind, LinkKind::Nv(_))));
    assert_eq!(seen.nvswitch, None);
    let untold = |gpu| format!("GPU{gpu}: NVML does not tell what 6 of its NVLinks end in");
    assert_eq!(notes(&seen), (0..8).map(untold).collect::<Vec<_>>());
}
