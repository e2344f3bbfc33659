//! `scripts/gpu-check.sh` on the stand-in: the whole of it, and what it says of machines that are not
//! well.
//!
//! *Invariant:* a fault is found by the check that looks for it, and named.

use std::path::Path;
use std::time::Duration;

use cuda_cluster::ids::GpuIndex;
use cuda_cluster::topology::Topology;

use super::gpus::{Machine, described};
use super::sandbox::Said;

impl Machine {
    /// What it says of this machine; `only` these checks.
    fn gpu_check(&self, only: &str) -> Said {
        self.sandbox.spawn_program(self.gpu_check_command(only)).wait()
    }

    fn gpu_check_command(&self, only: &str) -> std::process::Command {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = self.fake.command().get_program().to_owned();
        let path = std::env::var("PATH").expect("a path");
        let path = format!("{}:{path}", here.join("tests/fake-machine").display());
        let mut command = std::process::Command::new(here.join("scripts/gpu-check.sh"));
        command.arg(&program).envs(self.fake.environment()).env("PATH", path);
        command.env("CUDA_CLUSTER_PROGRAM", &program).env("UCX", self.libucp()).env("ONLY", only);
        command.env("REPORT", self.report()).env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    fn report(&self) -> std::path::PathBuf {
        self.sandbox.runtime().join("gpu-check.json")
    }

    /// The line of a check that failed, which must name these.
    fn assert_found(&self, said: &Said, check: &str, words: &[&str]) {
        assert_eq!(said.code, 1, "{said}");
        let failed = format!("FAILED    {check}: ");
        let line = said.stdout.lines().find(|line| line.starts_with(&failed));
        let line = line.unwrap_or_else(|| panic!("{check} fails: {said}"));
        for word in words {
            assert!(line.contains(word), "{word} in {line}");
        }
    }
}

#[test]
fn the_first_days_programme_runs_from_beginning_to_end() {
    // Faster than its PCIe is not plausible.
    let Some(machine) = Machine::on("rtx-4090-2", "gpu-check", "rate=13") else { return };
    let said = machine.gpu_check("");
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stdout.contains(" passed, 0 failed"), "{said}");
    let kept = "the driver keeps it until the peer has closed it";
    assert!(said.stdout.contains(kept), "{said}");
    assert!(said.stdout.contains("ok        a full GPU\n"), "{said}");
    for what in ["GPUDirect RDMA", "kernels", "MIG"] {
        assert!(said.stdout.contains(&format!("not checked: {what}: ")), "{said}");
    }
    let report = std::fs::read_to_string(machine.report()).expect("a file to send");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let checks = report["checks"].as_array().expect("checks");
    assert!(checks.iter().all(|check| check["outcome"].is_string()), "{report:#}");
    assert!(!report.to_string().contains("GPU-ac30c78b"), "no identity: {report:#}");
    machine.sandbox.assert_nothing_is_left();
}

const FABRIC: &str = "the NVLink fabric";
const PAIRS: &str = "memory of each GPU from each other";

/// A DGX H100 on which GPU 3 and GPU 5 have no peer access to each other.
fn without_a_pair() -> Topology {
    let mut machine = described("dgx-h100");
    let all: Vec<GpuIndex> = machine.gpus.iter().map(|gpu| gpu.index).collect();
    for gpu in &mut machine.gpus {
        let refused = |other: &GpuIndex| {
            [(3, 5), (5, 3)].contains(&(gpu.index.0, other.0)) || *other == gpu.index
        };
        gpu.peers = Some(all.iter().filter(|other| !refused(other)).copied().collect());
    }
    machine
}

#[test]
fn a_pair_without_peer_access_is_found() {
    let Some(machine) = Machine::of(&without_a_pair(), "a refused pair", "") else { return };
    let said = machine.gpu_check(&[FABRIC, PAIRS].join(","));
    machine.assert_found(&said, FABRIC, &["GPU3: the driver refuses peer access", "GPU5"]);
    machine.assert_found(&said, PAIRS, &["GPU 3 cannot map GPU 5 over NV18", "GPU 5 cannot map"]);
}

