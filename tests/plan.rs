//! `cuda-cluster plan`, as a user runs it: published machines get the plan that is right for them.

use std::process::{Command, Output};

use serde_json::Value;

fn plan(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.arg("plan").args(arguments).env("CUDA_CLUSTER_NVML", "none");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["UCX", "NCCL_", "CUDA_VISIBLE"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(&*name);
        }
    }
    command.output().expect("the program runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = plan(&[arguments, &["-o", "json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the answer is JSON")
}

/// The GPUs of the published DGX-1 matrix hang off four PCIe switches in pairs, each with a NIC.
#[test]
fn a_dgx_1_gives_the_two_gpus_of_a_switch_the_nic_of_that_switch() {
    let plan = json(&[
        "--topology",
        "dgx-1-v100",
        "--enable-nvlink",
        "--enable-infiniband",
        "--net-devices",
        "auto",
    ]);
    let workers = plan["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), 8);
    for (at, worker) in workers.iter().enumerate() {
        let nic = format!("mlx5_{}:1", at / 2);
        let (cpus, node) = if at < 4 { ("0-19,40-59", "0") } else { ("20-39,60-79", "1") };
        assert_eq!(worker["name"], format!("gpu{at}"));
        assert_eq!(worker["gpu"]["index"], at);
        assert_eq!(worker["nics"], serde_json::json!([nic]));
        assert_eq!(worker["cpus"], cpus);
        assert_eq!(worker["mems"], node);
        assert_eq!(worker["env"]["UCX_NET_DEVICES"], format!("{nic},lo"));
        assert_eq!(worker["env"]["UCX_TLS"], "rc,tcp,cuda_copy,cuda_ipc,sm,self");
        assert_eq!(worker["env"]["CUDA_DEVICE_ORDER"], "PCI_BUS_ID");
        let mut mask: Vec<String> = (0..8).map(|gpu| gpu.to_string()).collect();
        mask.rotate_left(at);
        assert_eq!(worker["env"]["CUDA_VISIBLE_DEVICES"], mask.join(","));
    }
    assert_eq!(plan["notes"], serde_json::json!([]));
}

#[test]
fn a_machine_without_gpus_is_an_error_that_says_what_to_try() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("none.yaml");
    std::fs::write(&file, "version: 1\nname: bare\n").expect("written");
    let output = plan(&["--topology", file.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    for part in ["bare has no NVIDIA GPU", "--topology dgx-h100", "--simulate", "doctor"] {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
    assert!(output.stdout.is_empty());
}
