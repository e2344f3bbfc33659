//! Each file of a corpus of real machines gives its expected answer, or an error with a position.
//! The corpus is third-party data and not part of this repository: it is looked for in
//! `$CUDA_CLUSTER_CORPUS`, then in `../shared/corpus`; without it these tests are skipped.

use crate::skip;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cuda_cluster::cpuset::CpuSet;
use cuda_cluster::topology::{Device, Gpu, LinkKind, NvLinkPeer, Topology, parse};
use serde_json::Value;

/// A folder of the corpus.
fn folder(name: &str) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/corpus");
    let corpus = std::env::var_os("CUDA_CLUSTER_CORPUS").map_or(beside, PathBuf::from);
    let folder = corpus.join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    skip::skip("corpus", &format!("there is no corpus at {}", corpus.display()));
    None
}

fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("an expected answer");
    serde_json::from_str(&text).expect("JSON")
}

fn load(path: &Path) -> Topology {
    let text = fs::read_to_string(path).expect("a file of the corpus");
    parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A CPU list as written in the expected answers: `N/A` or nothing means unknown.
fn cpus(value: &Value) -> Option<CpuSet> {
    let list = value.as_str().filter(|list| !list.is_empty() && *list != "N/A")?;
    Some(list.parse().expect(list))
}

/// All NICs at a GPU's nearest level, by position.
fn nearest(topology: &Topology, gpu: &Gpu) -> BTreeSet<usize> {
    let kind = |at: usize| {
        let nic = Device::Nic(u32::try_from(at).expect("few NICs"));
        topology.links.between(Device::Gpu(gpu.index), nic)
    };
    let levels: Vec<Option<LinkKind>> = (0..topology.nics.len()).map(kind).collect();
    let best = levels.iter().flatten().min();
    (0..levels.len()).filter(|at| best.is_some() && levels[*at].as_ref() == best).collect()
}

/// The files of a folder that have an expected answer beside them.
fn answered(folder: &Path) -> Vec<(PathBuf, Value)> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "xml"))
        .collect();
    files.sort();
    let answer = |path: &PathBuf| path.with_extension("expected.json");
    files.retain(|path| answer(path).exists());
    files.into_iter().map(|path| (path.clone(), json(&answer(&path)))).collect()
}

#[test]
fn every_pasted_matrix_reads_as_expected() {
    let Some(folder) = folder("smi-topo") else { return };
    let answers = json(&folder.join("expected.json"));
    for (file, answer) in answers.as_object().expect("an object") {
        let topology = load(&folder.join(file));
        let names: Vec<&str> = ["gpus", "nics"]
            .iter()
            .flat_map(|key| answer[key].as_array().expect("as written"))
            .map(text)
            .collect();
        // The expected columns are in file order; ours are GPUs by index, then NICs in file order.
        let devices: BTreeMap<&str, Device> = {
            let mut nics = 0u32;
            let device = |name: &&str| match name.parse() {
                Ok(gpu @ Device::Gpu(_)) => gpu,
                _ => {
                    nics += 1;
                    Device::Nic(nics - 1)
                }
            };
            names.iter().copied().zip(names.iter().map(device).collect::<Vec<_>>()).collect()
        };
        assert_eq!(topology.devices().count(), names.len(), "{file}");
        for (row, cells) in answer["links"].as_object().expect("links") {
            for (column, kind) in cells.as_object().expect("cells") {
                let kind: LinkKind = text(kind).parse().expect("a link");
                let (a, b) = (devices[row.as_str()], devices[column.as_str()]);
                assert_eq!(topology.links.between(a, b), Some(kind), "{file}: {row} {column}");
            }
        }
        for gpu in &topology.gpus {
            let name = format!("GPU{}", gpu.index);
            assert_eq!(gpu.cpus, cpus(&answer["cpu_affinity"][&name]), "{file}: {name}");
            let numa = gpu.numa_set.as_ref().map(|set| set.to_string());
            let numa = numa.or(gpu.numa.map(|id| id.to_string())).unwrap_or_default();
            let said = text(&answer["numa_affinity"][&name]).trim_start_matches("N/A");
            assert_eq!(numa, said, "{file}: {name}");
            let memory = gpu.memory_numa.map(|id| id.to_string()).unwrap_or_default();
            let said = text(&answer["gpu_numa_id"][&name]).trim_start_matches("N/A");
            assert_eq!(memory, said, "{file}: {name}");
            let near: BTreeSet<Device> = nearest(&topology, gpu)
                .into_iter()
                .map(|at| Device::Nic(u32::try_from(at).expect("few NICs")))
                .collect();
            let said = answer["nearest_nics"][&name].as_array().expect("NICs");
            assert_eq!(near, said.iter().map(|nic| devices[text(nic)]).collect(), "{file}: {name}");
        }
        for (column, name) in answer["nic_legend"].as_object().expect("a legend") {
            if let Some(Device::Nic(at)) = devices.get(column.as_str()) {
                assert_eq!(topology.nics[*at as usize].name, text(name), "{file}: {column}");
            }
        }
    }
}

