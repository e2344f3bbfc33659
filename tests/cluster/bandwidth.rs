//! `doctor --bandwidth`: what is found of the ways between the host and GPUs, and between GPUs.
//!
//! *Invariant:* speeds mean nothing here, only outcomes: ways, bytes, what no speed changes.

use std::time::Duration;

use cuda_cluster::ids::GpuIndex;
use cuda_cluster::topology::ComputeMode;
use serde_json::Value;

use crate::gpus::{Machine, described, moved};
use crate::sandbox::{Said, Sandbox, eventually};

/// GPUs with so little memory copy little at a time.
const SMALL: &str = "small=64M";

/// The exit code, and the rows.
fn measured(machine: &Machine) -> (i32, Vec<Value>) {
    let said = machine.run(&["doctor", "--bandwidth", "-o", "json"], &[]);
    (said.code, rows(&said))
}

fn rows(said: &Said) -> Vec<Value> {
    let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
    document["bandwidth"].as_array().expect("rows").clone()
}

/// The row of a way.
fn row<'a>(rows: &'a [Value], from: &str, to: &str) -> &'a Value {
    let mut found = rows.iter().filter(|row| row["from"] == from && row["to"] == to);
    let row = found.next().unwrap_or_else(|| panic!("{from} to {to}: {rows:#?}"));
    assert!(found.next().is_none(), "{from} to {to} has one row");
    row
}

fn text(row: &Value) -> &str {
    row["text"].as_str().expect("a text")
}

/// The rows with this verdict, as `GPU0 to GPU1`.
fn with_verdict(rows: &[Value], verdict: &str) -> Vec<String> {
    let found = rows.iter().filter(|row| row["verdict"] == verdict);
    let name = |row: &Value| format!("{} to {}", row["from"], row["to"]).replace('"', "");
    found.map(name).collect()
}

/// What the process that measured has left and done.
fn report(machine: &Machine) -> Value {
    let mut reports = machine.fake.reports().into_iter();
    let measured = |report: &Value| report["program"].to_string().contains("__measure-gpus");
    reports.find(measured).expect("it has ended by itself")
}

#[test]
fn each_way_is_measured_its_bytes_are_compared_and_nothing_is_left() {
    let faults = format!("{SMALL} poison");
    let Some(machine) = Machine::on("a100-pcie-4-bridges", "bandwidth", &faults) else { return };
    let (code, rows) = measured(&machine);
    assert_eq!((code, rows.len()), (0, 8 + 12), "{rows:#?}");
    for row in &rows {
        let is_of_host = row["from"] == "host" || row["to"] == "host";
        assert_eq!(row["way"], if is_of_host { "host" } else { "peer" }, "{row}");
        assert!(row["gb_per_s"].as_f64() > Some(0.0), "{row}");
        assert!(row["latency_us"].as_f64() > Some(0.0), "{row}");
        assert!(row["allowed_gb_per_s"].as_f64() >= row["usual_gb_per_s"].as_f64(), "{row}");
        // An eighth of a GPU's memory, or what a busy machine copies in time.
        assert!([1 << 20, 8 << 20].contains(&row["bytes"].as_u64().expect("a count")), "{row}");
    }
    assert_eq!(with_verdict(&rows, "failed"), [""; 0]);
    assert_eq!(with_verdict(&rows, "left_out"), [""; 0]);
    assert_eq!(row(&rows, "host", "GPU2")["path"], "PCIe 4.0 x16");
    assert_eq!(row(&rows, "GPU0", "GPU1")["path"], "NV12");
    let report = report(&machine);
    assert!(moved(&report, "device to other device") > 0, "{report:#}");
    assert_eq!(moved(&report, "device to other device by way of the host"), 0, "{report:#}");
    assert_eq!(report["refused"], serde_json::json!({}), "{report:#}");
    for what in ["contexts", "streams", "registered"] {
        assert_eq!(report["left"][what], 0, "{report:#}");
    }
    assert_eq!(report["left"]["allocations"]["count"], 0, "{report:#}");
    machine.sandbox.assert_nothing_is_left();
}

