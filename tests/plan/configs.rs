//! Every spec of `configs/`, planned for several machines. Each plan was reviewed, and the sentence
//! above it says why it is right.

use std::collections::BTreeSet;

use crate::compact::{compact, config, machine};
use serde_json::Value;

/// Snapshots a spec's plans: for each machine, with a sentence that says why the plan is right.
fn reviewed(name: &str, machines: &[(&str, &str)]) {
    let spec = config(name);
    let plans = machines.iter().map(|(machine_name, why)| {
        let plan = compact(&machine(machine_name), &spec);
        format!("{machine_name}: {why}\n{plan}")
    });
    let text = plans.collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(name.trim_end_matches(".yaml"), text);
}

#[test]
fn minimal() {
    reviewed(
        "minimal.yaml",
        &[
            ("dgx-1-v100", "four GPUs a socket, on that socket's CPUs and memory; UCX chooses"),
            ("rtx-4090-2", "both cards are kept although one drives a display: they are equals"),
            ("dgx-station-a100", "the display card is left out: a smaller model than the others"),
            ("gh200", "the GPU's own memory is a NUMA node, and no host memory is placed there"),
        ],
    );
}

#[test]
fn nvlink() {
    reviewed(
        "nvlink.yaml",
        &[
            ("dgx-2", "cuda_ipc is listed, sm and self keep host memory off the network"),
            ("ibm-ac922", "NUMA nodes 0 and 8 as POWER9 counts them, GPU memory nodes left alone"),
            ("l40s-8", "the machine has no NVLink, and the plan says so instead of hiding it"),
        ],
    );
}

#[test]
fn infiniband() {
    reviewed(
        "infiniband.yaml",
        &[
            ("dgx-1-v100", "two GPUs a PCIe switch, and each pair has that switch's NIC"),
            ("dgx-a100", "eight compute NICs for eight GPUs: two PXB ones a switch, one each"),
            ("dgx-h100", "each GPU has a NIC behind its own switch; storage NICs stay free"),
            ("azure-ndv5", "each GPU has its own NIC"),
            ("rtx-4090-2", "no NIC: nothing is pinned, and the unmet requirement is a note"),
        ],
    );
}

#[test]
fn stripe() {
    reviewed(
        "stripe.yaml",
        &[
            ("aws-p4d", "fewer NICs than GPUs: striping is sharing, as pinning is"),
            ("dgx-a100", "a NIC each, for there are no more of the nearest level"),
        ],
    );
}

#[test]
fn best_connected() {
    reviewed(
        "best-connected.yaml",
        &[
            ("dgx-1-v100", "a set whose pairs all have an NVLink, two of them at each GPU"),
            ("a100-pcie-4-bridges", "four of four: nothing to choose"),
            ("dgx-h100", "all pairs are equal behind the switches: the first four"),
            ("l40s-8", "no NVLink: the four of one socket are nearest"),
        ],
    );
}

#[test]
fn dask_rapids_pool() {
    reviewed(
        "dask-rapids-pool.yaml",
        &[
            ("dgx-a100", "connections over eth0, whose address Dask announces; pools of 0.5"),
            ("dgx-b200", "pools are shares of the larger GPUs' own memory"),
        ],
    );
}

#[test]
fn dask_cuda_compat() {
    reviewed(
        "dask-cuda-compat.yaml",
        &[("dgx-1-v100", "dask-cuda's two variables, no NIC, nothing of our own")],
    );
}

#[test]
fn dgx_h100_split() {
    reviewed(
        "dgx-h100-split.yaml",
        &[
            ("dgx-h100", "56 cores a socket: 14 for each worker; the last two give one each"),
            ("dgx-1-v100", "20 cores a socket: 5 each; disjoint, siblings together"),
        ],
    );
}

#[test]
fn mig() {
    reviewed(
        "mig.yaml",
        &[
            ("dgx-a100-mig", "one instance each, none of CUDA IPC, cores shared out evenly"),
            ("dgx-a100", "without MIG it is the same spec for whole GPUs"),
        ],
    );
}

#[test]
fn command_pytorch() {
    reviewed(
        "command-pytorch.yaml",
        &[("dgx-h100", "all ranks see the same GPUs and the same list of eight NICs")],
    );
}

#[test]
fn two_programs() {
    reviewed(
        "two-programs.yaml",
        &[
            ("dgx-1-v100", "each program has a quad whose GPUs are all joined by NVLink"),
            ("dgx-h100", "all pairs are equal behind the switches: four and four in order"),
            ("l40s-8", "no NVLink: each program has the four of a socket"),
        ],
    );
}

#[test]
fn dask_hosts() {
    reviewed(
        "dask-hosts.yaml",
        &[("dgx-h100", "the workers of this machine; the others plan for themselves, told by ssh")],
    );
}

#[test]
fn simulated() {
    reviewed("simulated.yaml", &[("dgx-h100", "the plan is the machine's, wherever it runs")]);
}

#[test]
fn mixed_workers() {
    reviewed(
        "mixed-workers.yaml",
        &[("rtx-4090-2", "two a GPU with half of its memory each, two without; exceptions hold")],
    );
}

fn config_names() -> BTreeSet<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let entries = std::fs::read_dir(folder).expect("configs is a folder");
    let names = entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into());
    names.filter(|name: &String| name.ends_with(".yaml")).collect()
}

/// What a schema has against a text.
fn complaints(schema: &Value, value: &Value) -> Vec<String> {
    let schema = jsonschema::validator_for(schema).expect("a schema");
    schema.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

#[test]
fn the_published_schema_is_that_of_this_version() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/cluster.schema.json");
    let published = std::fs::read_to_string(&path).expect("the file is there");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    let told = "cuda-cluster spec schema > configs/cluster.schema.json";
    assert!(published == cuda_cluster::spec::schema(), "it has changed: {told}");
}

#[test]
fn pythons_table_of_flags_is_that_of_this_version() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("python/cuda_cluster/flags.json");
    let published = std::fs::read_to_string(&path).expect("the file is there");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    let flags = cuda_cluster::spec::flags().collect::<Vec<_>>();
    let own = serde_json::to_value(flags).expect("JSON");
    assert!(published == own, "it has changed: cuda-cluster spec flags > {}", path.display());
}

#[test]
fn every_config_fits_the_schema_and_is_right() {
    let schema = cuda_cluster::spec::schema();
    for name in config_names() {
        let spec = config(&name);
        assert!(spec.version.is_some());
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(&name);
        let text = std::fs::read_to_string(path).expect("readable");
        assert!(text.starts_with("# "), "{name} does not say what it is for");
        let value: Value = serde_yaml::from_str(&text).expect("YAML");
        assert_eq!(complaints(&schema, &value), Vec::<String>::new());
    }
}

#[test]
fn the_schema_refuses_what_the_reader_refuses() {
    let schema = cuda_cluster::spec::schema();
    for text in [
        "version: 1\nucx: {net_device: auto}",
        "version: 1\nengine: dsak",
        "version: 1\nthreads: many",
        "version: 1\nscheduler: [1]",
        "name: demo",
    ] {
        let value: Value = serde_yaml::from_str(text).expect("YAML");
        assert!(!complaints(&schema, &value).is_empty(), "{text}");
        assert!(cuda_cluster::spec::parse(text, "test").is_err(), "{text}");
    }
}

#[test]
fn every_config_is_planned_for_some_machine() {
    let source = std::fs::read_to_string(file!()).expect("this file");
    for name in config_names() {
        assert!(source.contains(&format!("\"{name}\"")), "{name} has no reviewed plan");
    }
}
