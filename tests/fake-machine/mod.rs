//! A machine that is not there, made from a topology: NVML, sysfs, procfs and hwloc's XML.
//!
//! The live probe, unchanged and in a process of its own, sees it through four environment
//! variables. Nothing outside the given directory is written.
//!
//! *Invariant:* what the topology does not tell is not there to be read.

// Every test uses its own part.
#![allow(dead_code, unreachable_pub, unused_imports)]

mod hwloc;
mod procfs;
pub mod random;
mod sysfs;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_cluster::topology::{self, Topology};

pub use procfs::everything;

/// A made-up machine in a directory.
pub struct FakeMachine {
    root: PathBuf,
    faults: String,
}

impl FakeMachine {
    /// Writes the machine below `root`, which must exist.
    pub fn write(machine: &Topology, root: &Path) -> io::Result<Self> {
        sysfs::write(machine, &root.join("sys"))?;
        procfs::write(machine, &root.join("proc"))?;
        std::fs::write(root.join("hwloc.xml"), hwloc::xml(machine))?;
        std::fs::write(root.join("nvml.json"), serde_json::to_string(machine)?)?;
        Ok(Self { root: root.to_owned(), faults: String::new() })
    }

    /// Makes NVML misbehave; `nvml/faults.rs` says how.
    pub fn with_faults(mut self, faults: &str) -> Self {
        faults.clone_into(&mut self.faults);
        self
    }

    /// The directory of a PCI function, for tests that spoil it.
    pub fn function(&self, address: &str) -> PathBuf {
        let entry = self.root.join("sys/bus/pci/devices").join(address);
        entry.canonicalize().expect(address)
    }

    /// Lets NVML describe another machine than sysfs and hwloc.
    pub fn with_nvml_of(self, machine: &Topology) -> io::Result<Self> {
        std::fs::write(self.root.join("nvml.json"), serde_json::to_string(machine)?)?;
        Ok(self)
    }

    /// The environment in which a process sees this machine instead of the real one.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let file = |name: &str| self.root.join(name).into_os_string();
        vec![
            ("CUDA_CLUSTER_NVML", library().into_os_string()),
            ("CUDA_CLUSTER_FAKE_NVML", file("nvml.json")),
            ("CUDA_CLUSTER_FAKE_FAULTS", OsString::from(&self.faults)),
            ("CUDA_CLUSTER_SYSFS", file("sys")),
            ("CUDA_CLUSTER_PROCFS", file("proc")),
            ("HWLOC_XMLFILE", file("hwloc.xml")),
        ]
    }

    /// The program on this machine.
    pub fn command(&self) -> Command {
        let mut command = Command::new(built().join("cuda-cluster"));
        command.envs(self.environment());
        command
    }

    /// What the program sees.
    ///
    /// # Panics
    /// If it fails.
    pub fn seen(&self) -> Topology {
        let output = self.command().args(["topo", "-o", "json"]).output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let text = String::from_utf8(output.stdout).expect("JSON is text");
        topology::parse(&text).expect("its own JSON can be read")
    }
}

/// Where Cargo puts what it builds.
fn built() -> PathBuf {
    let running = std::env::current_exe().expect("Linux tells the running program");
    let above = running.ancestors().find(|folder| folder.join("deps").is_dir());
    above.expect("Cargo runs tests and examples below its target directory").to_owned()
}

/// The fake NVML, which Cargo builds with the tests. Running one test target alone does not build
/// it, so that is done here when it is missing.
pub fn library() -> PathBuf {
    let library = built().join("examples/libfake_nvml.so");
    let written = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-machine/nvml");
    let sources = std::fs::read_dir(folder).expect("its sources").flatten();
    let sources = sources.filter_map(|entry| written(&entry.path()));
    if written(&library) < sources.max() {
        let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
        cargo.args(["build", "--quiet", "--example", "fake_nvml"]);
        if built().ends_with("release") {
            cargo.arg("--release");
        }
        let done = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("Cargo runs");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "the fake NVML does not build:\n{errors}");
    }
    library
}
