//! GPUs that are real to the workers: UCX moves device memory, over a stand-in for the CUDA driver.
//!
//! *Invariant:* figures mean nothing here, only ways and verdicts.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::fake_machine::{FakeMachine, ucx};
use crate::sandbox::{Said, Sandbox, eventually};
use crate::skip::skip;

/// A DGX H100 whose driver misbehaves as told.
struct Machine {
    sandbox: Sandbox,
    fake: FakeMachine,
    libucp: PathBuf,
    _folder: tempfile::TempDir,
}

impl Machine {
    /// `None`, loudly, where no libucp knows CUDA.
    fn new(test: &str, faults: &str) -> Option<Self> {
        let Some(libucp) = ucx::with_cuda() else {
            skip(
                "ucx-cuda",
                &format!("{test}: libucx-cu13 is not in .venv, see scripts/setup.sh --tests"),
            );
            return None;
        };
        let folder = tempfile::tempdir().expect("a directory");
        let machine = cuda_cluster::topology::builtin("dgx-h100").expect("built in");
        let machine = cuda_cluster::topology::parse(machine).expect("a machine");
        let fake = FakeMachine::write(&machine, folder.path()).expect("written");
        let fake = fake.with_driver(faults).expect("written");
        Some(Self { sandbox: Sandbox::new(), fake, libucp, _folder: folder })
    }

    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let mut command = self.fake.command();
        command.args(arguments).env("CUDA_CLUSTER_UCX", &self.libucp);
        command.env_remove("UCX_TLS").envs(variables.iter().copied());
        self.sandbox.spawn_program(command).wait()
    }

    fn up(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let up = ["up", "--name", "dev", "--detach"];
        self.run(&[&up, arguments].concat(), variables)
    }

    fn worker(&self, name: &str) -> Value {
        let state = self.sandbox.state("dev");
        let workers = state["workers"].as_array().expect("workers");
        workers.iter().find(|worker| worker["name"] == name).expect(name).clone()
    }

    /// The rows of `verify` or `bench links`.
    fn pairs(&self, arguments: &[&str]) -> (i32, Vec<Value>) {
        let said = self.run(&[arguments, &["-o", "json"]].concat(), &[]);
        let document: Value = serde_json::from_str(&said.stdout).unwrap_or_else(|_| {
            panic!("{arguments:?} prints JSON: {said}");
        });
        (said.code, document["pairs"].as_array().expect("pairs").clone())
    }

    /// Takes the cluster down and reads what its processes left: nothing but what UCX keeps until
    /// the end of its process.
    fn down(&self, workers: usize) -> Vec<Value> {
        let down = self.run(&["down", "dev"], &[]);
        assert_eq!(down.code, 0, "{down}");
        self.sandbox.assert_nothing_is_left();
        let reports = self.fake.reports();
        assert_eq!(
            reports.len(),
            workers,
            "each worker opened the driver, nobody else: {reports:#?}"
        );
        for report in &reports {
            assert_eq!(report["left"]["allocations"]["count"], 0, "{report:#}");
            assert!(report["left"]["contexts"].as_u64() <= Some(1), "{report:#}");
        }
        reports
    }
}

fn moved(report: &Value, way: &str) -> u64 {
    report["moved"][way].as_u64().unwrap_or(0)
}

#[test]
fn two_gpus_move_device_memory_over_cuda_ipc_and_leave_nothing() {
    let Some(machine) = Machine::new("two GPUs", "poison") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink", "--verify"], &[]);
    assert_eq!(up.code, 0, "{up}");
    assert!(up.stderr.contains("verified: 4 ways"), "host and device, both ways: {up}");
    assert_eq!(machine.sandbox.state("dev")["simulated"], false);
    let (code, pairs) = machine.pairs(&["verify", "dev"]);
    assert_eq!(code, 0, "{pairs:#?}");
    let on = |memory: &str| pairs.iter().filter(|pair| pair["memory"] == memory).count();
    assert_eq!((on("host"), on("device")), (2, 2));
    for pair in pairs.iter().filter(|pair| pair["memory"] == "device") {
        assert_eq!(pair["expected"], "cuda_ipc", "{pair}");
        assert_eq!(pair["link"], "NV18", "{pair}");
    }
    let links = ["bench", "links", "dev", "--memory", "device", "--size", "64KiB,4MiB"];
    let (code, pairs) = machine.pairs(&links);
    assert_eq!((code, pairs.len()), (0, 4), "{pairs:#?}");
    for report in machine.down(2) {
        assert!(moved(&report, "peer to device") > 64 << 20, "{report:#}");
        assert!(moved(&report, "host to device") < 1 << 20, "but for short messages: {report:#}");
    }
}