#[test]
fn what_one_gpu_cannot_show_is_said_not_to_be_checked() {
    let mut single = described("rtx-4090-2");
    single.gpus.truncate(1);
    let Some(machine) = Machine::of(&single, "one GPU", "") else { return };
    let said = machine.gpu_check(&[FABRIC, PAIRS].join(","));
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stdout.contains(&format!("not checked: {PAIRS}: ")), "{said}");
}

#[test]
fn a_gpu_that_is_not_registered_with_the_fabric_is_found() {
    let mut unregistered = described("dgx-h100");
    let state = r#"{"state": "not_started"}"#;
    unregistered.gpus[3].fabric = serde_json::from_str(state).expect("a fabric");
    let Some(machine) = Machine::of(&unregistered, "an unregistered GPU", "") else { return };
    let said = machine.gpu_check(FABRIC);
    machine.assert_found(&said, FABRIC, &["GPU3: it is not registered", "nvidia-fabricmanager"]);
}

#[test]
fn a_lost_gpu_is_found() {
    let Some(machine) = Machine::new("a lost GPU", "") else { return };
    let machine = machine.with_nvml_faults("lost=3");
    let check = "GPUs as nvidia-smi says";
    let said = machine.gpu_check(check);
    machine.assert_found(&said, check, &["GPU 3 is missing (left out: ", "off the bus"]);
}

#[test]
fn refused_ipc_and_a_wrong_identity_are_found() {
    let Some(machine) = Machine::new("no IPC", "no-ipc") else { return };
    let said = machine.gpu_check(PAIRS);
    machine.assert_found(&said, PAIRS, &["cannot map", "cuIpcOpenMemHandle", "CUDA error 205"]);
    let Some(machine) = Machine::new("another GPU", "other-uuid") else { return };
    let said = machine.gpu_check("doctor");
    machine.assert_found(&said, "doctor", &["cuda: ", "CUDA has GPU-"]);
}

#[test]
fn a_gpu_that_faults_in_the_middle_is_found() {
    let Some((machine, faults)) = Machine::that_faults("rtx-4090-2", "a fault") else { return };
    let check = "a long-lived cluster";
    let running = machine.sandbox.spawn_program(machine.gpu_check_command(check));
    let ready = || {
        let runtime = machine.sandbox.runtime().join("cuda-cluster");
        let names = std::fs::read_dir(runtime).into_iter().flatten().flatten();
        let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let name = names.find(|name| name.starts_with("gpu-check-"))?;
        machine.sandbox.try_state(&name).filter(|state| state["state"] == "ready")
    };
    super::sandbox::eventually("its cluster is READY", Duration::from_secs(60), || {
        ready().is_some()
    });
    faults.answer(&[(0, 226)]);
    let said = running.wait();
    machine.assert_found(&said, check, &["was restarted: ", "CUDA error 226"]);
}

#[test]
fn a_gpu_that_others_have_filled_is_found() {
    let Some(machine) = Machine::on("rtx-4090-2", "a full GPU", "taken=95") else { return };
    let said = machine.gpu_check("free memory");
    machine.assert_found(&said, "free memory", &["GPU 0: ", " MiB are free"]);
}

#[test]
fn nics_that_cannot_read_gpus_are_found() {
    let Some(machine) = Machine::new("no peermem", "") else { return };
    let check = "GPUDirect RDMA";
    let peers = machine.root().join("sys/kernel/mm/memory_peers");
    // The module is loaded, and has registered with nobody.
    std::fs::remove_dir_all(&peers).expect("it was there");
    let said = machine.gpu_check(check);
    machine.assert_found(&said, check, &["neither nvidia_peermem is registered nor dma-buf"]);
    std::fs::create_dir_all(peers.join("nv_mem")).expect("made");
    let said = machine.gpu_check(check);
    assert_eq!(said.code, 0, "{said}");
}
