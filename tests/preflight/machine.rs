//! A made-up machine that is spoiled in one place, and what `doctor` says of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_cluster::preflight::{Finding, Record, Severity};
use cuda_cluster::topology::{self, Topology};
use serde_json::Value;

use crate::fake_machine::FakeMachine;

/// A machine before it is written.
pub(super) struct Place {
    topology: Topology,
    files: Vec<(String, Option<String>)>,
    health: Vec<(Option<u32>, Value)>,
    variables: Vec<(String, String)>,
    arguments: Vec<String>,
    faults: String,
}

/// A machine that was recorded.
pub(super) struct Recorded {
    record: Record,
    variables: Vec<(String, String)>,
}

/// What `doctor` said.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) code: Option<i32>,
    pub(super) findings: Vec<Finding>,
    pub(super) document: Value,
}

/// A built-in machine, whose pairs have peer access.
pub(super) fn on(name: &str) -> Place {
    let mut topology: Topology =
        topology::parse(topology::builtin(name).expect("built in")).expect("a machine");
    let all: Vec<_> = topology.gpus.iter().map(|gpu| gpu.index).collect();
    for gpu in &mut topology.gpus {
        let others = all.iter().filter(|other| **other != gpu.index).copied();
        gpu.peers.get_or_insert_with(|| others.collect());
    }
    Place {
        topology,
        files: Vec::new(),
        health: Vec::new(),
        variables: Vec::new(),
        arguments: Vec::new(),
        faults: String::new(),
    }
}

impl Place {
    pub(super) fn described(mut self, change: impl FnOnce(&mut Topology)) -> Self {
        change(&mut self.topology);
        self
    }

    /// A file with another text.
    pub(super) fn file(mut self, path: &str, text: &str) -> Self {
        self.files.push((path.to_owned(), Some(text.to_owned())));
        self
    }

    /// A file that is not there.
    pub(super) fn without(mut self, path: &str) -> Self {
        self.files.push((path.to_owned(), None));
        self
    }

    pub(super) fn health(mut self, gpu: u32, facts: Value) -> Self {
        self.health.push((Some(gpu), facts));
        self
    }

    pub(super) fn health_of_all(mut self, facts: Value) -> Self {
        self.health.push((None, facts));
        self
    }

