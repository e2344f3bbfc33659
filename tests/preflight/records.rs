//! A machine that was recorded is judged as it would be where it was.

use cuda_cluster::preflight::Finding;
use serde_json::{Value, json};

use crate::machine::on;

#[test]
fn a_record_is_judged_as_the_machine_was() {
    let folder = tempfile::tempdir().expect("a directory");
    let place = on("dgx-h100").health(3, json!({"ecc_uncorrected": 2}));
    let fake = place.write(&folder.path().join("machine").tap_made());
    let file = folder.path().join("record.json");
    let name = file.to_str().expect("UTF-8");
    let record = fake.command().args(["doctor", "--record", name]).output().expect("it runs");
    assert!(record.status.success(), "{}", String::from_utf8_lossy(&record.stderr));
    let here = place.doctor();
    // Where nothing of the machine is.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let there =
        command.args(["doctor", "--evidence", name, "-o", "json"]).output().expect("it runs");
    let document: Value = serde_json::from_slice(&there.stdout).expect("JSON");
    let there: Vec<Finding> =
        serde_json::from_value(document["findings"].clone()).expect("findings");
    let of = |findings: &[Finding], id: &str| -> Vec<String> {
        let own = findings.iter().filter(|one| one.id == id);
        own.map(|one| format!("{:?} {:?} {}", one.severity, one.about, one.text)).collect()
    };
    for id in ["ecc-errors", "fabric-state", "iommu", "memory-held", "numa-memory"] {
        assert_eq!(of(&there, id), of(&here.findings, id), "{id}");
        assert!(!of(&there, id).is_empty(), "{id}");
    }
}

#[test]
fn a_record_that_is_none_is_refused() {
    let folder = tempfile::tempdir().expect("a directory");
    for (text, part) in [("{}", "cannot use record"), ("{\"version\":9}", "cannot use record")] {
        let file = folder.path().join("record.json");
        std::fs::write(&file, text).expect("written");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        let output = command.args(["doctor", "--evidence"]).arg(&file).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(part), "{errors}");
    }
}

/// A directory that is made where it is named.
trait Made {
    fn tap_made(self) -> Self;
}

impl Made for std::path::PathBuf {
    fn tap_made(self) -> Self {
        std::fs::create_dir_all(&self).expect("made");
        self
    }
}
