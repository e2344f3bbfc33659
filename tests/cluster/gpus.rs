//! GPUs that workers see as real: UCX moves device memory through a stand-in for the CUDA driver.
//!
//! *Invariant:* speeds mean nothing here, only lanes and verdicts.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuda_cluster::cluster::Client;
use cuda_cluster::topology::{self, Topology};
use serde_json::{Value, json};

use crate::fake_machine::{FakeMachine, ucx};
use crate::sandbox::{Said, Sandbox, eventually};
use crate::skip::skip;

/// A machine that is built in, to be described otherwise.
pub(super) fn described(name: &str) -> Topology {
    topology::parse(topology::builtin(name).expect("built in")).expect("a machine")
}

/// A machine whose CUDA driver misbehaves on request.
pub(super) struct Machine {
    pub(super) sandbox: Sandbox,
    pub(super) fake: FakeMachine,
    libucp: PathBuf,
    folder: tempfile::TempDir,
}

/// What makes the GPUs of a machine fault.
pub(super) struct Faults {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Faults {
    /// GPUs, by number, answer with these codes from now on.
    pub(super) fn answer(&self, codes: &[(usize, i32)]) {
        let lines: Vec<String> =
            codes.iter().map(|(gpu, code)| format!("{gpu} {code}\n")).collect();
        std::fs::write(&self.path, lines.concat()).expect("written");
    }
}

impl Machine {
    /// A DGX H100. `None`, with a recorded skip, if no libucp supports CUDA.
    pub(super) fn new(test: &str, faults: &str) -> Option<Self> {
        Self::on("dgx-h100", test, faults)
    }

    pub(super) fn libucp(&self) -> &Path {
        &self.libucp
    }

    /// Its programs open another UCX.
    pub(super) fn with_libucp(mut self, libucp: PathBuf) -> Self {
        self.libucp = libucp;
        self
    }

    /// Where its files are.
    pub(super) fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Its NVML misbehaves.
    pub(super) fn with_nvml_faults(mut self, faults: &str) -> Self {
        self.fake = self.fake.with_faults(faults);
        self
    }

    /// One of its GPUs is not well.
    pub(super) fn with_health(mut self, gpu: u32, facts: Value) -> Self {
        self.fake = self.fake.with_health(Some(gpu), facts).expect("written");
        self
    }

    /// It has NVML, but no libcuda.
    pub(super) fn without_driver(self) -> Self {
        std::fs::remove_file(self.folder.path().join("lib/libcuda.so.1")).expect("it was there");
        self
    }

    /// Its driver lacks this function.
    pub(super) fn without(mut self, function: &str) -> Self {
        self.fake = self.fake.without(function).expect("written");
        self
    }

    pub(super) fn on(name: &str, test: &str, faults: &str) -> Option<Self> {
        Self::of(&described(name), test, faults)
    }

    /// One whose GPUs fault when a line is appended to a file (`sticky`).
    pub(super) fn that_faults(name: &str, test: &str) -> Option<(Self, Faults)> {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("faults");
        std::fs::write(&path, "").expect("written");
        let machine = Self::on(name, test, &format!("sticky={}", path.display()))?;
        Some((machine, Faults { path, _folder: folder }))
    }

    /// The machine that is described.
    pub(super) fn of(machine: &Topology, test: &str, faults: &str) -> Option<Self> {
        let Some(libucp) = ucx::with_cuda() else {
            skip(
                "ucx-cuda",
                &format!("{test}: libucx-cu13 is not in .venv, see scripts/setup.sh --tests"),
            );
            return None;
        };
        let folder = tempfile::tempdir().expect("a directory");
        let fake = FakeMachine::write(machine, folder.path()).expect("written");
        let fake = fake.with_driver(faults).expect("written");
        Some(Self { sandbox: Sandbox::new(), fake, libucp, folder })
    }