#[test]
fn eight_gpus_reach_each_other_with_copies_that_are_done_later() {
    let Some(machine) = Machine::new("eight GPUs", "async latency=5") else { return };
    let up = machine.up(&["--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let ways = ["verify", "dev", "--from", "gpu0", "--rounds", "1", "--memory", "device"];
    let (code, pairs) = machine.pairs(&ways);
    assert_eq!((code, pairs.len()), (0, 7), "{pairs:#?}");
    let reports = machine.down(8);
    let readers = reports.iter().filter(|report| moved(report, "peer to device") > 0).count();
    assert_eq!(readers, 7, "all but the sender: {reports:#?}");
}

#[test]
fn a_list_without_cuda_ipc_fails_the_verification_with_its_cause() {
    let Some(machine) = Machine::new("no cuda_ipc", "") else { return };
    let list = [("UCX_TLS", "tcp,cuda_copy,sm,self")];
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink", "--verify"], &list);
    assert_eq!(up.code, 4, "{up}");
    let why = "because UCX_TLS=tcp,cuda_copy,sm,self: unset it, or add cuda_ipc";
    assert!(up.stdout.contains("downgraded: cuda_ipc expected") && up.stdout.contains(why), "{up}");
    machine.sandbox.assert_nothing_is_left();
}

#[test]
fn memory_that_cannot_be_mapped_fails_the_verification_although_the_lane_is_listed() {
    let Some(machine) = Machine::new("no IPC", "no-ipc") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink", "--verify"], &[]);
    assert_eq!(up.code, 4, "{up}");
    assert!(up.stdout.contains("cuda_ipc/cuda"), "listed: {up}");
    let why = "cannot map the device memory of gpu0 (mapping of buffer object failed)";
    assert!(up.stdout.contains(why), "{up}");
    machine.sandbox.assert_nothing_is_left();
}

#[test]
fn nobody_expects_cuda_ipc_where_nvlink_is_switched_off() {
    let Some(machine) = Machine::new("NVLink off", "") else { return };
    let up = machine.up(&["--n-workers", "2", "--disable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let (code, pairs) = machine.pairs(&["verify", "dev", "--memory", "both", "--rounds", "1"]);
    assert_eq!(code, 0, "{pairs:#?}");
    for pair in pairs.iter().filter(|pair| pair["memory"] == "device") {
        assert_eq!(pair["expected"], "staging in shared memory", "{pair}");
    }
    for report in machine.down(2) {
        assert_eq!(moved(&report, "peer to device"), 0, "{report:#}");
    }
}

#[test]
fn a_gpu_with_little_memory_says_so() {
    let Some(machine) = Machine::new("little memory", "small=32M") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let said = machine.run(&["verify", "dev"], &[]);
    assert_eq!(said.code, 4, "{said}");
    assert!(said.stdout.contains("failed: "), "{said}");
    eventually("all is as before", Duration::from_secs(30), || {
        machine.sandbox.try_state("dev").is_some_and(|state| state["state"] == "ready")
    });
    machine.down(2);
}

#[test]
fn a_small_gpu_does_its_work_slowly_and_does_not_hang() {
    let Some(machine) = Machine::new("small GPUs", "small=100M") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let sizes = ["--chunks", "4", "--chunk-size", "1024", "--runs", "1"];
    let said = machine.run(&[&["bench", "transpose", "dev"], &sizes[..]].concat(), &[]);
    assert_eq!(
        said.code, 0,
        "128 MiB of chunks, 200 MiB of devices, the host for the rest: {said}"
    );
    machine.down(2);
}

#[test]
fn a_gpu_that_has_faulted_ends_its_worker_and_the_work_goes_on() {
    let folder = tempfile::tempdir().expect("a directory");
    let faults = folder.path().join("faults");
    std::fs::write(&faults, "").expect("written");
    let sticky = format!("sticky={}", faults.display());
    let Some(machine) = Machine::new("a fault", &sticky) else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let before = machine.worker("gpu1");
    // What the chunks are made of is on both GPUs as one of them faults.
    let bench = ["bench", "transpose", "dev", "--chunks", "6", "--chunk-size", "512"];
    let mut command = machine.fake.command();
    command.args(bench).args(["--runs", "4"]).env("CUDA_CLUSTER_UCX", &machine.libucp);
    let running = machine.sandbox.spawn_program(command);
    std::fs::write(&faults, "1 700\n").expect("written");
    let said = running.wait();
    assert_eq!(said.code, 0, "the tasks ran again: {said}");
    eventually("the worker is back", Duration::from_secs(60), || {
        machine.sandbox.try_state("dev").is_some_and(|state| {
            let worker = state["workers"].as_array().and_then(|all| all.get(1));
            worker.is_some_and(|it| it["state"] == "ready" && it["pid"] != before["pid"])
        })
    });
    let after = machine.worker("gpu1");
    let reason = after["last_exit"]["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("the GPU has faulted") && reason.contains("CUDA error 700"),
        "{reason}"
    );
    let bundle = after["last_exit"]["bundle"].as_str().expect("a bundle");
    let crash = std::fs::read_to_string(PathBuf::from(bundle).join("crash.json")).expect("written");
    assert!(crash.contains("CUDA error 700"), "{crash}");
    let other = machine.worker("gpu0");
    assert_eq!(other["restarts"], 0, "{other:#}");
    machine.run(&["down", "dev"], &[]);
    machine.sandbox.assert_only_the_causes_are_left("dev");
}

#[test]
fn ten_thousand_objects_leave_few_mappings_and_no_allocation() {
    let Some(machine) = Machine::new("lifetimes", "") else { return };
    let up = machine.up(&["--n-workers", "4", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    // 1024 chunks of 32 KiB made in each run, and their sums.
    let bench = ["bench", "transpose", "dev", "--chunks", "32", "--chunk-size", "64"];
    let said = machine.run(&[&bench[..], &["--runs", "10"]].concat(), &[]);
    assert_eq!(said.code, 0, "{said}");
    for report in machine.down(4) {
        let ever = report["ever"]["allocations"].as_u64().expect("a count");
        let mapped = report["left"]["mappings"]["count"].as_u64().expect("a count");
        assert!(ever < 40, "objects share slabs: {report:#}");
        assert!(mapped < 40, "and so do their mappings: {report:#}");
    }
}