    pub(super) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(super) fn asked(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&one| one.to_owned()));
        self
    }

    pub(super) fn faults(mut self, faults: &str) -> Self {
        faults.clone_into(&mut self.faults);
        self
    }

    /// The address of a GPU.
    pub(super) fn gpu(&self, index: usize) -> String {
        self.topology.gpus[index].pci.expect("an address").to_string()
    }

    /// The bridge above a GPU.
    pub(super) fn above(&self, index: usize) -> String {
        self.topology.gpus[index].parent.clone().expect("a bridge")
    }

    /// The PCI address of a NIC.
    pub(super) fn nic(&self, index: usize) -> String {
        self.topology.nics[index].pci.expect("an address").to_string()
    }

    /// A file of a PCI function with another text.
    pub(super) fn function(self, address: &str, file: &str, text: &str) -> Self {
        self.file(&format!("sys/bus/pci/devices/{address}/{file}"), text)
    }

    /// Writes the machine, and returns it with the program on it.
    pub(super) fn write(&self, folder: &Path) -> FakeMachine {
        let fake = FakeMachine::write(&self.topology, folder).expect("written");
        let mut fake = fake.with_faults(&self.faults);
        for (gpu, facts) in &self.health {
            fake = fake.with_health(*gpu, facts.clone()).expect("written");
        }
        for (path, text) in &self.files {
            let path = folder.join(path);
            match text {
                Some(text) => {
                    std::fs::create_dir_all(path.parent().expect("below")).expect("made");
                    std::fs::write(&path, text).expect("written");
                }
                None if path.is_dir() => std::fs::remove_dir_all(&path).expect("it was there"),
                None => std::fs::remove_file(&path).expect("it was there"),
            }
        }
        fake
    }

    /// What `doctor` says of it, with all that it tries.
    pub(super) fn doctor(&self) -> Said {
        let folder = tempfile::tempdir().expect("a directory");
        let fake = self.write(folder.path());
        told(self.surrounded(fake.command(), folder.path()), &self.arguments)
    }

    /// What `doctor` says of what it sees there, without what it tries.
    pub(super) fn judged(&self) -> Said {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.recorded().judged(&arguments, |_| {})
    }

    /// The machine as `doctor --record` writes it.
    pub(super) fn recorded(&self) -> Recorded {
        let folder = tempfile::tempdir().expect("a directory");
        let fake = self.write(folder.path());
        let mut command = self.surrounded(fake.command(), folder.path());
        let output = command.args(["doctor", "--record", "-"]).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let record = serde_json::from_slice(&output.stdout).expect("a record");
        Recorded { record, variables: self.variables.clone() }
    }

    fn surrounded(&self, command: Command, home: &Path) -> Command {
        surrounded(command, home, &self.variables)
    }

    /// Asserts that a check finds this, and that no other check finds anything that the healthy
    /// machine has not.
    pub(super) fn finds(&self, id: &str, severity: Severity, part: &str) -> Finding {
        let said = self.judged();
        let found = said.of(id);
        let found = found.iter().find(|one| one.severity == severity);
        let found = found.unwrap_or_else(|| panic!("{id} is {severity:?}: {:#?}", said.of(id)));
        let whole = format!("{} {}", found.about.as_deref().unwrap_or_default(), found.text);
        assert!(whole.contains(part), "{part:?} is in {whole:?}");
        if matches!(severity, Severity::Warning | Severity::Error) {
            assert!(!found.evidence.is_empty(), "{found:#?}");
            assert!(found.remedy.as_ref().is_some_and(|remedy| !remedy.is_empty()), "{found:#?}");
            assert!(found.consequence.is_some() && found.cost.is_some(), "{found:#?}");
        }
        (*found).clone()
    }

    /// Asserts that a check finds nothing that is bad.
    pub(super) fn is_well(&self, id: &str) -> Said {
        let said = self.judged();
        let bad: Vec<&Finding> = said.of(id).into_iter().filter(|one| one.is_bad()).collect();
        assert!(bad.is_empty(), "{bad:#?}");
        said
    }
}

impl Recorded {
    /// What `doctor` says of the record with a change.
    pub(super) fn judged(&self, arguments: &[&str], change: impl FnOnce(&mut Record)) -> Said {
        let mut record = self.record.clone();
        change(&mut record);
        let folder = tempfile::tempdir().expect("a directory");
        let text = serde_json::to_string(&record).expect("JSON");
        let file = written(folder.path(), "record.json", &text);
        let command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        let command = surrounded(command, folder.path(), &self.variables);
        told(command, &[&["--evidence", file.to_str().expect("UTF-8")], arguments].concat())
    }
}

/// What the program says with these arguments of `doctor`.
fn told<S: AsRef<std::ffi::OsStr>>(mut command: Command, arguments: &[S]) -> Said {
    let output = command.args(["doctor", "-o", "json"]).args(arguments).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let document: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr))
    });
    let findings = serde_json::from_value(document["findings"].clone()).expect("findings");
    Said { code: output.status.code(), findings, document }
}

/// The caller's own settings are not the machine's.
fn surrounded(mut command: Command, home: &Path, variables: &[(String, String)]) -> Command {
    for (name, _) in std::env::vars() {
        if ["NCCL_", "UCX_", "CUDA_V", "PYTORCH"].iter().any(|own| name.starts_with(own)) {
            command.env_remove(name);
        }
    }
    command.env("HOME", home).env_remove("LD_LIBRARY_PATH");
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command
}

impl Said {
    /// The findings of a check.
    pub(super) fn of(&self, id: &str) -> Vec<&Finding> {
        self.findings.iter().filter(|finding| finding.id == id).collect()
    }

    /// What is bad, by the names of the checks; without what depends on where the tests run: UCX,
    /// and that the made-up machine has no CUDA.
    pub(super) fn bad(&self) -> Vec<&Finding> {
        let of_here = |id: &str| id.starts_with("ucx") || id == "cuda" || id == "python";
        self.findings.iter().filter(|one| one.is_bad() && !of_here(&one.id)).collect()
    }
}

/// A file in a directory that outlives the test's machine.
pub(super) fn written(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    path
}