#[test]
fn damaged_matrices_are_refused_at_their_place_or_read_without_inventing() {
    let Some(folder) = folder("smi-topo-broken") else { return };
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        let words = fs::read_to_string(&path).expect("text");
        match parse(&words) {
            Err(error) => {
                let error = error.to_string();
                let placed = error.starts_with("line ") && error.contains(", column ");
                assert!(placed, "{}: {error}", path.display());
            }
            Ok(topology) => {
                assert!(!topology.notes.is_empty(), "{}: nothing is noted", path.display());
                let missing = |(a, b, kind): (Device, Device, LinkKind)| {
                    !words.contains(&kind.to_string()) || a == b
                };
                assert!(!topology.links.iter().any(missing), "{}", path.display());
            }
        }
    }
}

#[test]
fn every_nccl_topology_reads_as_expected() {
    let Some(folder) = folder("nccl") else { return };
    for (path, answer) in answered(&folder) {
        let file = path.display();
        let topology = load(&path);
        let said = answer["gpus"].as_array().expect("GPUs");
        assert_eq!(topology.gpus.len(), said.len(), "{file}");
        let nets: Vec<&Value> = answer["nics"].as_array().expect("NICs").iter().collect();
        // A NIC is named after its networks, or by its address if the file has none.
        let label = |at: usize| -> BTreeSet<String> {
            let nic = &topology.nics[at];
            let place = nic.pci.expect("an address").to_string();
            let own = nets.iter().find(|net| text(&net["busid"]) == place).expect("the same NIC");
            let names = own["nets"].as_array().expect("networks");
            if names.is_empty() {
                return BTreeSet::from([place]);
            }
            names.iter().map(|net| text(&net["name"]).to_owned()).collect()
        };
        for want in said {
            let place = text(&want["busid"]);
            let gpu = topology
                .gpus
                .iter()
                .find(|gpu| gpu.pci.is_some_and(|pci| pci.to_string() == place))
                .unwrap_or_else(|| panic!("{file}: no GPU at {place}"));
            let index = want["dev"].as_u64().or(want["dev_by_busid_order"].as_u64());
            assert_eq!(Some(u64::from(gpu.index.0)), index, "{file}: {place}");
            assert_eq!(
                gpu.numa.map(|id| u64::from(id.0)),
                want["numaid"].as_u64(),
                "{file}: {place}"
            );
            assert_eq!(gpu.cpus, cpus(&want["cpulist"]), "{file}: {place}");
            for link in want["nvlinks"].as_array().expect("NVLinks") {
                let peers = gpu.nvlinks.iter().filter(|own| match own.peer {
                    NvLinkPeer::Gpu(peer) => peer.to_string() == text(&link["target"]),
                    _ => false,
                });
                if text(&link["tclass"]).starts_with("0x03") {
                    assert_eq!(
                        peers.count() as u64,
                        link["count"].as_u64().expect("as written"),
                        "{file}"
                    );
                }
            }
            for (name, level) in want["nic_levels"].as_object().expect("levels") {
                let names: BTreeSet<String> = name.split(',').map(str::to_owned).collect();
                let at = (0..topology.nics.len()).find(|at| label(*at) == names).expect(name);
                let nic = Device::Nic(u32::try_from(at).expect("few"));
                let kind = topology.links.between(Device::Gpu(gpu.index), nic);
                assert_eq!(kind, text(level).parse().ok(), "{file}: {place} {name}");
            }
            let near: BTreeSet<String> =
                nearest(&topology, gpu).into_iter().flat_map(label).collect();
            let said = want["closest"].as_array().expect("NICs");
            assert_eq!(
                near,
                said.iter().map(|nic| text(nic).to_owned()).collect(),
                "{file}: {place}"
            );
        }
    }
    let graphs = fs::read_to_string(folder.join("not-a-topology-graphs.xml")).expect("a file");
    let refusal = parse(&graphs).expect_err("graphs are no topology").to_string();
    assert!(refusal.starts_with("line 1, column 1: <graphs>"), "{refusal}");
}