#[test]
fn the_table_follows_the_findings() {
    let Some(machine) = Machine::on("rtx-4090-2", "a table", SMALL) else { return };
    let said = machine.run(&["doctor", "--bandwidth"], &[]);
    assert_eq!(said.code, 0, "{said}");
    let (findings, table) = said.stdout.split_once("\n\n").expect("both");
    assert!(findings.contains("rtx-4090-2, for 2 workers"), "{said}");
    let heading = table.lines().next().expect("a heading");
    for word in ["FROM", "TO", "WAY", "GB/s", "ALLOWED", "PATH", "VERDICT"] {
        assert!(heading.contains(word), "{said}");
    }
    assert_eq!(table.lines().count(), 1 + 4 + 2, "{said}");
    let without = machine.run(&["doctor", "-o", "json"], &[]);
    assert!(!without.stdout.contains("\"bandwidth\""), "{without}");
}

#[test]
fn without_peer_access_copies_go_by_way_of_the_host() {
    let mut described = described("rtx-4090-2");
    described.gpus.iter_mut().for_each(|gpu| gpu.peers = Some(Vec::new()));
    let Some(machine) = Machine::of(&described, "staged copies", SMALL) else { return };
    let (code, rows) = measured(&machine);
    assert_eq!(code, 0, "{rows:#?}");
    for (from, to) in [("GPU0", "GPU1"), ("GPU1", "GPU0")] {
        let row = row(&rows, from, to);
        assert_eq!(
            (&row["way"], &row["path"]),
            (&"staged".into(), &"host memory, PCIe 4.0 x8".into())
        );
    }
    let report = report(&machine);
    assert_eq!(moved(&report, "device to other device"), 0, "{report:#}");
    assert!(moved(&report, "device to other device by way of the host") > 0, "{report:#}");
}

#[test]
fn nvlinks_that_the_driver_does_not_use_are_told() {
    let mut described = described("dgx-station-a100");
    let index = GpuIndex(1);
    for gpu in &mut described.gpus {
        let all = (0..5).map(GpuIndex).filter(|other| *other != gpu.index);
        let refused = |other: &GpuIndex| gpu.index != index && *other != index;
        gpu.peers = Some(all.filter(refused).collect());
    }
    let Some(machine) = Machine::of(&described, "refused NVLinks", SMALL) else { return };
    let (code, rows) = measured(&machine);
    // Not by a way: preflight calls it an error.
    assert_eq!(code, 4, "{rows:#?}");
    assert!(with_verdict(&rows, "failed").is_empty(), "{rows:#?}");
    let refused = row(&rows, "GPU0", "GPU1");
    assert_eq!(refused["way"], "staged", "{refused}");
    assert!(text(refused).contains("nvidia-fabricmanager"), "{refused}");
    assert_eq!(row(&rows, "GPU0", "GPU2")["way"], "peer", "{rows:#?}");
}

#[test]
fn wrong_bytes_fail_and_name_the_pair() {
    let faults = format!("{SMALL} wrong-bytes=1:0");
    let Some(machine) = Machine::on("rtx-4090-2", "wrong bytes", &faults) else { return };
    let (code, rows) = measured(&machine);
    assert_eq!(code, 4, "{rows:#?}");
    assert_eq!(with_verdict(&rows, "failed"), ["GPU1 to GPU0"]);
    let wrong = row(&rows, "GPU1", "GPU0");
    assert!(text(wrong).starts_with("wrong bytes arrive: 64 of "), "{wrong}");
    assert!(text(wrong).contains("IOMMU"), "what to do: {wrong}");
    let said = machine.run(&["doctor", "--bandwidth"], &[]);
    assert_eq!(said.code, 4, "{said}");
    let line = said.stdout.lines().find(|line| line.contains("FAILED")).expect("a row");
    assert!(line.starts_with("GPU1  GPU0"), "{said}");
}

#[test]
fn wrong_bytes_on_the_way_to_a_gpu_are_not_its_peers_fault() {
    let faults = format!("{SMALL} wrong-bytes=host:1");
    let Some(machine) = Machine::on("rtx-4090-2", "wrong bytes", &faults) else { return };
    let (code, rows) = measured(&machine);
    assert_eq!(code, 4, "{rows:#?}");
    let failed = ["host to GPU1", "GPU1 to host", "GPU1 to GPU0"];
    assert_eq!(with_verdict(&rows, "failed"), failed, "{rows:#?}");
    let pair = row(&rows, "GPU1", "GPU0");
    assert!(text(pair).starts_with("GPU 1 has wrong bytes to send"), "{pair}");
}