    pub(super) fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let mut command = self.fake.command();
        command.args(arguments).env("CUDA_CLUSTER_UCX", &self.libucp);
        command.env_remove("UCX_TLS").envs(variables.iter().copied());
        self.sandbox.spawn_program(command).wait()
    }

    pub(super) fn up(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Said {
        let up = ["up", "--name", "dev", "--detach"];
        self.run(&[&up, arguments].concat(), variables)
    }

    pub(super) fn client(&self) -> Client {
        let directory = self.sandbox.runtime().join("cuda-cluster/dev");
        Client::connect(&directory).expect("a client")
    }

    pub(super) fn worker(&self, name: &str) -> Value {
        let state = self.sandbox.state("dev");
        let workers = state["workers"].as_array().expect("workers");
        workers.iter().find(|worker| worker["name"] == name).expect(name).clone()
    }

    /// Where its processes write what they left.
    fn fake_reports(&self) -> PathBuf {
        self.folder.path().join("reports")
    }

    /// What Prometheus gets.
    fn metrics(&self) -> String {
        let socket = self.sandbox.base().join("dev/control.sock");
        let mut stream = UnixStream::connect(socket).expect("the supervisor listens");
        let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(request).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    /// The rows of `verify` or `bench links`.
    pub(super) fn pairs(&self, arguments: &[&str]) -> (i32, Vec<Value>) {
        let said = self.run(&[arguments, &["-o", "json"]].concat(), &[]);
        let document: Value = serde_json::from_str(&said.stdout).unwrap_or_else(|_| {
            panic!("{arguments:?} prints JSON: {said}");
        });
        (said.code, document["pairs"].as_array().expect("pairs").clone())
    }

    /// Takes the cluster down and reads what its processes left: nothing except what UCX keeps
    /// until the end of its process.
    pub(super) fn down(&self, workers: usize) -> Vec<Value> {
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

pub(super) fn moved(report: &Value, way: &str) -> u64 {
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
    let against = ["bench", "links", "dev", "--against", "prediction", "--size", "64KiB"];
    let said = machine.run(&[&against[..], &["--rounds", "1", "-o", "json"]].concat(), &[]);
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let compared = document["against_prediction"]["pairs"].as_array().expect("pairs");
    let limits: Vec<&Value> = compared.iter().map(|it| &it["predicted"]["limited_by"]).collect();
    assert_eq!(limits.len(), 2, "{said}");
    assert!(limits.iter().all(|part| part["kind"] == "nv_link"), "{said}");
    let host = machine.run(&[&against[..], &["--memory", "host"]].concat(), &[]);
    assert_eq!(host.code, 2, "{host}");
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
    let links =
        ["bench", "links", "dev", "--from", "gpu3", "--memory", "device", "--size", "64KiB"];
    let (code, pairs) = machine.pairs(&[&links[..], &["--rounds", "1"]].concat());
    assert_eq!((code, pairs.len()), (0, 7), "{pairs:#?}");
    let bench =
        ["bench", "transpose", "dev", "--chunks", "8", "--chunk-size", "128", "--runs", "1"];
    let said = machine.run(&[&bench[..], &["--check"]].concat(), &[]);
    assert_eq!(said.code, 0, "{said}");
    let reports = machine.down(8);
    let readers = reports.iter().filter(|report| moved(report, "peer to device") > 0).count();
    assert_eq!(readers, 8, "each has read from others: {reports:#?}");
    let late = reports.iter().filter(|report| report["landed_later"] != 0).count();
    assert_eq!(late, 0, "a peer may read what has not arrived yet: {reports:#?}");
}

/// UCX makes a context synchronous when it opens, but drivers before 12.1 cannot; then it does so
/// slab by slab, when it first sees one: after the first copy to it.
#[test]
fn what_is_copied_to_a_new_slab_is_there_for_peers_also_with_old_drivers() {
    let mut old = described("dgx-h100");
    old.cuda = Some("12.0".to_owned());
    let Some(machine) = Machine::of(&old, "an old driver", "async") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let bench = ["bench", "transpose", "dev", "--chunks", "6", "--chunk-size", "512", "--check"];
    let said = machine.run(&[&bench[..], &["--runs", "1"]].concat(), &[]);
    assert_eq!(said.code, 0, "{said}");
    for report in machine.down(2) {
        assert!(moved(&report, "host to device") > 1 << 20, "{report:#}");
        assert_eq!(report["landed_later"], 0, "a peer reads what has not arrived: {report:#}");
    }
}

#[test]
fn a_list_without_cuda_ipc_fails_the_verification_with_its_cause() {
    let Some(machine) = Machine::new("no cuda_ipc", "") else { return };
    let list = [("UCX_TLS", "tcp,cuda_copy,sm,self")];
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink", "--verify"], &list);
    assert_eq!(up.code, 4, "{up}");
    let why = "because UCX_TLS=tcp,cuda_copy,sm,self: unset it, or add cuda_ipc";
    assert!(up.stdout.contains("downgraded: cuda_ipc expected") && up.stdout.contains(why), "{up}");
    // A program gets JSON alone on standard output.
    let json = ["--n-workers", "2", "--enable-nvlink", "--verify", "-o", "json"];
    let up = machine.up(&json, &list);
    assert_eq!(up.code, 4, "{up}");
    assert!(up.stderr.contains("downgraded: cuda_ipc expected") && up.stderr.contains(why), "{up}");
    let reports: Vec<Value> = up
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line} is JSON: {up}")))
        .collect();
    let last = reports.last().expect("the failure");
    assert_eq!((&last["report"], &last["exit_code"]), (&"failed".into(), &4.into()), "{up}");
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
fn device_memory_goes_through_host_memory_where_ucx_cannot_access_it() {
    let Some(machine) = Machine::new("UCX without CUDA", "poison") else { return };
    let Some(libucp) = with_verbs("UCX without CUDA") else { return };
    // A libucp that does not know CUDA, and a list that leaves it out.
    for without in [("CUDA_CLUSTER_UCX", libucp.as_str()), ("UCX_TLS", "posix,cma,self")] {
        let up = machine.up(&["--n-workers", "2", "--disable-nvlink"], &[without]);
        assert_eq!(up.code, 0, "{up}");
        let (code, pairs) = machine.pairs(&["verify", "dev", "--memory", "device", "--rounds=1"]);
        assert_eq!((code, pairs.len()), (0, 2), "{without:?}: {pairs:#?}");
        let bench = ["bench", "transpose", "dev", "--chunks=8", "--chunk-size=128", "--runs=1"];
        let said = machine.run(&[&bench[..], &["--check"]].concat(), &[]);
        assert_eq!(said.code, 0, "{without:?}: {said}");
        assert_eq!(machine.worker("gpu0")["restarts"], 0);
        for report in machine.down(2) {
            assert_eq!(moved(&report, "peer to device"), 0, "{report:#}");
            assert!(moved(&report, "device to host") > 0, "{report:#}");
        }
        std::fs::remove_dir_all(machine.fake_reports()).expect("reports of this turn");
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
    let Some((machine, faults)) = Machine::that_faults("dgx-h100", "a fault") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let before = machine.worker("gpu1");
    // What the chunks are made of is on both GPUs as one of them faults.
    let bench = ["bench", "transpose", "dev", "--chunks", "6", "--chunk-size", "512"];
    let mut command = machine.fake.command();
    command.args(bench).args(["--runs", "4"]).env("CUDA_CLUSTER_UCX", &machine.libucp);
    let running = machine.sandbox.spawn_program(command);
    faults.answer(&[(1, 700)]);
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

#[test]
fn a_pool_has_the_planned_sizes_and_ps_and_metrics_show_its_use() {
    let Some(machine) = Machine::new("a pool", "") else { return };
    let sizes = ["--rmm-pool-size", "256MiB", "--rmm-maximum-pool-size", "320MiB"];
    let up = machine.up(&[&["--n-workers", "2", "--enable-nvlink"], &sizes[..]].concat(), &[]);
    assert_eq!(up.code, 0, "{up}");
    let fresh = machine.worker("gpu0")["device_pool"].clone();
    assert_eq!((&fresh["slabs"], &fresh["held_bytes"]), (&json!(1), &json!(256 << 20)), "{fresh}");
    assert_eq!(fresh["used_bytes"], 0, "{fresh}");
    // 1 GiB of chunks and their sums go through 640 MiB.
    let bench = ["bench", "transpose", "dev", "--chunks", "8", "--chunk-size", "1448", "--check"];
    let said = machine.run(&[&bench[..], &["--runs", "2"]].concat(), &[]);
    assert_eq!(said.code, 0, "{said}");
    for name in ["gpu0", "gpu1"] {
        let pool = machine.worker(name)["device_pool"].clone();
        let bytes = |key: &str| pool[key].as_u64().expect(key);
        assert!((256 << 20..=320 << 20).contains(&bytes("held_bytes")), "{pool}");
        assert_eq!(bytes("maximum_bytes"), 320 << 20);
        assert!(bytes("mapped_by_peers_bytes") > 0, "the other has read from it: {pool}");
    }
    let wide = machine.run(&["ps", "dev", "-o", "wide"], &[]);
    let shown = wide.stdout.contains("at most 320.0 MiB") && wide.stdout.contains("% fragmented");
    assert!(shown && wide.stdout.contains("mapped by peers"), "{wide}");
    assert!(wide.stdout.contains("GPU MEMORY") && wide.stdout.contains("USE"), "{wide}");
    // With the made-up NVML, which `state` is without.
    let ps = machine.run(&["ps", "dev", "-o", "json"], &[]);
    let state: Value = serde_json::from_str(&ps.stdout).expect("JSON");
    let gpu = state["workers"][0]["gpu_use"].clone();
    assert!(gpu["used_bytes"].is_u64() && gpu["total_bytes"].is_u64(), "{gpu}");
    let metrics = machine.metrics();
    for family in
        ["slabs", "held_bytes", "used_bytes", "largest_free_bytes", "mapped_by_peers_bytes"]
    {
        let line =
            format!("cuda_cluster_device_pool_{family}{{cluster=\"dev\",process=\"gpu1\"}} ");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let shown = ["gpu0", "gpu1"].map(|name| machine.worker(name)["device_pool"].clone());
    let shown = shown.map(|pool| pool["mapped_by_peers_bytes"].as_u64().expect("a count"));
    let reports = machine.down(2);
    let mapped = reports.iter().map(|report| &report["left"]["mappings"]["bytes"]);
    let mapped: u64 = mapped.map(|bytes| bytes.as_u64().expect("a count")).sum();
    assert!(mapped <= shown.iter().sum(), "at most {shown:?} is mapped: {reports:#?}");
    for report in &reports {
        let bytes = report["left"]["mappings"]["bytes"].as_u64().expect("a count");
        assert!(bytes <= 320 << 20, "no more than the pool's maximum for its one peer: {report:#}");
    }
}

#[test]
fn ucx_removes_mappings_of_a_peers_memory_beyond_the_limit_that_workers_set() {
    let Some(machine) = Machine::new("mappings", "") else { return };
    // Workers set this variable to what a GPU has beside its data, which here is much.
    let limit = [("UCX_CUDA_IPC_CACHE_MAX_SIZE", "67108864")];
    // A scheduler that learns would soon move nothing.
    let spec = machine.sandbox.runtime().join("in-turn.yaml");
    std::fs::write(&spec, "version: 1\nnative: {placement: round-robin}\n").expect("a spec");
    let spec = spec.to_str().expect("a path in UTF-8");
    let up = machine.up(&["-f", spec, "--n-workers", "2", "--enable-nvlink"], &limit);
    assert_eq!(up.code, 0, "{up}");
    // Two chunks of 32 MiB fill a slab; the one that is read last may exceed the limit.
    let bench = ["bench", "transpose", "dev", "--chunks", "5", "--chunk-size", "2048"];
    let said = machine.run(&[&bench[..], &["--runs", "4"]].concat(), &[]);
    assert_eq!(said.code, 0, "{said}");
    let ucx = machine.worker("gpu0")["ucx"].as_str().expect("its version").to_owned();
    // The oldest that knows the variable.
    let keeps_all = ["1.18.", "1.19.", "1.20."].iter().any(|version| ucx.starts_with(version));
    for report in machine.down(2) {
        let (ever, left) = (&report["ever"]["mappings"], &report["left"]["mappings"]);
        assert!(ever.as_u64() > Some(2), "more than may stay: {report:#}");
        if keeps_all {
            assert_eq!(ever, &left["count"], "{report:#}");
        } else {
            let kept = left["bytes"].as_u64().expect("a count");
            assert!(kept <= 2 * (64 << 20), "{report:#}");
        }
    }
}

#[test]
fn a_pool_that_does_not_fit_ends_the_start_with_what_is_free() {
    let Some(machine) = Machine::new("a large pool", "small=1G") else { return };
    let up = machine.up(&["--n-workers", "2", "--rmm-pool-size", "4GiB"], &[]);
    assert_eq!(up.code, 1, "{up}");
    let cause = "less than the pool's initial size of 4.0 GiB; hint: lower rmm.pool_size";
    assert!(up.stderr.contains(cause), "{up}");
    machine.run(&["down", "dev"], &[]);
    machine.sandbox.assert_only_the_causes_are_left("dev");
}

#[test]
fn a_planned_port_that_ucx_has_not_opened_is_said_and_fails_the_verification() {
    let Some(machine) = Machine::new("no verbs", "") else { return };
    // The machine's ports are active as far as sysfs tells, and this libucp has no InfiniBand.
    let arguments = ["--n-workers", "2", "--enable-infiniband", "--enable-nvlink"];
    let up = machine.up(&arguments, &[]);
    assert_eq!(up.code, 0, "{up}");
    assert!(up.stderr.contains("(libuct_ib), which are asked for"), "planned with a note: {up}");
    let why = "has no transports for InfiniBand and RoCE: libuct_ib is not there";
    assert!(up.stderr.contains("is planned, but not in use") && up.stderr.contains(why), "{up}");
    let missing = machine.worker("gpu1")["missing_ports"].clone();
    let port = missing[0]["port"].as_str().expect("a port");
    assert!(missing[0]["why"].as_str().is_some_and(|text| text.contains(why)), "{missing}");
    let ps = machine.run(&["ps", "dev"], &[]);
    assert!(ps.stdout.contains(&format!("({port})")), "{ps}");
    assert!(ps.stdout.contains(&format!("gpu1: {port} is not in use: ")), "{ps}");
    let verify = machine.run(&["verify", "dev", "--rounds", "1"], &[]);
    assert_eq!(verify.code, 4, "{verify}");
    assert!(verify.stdout.contains("is planned for gpu0, but not in use"), "{verify}");
    assert!(
        machine.metrics().contains("process_missing_ports{cluster=\"dev\",process=\"gpu0\"} 1")
    );
    machine.down(2);
    let only = [("UCX_TLS", "rc,cuda_copy,self")];
    let up = machine.up(&arguments, &only);
    assert_eq!(up.code, 1, "without shared memory nothing reaches the other worker: {up}");
    let cause = "UCX has opened nothing that reaches another worker";
    assert!(up.stderr.contains(cause) && up.stderr.contains("missing: mlx5_"), "{up}");
}

/// A libucp with transports for InfiniBand, of the system. `None`, with a recorded skip, if there is
/// none.
fn with_verbs(test: &str) -> Option<String> {
    let system = Path::new("/usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
    let libucp = system.join("libucp.so.0");
    if libucp.exists() && system.join("ucx/libuct_ib.so.0").exists() {
        return Some(libucp.display().to_string());
    }
    skip("ucx-verbs", &format!("{test}: libucx0 is not installed, see scripts/setup.sh"));
    None
}

#[test]
fn under_strict_a_worker_without_its_planned_port_ends_at_once_with_the_cause() {
    let Some(machine) = Machine::new("strict ports", "") else { return };
    let Some(libucp) = with_verbs("strict ports") else { return };
    let arguments = ["--n-workers", "2", "--enable-infiniband", "--disable-nvlink"];
    let devices = ["--net-devices", "mlx5_0:1", "--strict"];
    // This machine does not have the CPUs of the made-up one.
    let unbound = ["--cpus", "none", "--memory-policy", "none"];
    let up = [&arguments[..], &devices, &unbound].concat();
    let up = machine.up(&up, &[("CUDA_CLUSTER_UCX", &libucp)]);
    assert_eq!(up.code, 1, "{up}");
    let cause = "planned for this worker, but not in use: mlx5_0:1 (/dev/infiniband";
    assert!(up.stderr.contains(cause), "{up}");
    assert!(up.stderr.contains("--device=/dev/infiniband"), "what a container needs: {up}");
}

#[test]
fn too_little_locked_memory_for_infiniband_is_refused_before_anything_starts() {
    let Some(machine) = Machine::new("locked memory", "") else { return };
    let limited = "ulimit -l 64 && exec setpriv --bounding-set=-ipc_lock \"$@\"";
    let up = |arguments: &[&str]| {
        let program = machine.fake.command().get_program().to_owned();
        let mut command = std::process::Command::new("sh");
        command.args(["-c", limited, "sh"]).arg(program).args(["up", "--name", "dev"]);
        command.args(["--detach", "--n-workers", "2"]).args(arguments);
        command.envs(machine.fake.environment()).env("CUDA_CLUSTER_UCX", &machine.libucp);
        machine.sandbox.spawn_program(command).wait()
    };
    let refused = up(&["--enable-infiniband"]);
    assert_eq!(refused.code, 1, "{refused}");
    assert!(refused.stderr.contains("the limit on locked memory is 64.0 KiB"), "{refused}");
    assert!(refused.stderr.contains("ulimit -l unlimited"), "{refused}");
    machine.sandbox.assert_nothing_is_left();
    let without = up(&["--enable-nvlink"]);
    assert_eq!(without.code, 0, "without InfiniBand nothing is locked: {without}");
    machine.down(2);
}

#[test]
fn a_merge_survives_kills_while_copies_are_done_later() {
    let Some(machine) = Machine::new("kills", "poison async") else { return };
    let up = machine.up(&["--n-workers", "8", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    for victim in ["gpu5", "gpu0"] {
        let mut command = machine.fake.command();
        command.args(["bench", "merge", "dev", "--parts", "12", "--rows", "60000", "--check"]);
        command.args(["--runs", "3"]);
        let running = machine.sandbox.spawn_program(command);
        eventually("some of it is done", Duration::from_secs(60), || {
            let tasks = machine.client().overview().expect("told");
            tasks.workers.iter().any(|worker| worker.finished > 5)
        });
        machine.sandbox.kill(machine.worker(victim)["pid"].as_u64().expect("a pid"));
        let said = running.wait();
        assert_eq!(said.code, 0, "{said}");
        eventually("all are back", Duration::from_secs(60), || {
            machine.sandbox.try_state("dev").is_some_and(|state| state["state"] == "ready")
        });
    }
    for worker in machine.sandbox.state("dev")["workers"].as_array().expect("workers") {
        let killed = ["gpu5", "gpu0"].contains(&worker["name"].as_str().expect("a name"));
        assert_eq!(worker["restarts"], u32::from(killed), "it takes no other with it: {worker:#}");
    }
    machine.run(&["down", "dev"], &[]);
    machine.sandbox.assert_only_the_causes_are_left("dev");
}

/// Runs ranks on four GPUs of which the first start's rank 1 loses its own; what they said, and what
/// those of the second start said, by rank. With `programs` they run two, of two ranks each.
fn run_and_lose_a_gpu(spares: &str, programs: bool) -> Option<(crate::sandbox::Said, Vec<String>)> {
    let machine = Machine::new("a GPU that falls off the bus", "")?;
    let fallen = machine.folder.path().join("fallen");
    let machine = machine.with_nvml_faults(&format!("fallen={}", fallen.display()));
    // What the second start is told, and where it is bound.
    let script = "echo $TORCHELASTIC_RESTART_COUNT $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES \
                  $ROLE_NAME:$ROLE_RANK/$ROLE_WORLD_SIZE $CUDA_CLUSTER_PROCESS; \
                  if [ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ]; then \
                  sleep 0.3; echo 1 > \"$0\"; kill -9 $$; fi; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
    let fallen = fallen.display().to_string();
    let shape: &[&str] = match programs {
        true => &["--program", "a=2", "--program", "b=2"],
        false => &["--n-workers", "4"],
    };
    let flags = ["run", "--name", "lost", "--restarts", "1", "--spares", spares];
    let command = ["sh", "-c", script, &fallen];
    let other: Vec<&str> = if programs { [&[":"][..], &command].concat() } else { Vec::new() };
    let said = machine.run(&[&flags[..], shape, &["--"], &command, &other].concat(), &[]);
    machine.sandbox.assert_only_the_causes_are_left("lost");
    assert_eq!(said.code, 0, "{said}");
    let again = said.stdout.lines().filter(|line| line.starts_with('1'));
    let mut again: Vec<String> = again.map(str::to_owned).collect();
    again.sort_unstable();
    Some((said, again))
}

#[test]
fn a_spare_gpu_takes_the_rank_of_one_that_falls_off_the_bus() {
    let Some((said, lines)) = run_and_lose_a_gpu("1", false) else { return };
    let [zero, one, two, three] = &lines[..] else { panic!("{said}") };
    assert!(zero.ends_with(" gpu0") && one.starts_with("1 1/4 ") && one.ends_with(" gpu4"));
    assert!(two.ends_with(" gpu2") && three.ends_with(" gpu3"), "{said}");
    let seen = |line: &str| line.split(' ').nth(2).map(str::to_owned).expect("devices");
    assert_eq!(seen(zero), seen(three), "all see the same list");
    assert_eq!(seen(zero).split(',').collect::<Vec<_>>(), ["0", "4", "2", "3"], "{said}");
    let first = said.stdout.lines().find(|line| line.starts_with("0 0/4")).expect("rank 0");
    assert_eq!(seen(first), "0,1,2,3", "the spare is not shown");
    assert!(said.stderr.contains("run: gpu1: replaced by gpu4"), "{said}");
    assert!(said.stderr.contains("run: rank 1: gpu1 was ended by signal 9"), "{said}");
}

#[test]
fn without_a_spare_the_ranks_go_on_without_a_gpu_that_falls_off_the_bus() {
    let Some((said, lines)) = run_and_lose_a_gpu("0", false) else { return };
    let told = [
        "1 0/3 0,2,3 default:0/3 gpu0",
        "1 1/3 0,2,3 default:1/3 gpu2",
        "1 2/3 0,2,3 default:2/3 gpu3",
    ];
    assert_eq!(lines, told, "{said}");
    assert!(said.stderr.contains("gpu1: left out: the job has one rank less"), "{said}");
}

#[test]
fn a_spare_runs_the_program_of_the_rank_whose_place_it_takes() {
    let Some((said, lines)) = run_and_lose_a_gpu("1", true) else { return };
    let told = [
        "1 0/4 0,4,2,3 a:0/2 gpu0",
        "1 1/4 0,4,2,3 a:1/2 gpu4",
        "1 2/4 0,4,2,3 b:0/2 gpu2",
        "1 3/4 0,4,2,3 b:1/2 gpu3",
    ];
    assert_eq!(lines, told, "{said}");
}

#[test]
fn without_a_spare_a_program_goes_on_with_fewer_ranks_and_the_other_with_all() {
    let Some((said, lines)) = run_and_lose_a_gpu("0", true) else { return };
    let told = ["1 0/3 0,2,3 a:0/1 gpu0", "1 1/3 0,2,3 b:0/2 gpu2", "1 2/3 0,2,3 b:1/2 gpu3"];
    assert_eq!(lines, told, "{said}");
}

#[test]
fn ucx_hears_of_allocations_on_the_stand_in_and_has_its_registration_cache() {
    let Some(machine) = Machine::new("registration cache", "") else { return };
    let log = machine.folder.path().join("ucx.log").display().to_string();
    let told = [("UCX_LOG_FILE", &*log), ("UCX_LOG_LEVEL", "debug")];
    let up = machine.up(&["--n-workers", "1", "--enable-nvlink"], &told);
    assert_eq!(up.code, 0, "{up}");
    machine.down(1);
    let log = std::fs::read_to_string(log).expect("UCX's log");
    assert!(log.contains("rcache"), "UCX opens the cache: {log}");
    assert!(!log.contains("failed to install UCM event handler"), "{log}");
}

#[test]
fn workers_that_lose_the_scheduler_in_the_middle_of_their_work_free_their_devices() {
    let Some(machine) = Machine::new("no scheduler", "") else { return };
    let up = machine.up(&["--n-workers", "4", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let mut command = machine.fake.command();
    command.args(["bench", "transpose", "dev", "--chunks", "8", "--chunk-size", "128"]);
    command.args(["--runs", "1000"]);
    let running = machine.sandbox.spawn_program(command);
    eventually("some of it is done", Duration::from_secs(60), || {
        let tasks = machine.client().overview().expect("told");
        tasks.workers.iter().all(|worker| worker.finished > 50)
    });
    let pid = machine.sandbox.state("dev")["scheduler"]["pid"].as_u64().expect("a pid");
    machine.sandbox.kill(pid);
    let said = running.wait();
    assert_ne!(said.code, 0, "its results are lost: {said}");
    eventually("all have started again", Duration::from_secs(60), || {
        machine
            .sandbox
            .try_state("dev")
            .is_some_and(|state| state["state"] == "ready" && state["scheduler"]["pid"] != pid)
    });
    machine.run(&["down", "dev"], &[]);
    machine.sandbox.assert_only_the_causes_are_left("dev");
    let reports = machine.fake.reports();
    assert_eq!(reports.len(), 8, "{reports:#?}");
    for report in &reports {
        assert_eq!(report["left"]["allocations"]["count"], 0, "{report:#}");
    }
}

#[test]
fn objects_go_from_the_device_to_the_host_and_to_the_disk_and_come_back() {
    // More than the devices, 48 MiB each, and the host memory that the limits leave can hold.
    for (workers, limit, chunks) in [(2, "400MiB", "20"), (8, "250MiB", "26")] {
        let Some(machine) = Machine::new("spilling", "poison") else { return };
        let limits = ["--device-memory-limit", "48MiB", "--memory-limit", limit];
        let count = workers.to_string();
        let up =
            machine.up(&[&["--n-workers", &count, "--enable-nvlink"], &limits[..]].concat(), &[]);
        assert_eq!(up.code, 0, "{up}");
        let bench =
            ["bench", "transpose", "dev", "--chunks", chunks, "--chunk-size", "512", "--check"];
        let said = machine.run(&[&bench[..], &["--runs=1", "-o", "json"]].concat(), &[]);
        assert_eq!(said.code, 0, "{said}");
        let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
        for worker in document["workers"].as_array().expect("workers") {
            for (level, what) in
                [("host", "demoted_bytes"), ("disk", "demoted_bytes"), ("disk", "promoted_bytes")]
            {
                let bytes = worker["memory"][level][what].as_u64().expect("a count");
                assert!(bytes > 0, "{what} of the {level}: {worker:#}");
            }
        }
        machine.down(workers);
    }
}