#[test]
fn every_hwloc_topology_reads_as_expected() {
    let Some(folder) = folder("hwloc") else { return };
    for (path, answer) in answered(&folder) {
        hwloc_reads_as_expected(&path, &answer);
        // The same machine in the form of version 3.
        let newer = path.with_file_name(
            path.file_stem().expect("as written").to_str().expect("text").to_owned() + "-v3.xml",
        );
        if newer.exists() {
            hwloc_reads_as_expected(&newer, &answer);
        }
    }
}

fn hwloc_reads_as_expected(path: &Path, answer: &Value) {
    let file = path.display();
    let topology = load(path);
    let numbers = |value: &Value| value.as_u64().expect("a number");
    let said = answer["meta"]["numa"].as_array().expect("NUMA nodes");
    assert_eq!(topology.numa.len(), said.len(), "{file}");
    for (node, want) in topology.numa.iter().zip(said) {
        assert_eq!(u64::from(node.id.0), numbers(&want["os"]), "{file}");
        assert_eq!(node.memory_bytes, want["mem"].as_u64(), "{file}: node {}", node.id);
    }
    assert_eq!(topology.cores.len() as u64, numbers(&answer["meta"]["cores"]), "{file}");
    let nvidia = |gpu: &&Value| text(&gpu["vendor"]) == "10de";
    let said: Vec<&Value> =
        answer["gpus"].as_array().expect("as written").iter().filter(nvidia).collect();
    assert_eq!(topology.gpus.len(), said.len(), "{file}");
    for want in said {
        let place = text(&want["busid"]);
        let gpu = topology
            .gpus
            .iter()
            .find(|gpu| gpu.pci.is_some_and(|pci| pci.to_string() == place))
            .unwrap_or_else(|| panic!("{file}: no GPU at {place}"));
        assert_eq!(gpu.cpus, cpus(&want["calc_pus"]), "{file}: {place}");
        assert_eq!(gpu.numa.map(|id| id.to_string()).as_deref(), want["calc_numa"].as_str());
        let uuid = want["info"].as_object().expect("infos").iter();
        for (_, uuid) in uuid.filter(|(key, _)| key.ends_with(".NVIDIAUUID")) {
            assert_eq!(gpu.uuid.as_ref().map(|uuid| uuid.as_str()), uuid.as_str(), "{file}");
        }
        for device in want["osdevs"].as_array().expect("OS devices") {
            if let Some(number) = text(device).strip_prefix("nvml") {
                assert_eq!(gpu.index.0.to_string(), number, "{file}: {place}");
            }
        }
        if let Some(said) = want["closest_nics"].as_array() {
            let near: BTreeSet<&str> = nearest(&topology, gpu)
                .into_iter()
                .map(|at| topology.nics[at].name.as_str())
                .collect();
            assert_eq!(near, said.iter().map(text).collect(), "{file}: {place}");
        }
    }
    let said = answer["nics"].as_array().expect("NICs").iter();
    let said: BTreeSet<&str> =
        said.flat_map(|nic| nic["openfabrics"].as_array().expect("names")).map(text).collect();
    let ours: BTreeSet<&str> = topology.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(ours, said, "{file}");
}