#[test]
fn a_slow_pair_is_told_and_does_not_fail() {
    // No copy is faster than its delay, so that the verdict follows, however fast this machine is.
    let faults = format!("{SMALL} slow-copy=0:1:40");
    let Some(machine) = Machine::on("rtx-4090-2", "a slow pair", &faults) else { return };
    let (code, rows) = measured(&machine);
    assert_eq!(code, 0, "{rows:#?}");
    let slow = row(&rows, "GPU0", "GPU1");
    assert_eq!(slow["verdict"], "slow", "{slow}");
    assert_eq!(slow["bytes"], 1 << 20, "as little as shows it: {slow}");
    assert!(text(slow).contains("PCIe 4.0 x8 usually carries 13"), "{slow}");
}

#[test]
fn a_driver_that_hangs_in_a_copy_is_named_by_the_pair() {
    let faults = format!("{SMALL} hang-copy=2:0");
    let Some(machine) = Machine::on("a100-pcie-4-bridges", "a hanging copy", &faults) else {
        return;
    };
    let (code, rows) = measured(&machine);
    assert_eq!((code, rows.len()), (4, 8 + 12), "{rows:#?}");
    assert_eq!(with_verdict(&rows, "failed"), ["GPU2 to GPU0"]);
    assert_eq!(text(row(&rows, "GPU2", "GPU0")), "no answer within 10s");
    assert!(row(&rows, "host", "GPU3")["gb_per_s"].is_f64(), "what came before: {rows:#?}");
    let left_out = with_verdict(&rows, "left_out");
    assert!(!left_out.is_empty(), "{rows:#?}");
    for row in rows.iter().filter(|row| row["verdict"] == "left_out") {
        assert!(text(row).contains("GPU2 to GPU0 had no end"), "{row}");
    }
    eventually("the process that hung is gone", Duration::from_secs(20), || {
        machine.sandbox.pids().is_empty()
    });
}

#[test]
fn gpus_that_no_program_can_use_are_left_out_with_a_row() {
    let mut described = described("dgx-a100-mig");
    described.gpus.truncate(4);
    described.links = described.derive_links();
    described.gpus[3].compute_mode = Some(ComputeMode::Prohibited);
    let Some(machine) = Machine::of(&described, "MIG", SMALL) else { return };
    let (code, rows) = measured(&machine);
    // The check of CUDA has failed on GPU 3, which is not among its ways' failures.
    assert_eq!((code, rows.len()), (4, 2 + 3), "GPU 2 alone is measured: {rows:#?}");
    for (gpu, why) in [("GPU0", "MIG mode"), ("GPU1", "MIG mode"), ("GPU3", "PROHIBITED")] {
        let row = row(&rows, "host", gpu);
        assert_eq!(row["verdict"], "left_out", "{row}");
        assert!(text(row).contains(why), "{row}");
    }
    assert!(row(&rows, "GPU2", "host")["gb_per_s"].is_f64(), "{rows:#?}");
}

#[test]
fn gpus_that_do_not_open_fail_once_each_with_what_to_do() {
    let Some(machine) = Machine::on("rtx-4090-2", "no CUDA", "init=802") else { return };
    let (code, rows) = measured(&machine);
    assert_eq!((code, rows.len()), (4, 4 + 2), "{rows:#?}");
    let failed = with_verdict(&rows, "failed");
    assert_eq!(failed, ["host to GPU0", "host to GPU1"]);
    assert!(text(&rows[0]).contains("cuInit failed"), "{rows:#?}");
    assert!(text(&rows[0]).contains("nvidia-fabricmanager"), "{rows:#?}");
    assert_eq!(with_verdict(&rows, "left_out").len(), 4, "{rows:#?}");
}

#[test]
fn full_gpus_are_left_out() {
    let Some(machine) = Machine::on("rtx-4090-2", "full GPUs", "small=7M") else { return };
    let (code, rows) = measured(&machine);
    assert_eq!(code, 0, "{rows:#?}");
    assert_eq!(with_verdict(&rows, "left_out").len(), 4 + 2, "{rows:#?}");
    assert!(text(&rows[0]).contains("bytes free"), "{rows:#?}");
}

#[test]
fn a_machine_without_gpus_has_nothing_to_measure() {
    let sandbox = Sandbox::new();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.args(["doctor", "--bandwidth", "-o", "json"]).env("CUDA_CLUSTER_NVML", "none");
    let said = sandbox.spawn_program(command).wait();
    assert_eq!((said.code, rows(&said).len()), (0, 0), "{said}");
    assert!(said.stderr.contains("there is no GPU"), "{said}");
}
