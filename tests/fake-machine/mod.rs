//! A machine that is not there, made from a topology: NVML with healthy GPUs, sysfs, procfs and
//! hwloc's XML; on request also the CUDA driver, so that UCX moves device memory between real
//! processes.
//!
//! The live probe, unchanged and in a process of its own, sees it through environment variables.
//! Nothing outside the given directory is written.
//!
//! *Invariant:* what the topology does not tell is not there to be read.

// Every test uses its own part.
#![allow(dead_code, unreachable_pub, unused_imports)]

mod health;
mod hwloc;
mod procfs;
pub mod random;
mod sysfs;
mod system;
pub mod ucx;

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
    /// How its CUDA driver misbehaves, if it has one.
    driver: Option<String>,
}

impl FakeMachine {
    /// Writes the machine below `root`, which must exist.
    pub fn write(machine: &Topology, root: &Path) -> io::Result<Self> {
        sysfs::write(machine, &root.join("sys"))?;
        procfs::write(machine, &root.join("proc"))?;
        system::write(machine, root)?;
        std::fs::write(root.join("hwloc.xml"), hwloc::xml(machine))?;
        std::fs::write(root.join("nvml.json"), serde_json::to_string(machine)?)?;
        health::write(machine, root)?;
        Ok(Self { root: root.to_owned(), faults: String::new(), driver: None })
    }

    /// Makes NVML misbehave; `nvml/faults.rs` says how.
    pub fn with_faults(mut self, faults: &str) -> Self {
        faults.clone_into(&mut self.faults);
        self
    }

    /// Gives the machine a CUDA driver, which `cuda/lib.rs` describes and which misbehaves as
    /// `cuda/faults.rs` says; what its processes leave is written to `reports` in its directory.
    pub fn with_driver(mut self, faults: &str) -> io::Result<Self> {
        let folder = self.root.join("lib");
        std::fs::create_dir_all(&folder)?;
        // The loader knows a library again by its file, so NVML is the probe's, not another.
        let libraries = [
            ("libcuda.so.1", driver()),
            ("libnvidia-ml.so.1", library()),
            ("libnvrtc.so.13", example("fake_nvrtc", &["nvrtc"])),
        ];
        for (name, library) in libraries {
            let link = folder.join(name);
            if link.symlink_metadata().is_ok() {
                std::fs::remove_file(&link)?;
            }
            std::os::unix::fs::symlink(library, link)?;
        }
        let reports = self.root.join("reports");
        self.driver = Some(format!("report={} {faults}", reports.display()).trim_end().to_owned());
        Ok(self)
    }

    /// Lets the driver lack a function, as one that is older than it.
    ///
    /// # Panics
    /// If the stand-in has no such function.
    pub fn without(self, function: &str) -> io::Result<Self> {
        let path = self.root.join("lib/libcuda.so.1");
        let mut library = std::fs::read(&path)?;
        let name = [function.as_bytes(), b"\0"].concat();
        let places = library.windows(name.len()).enumerate();
        let places: Vec<usize> =
            places.filter_map(|(at, bytes)| (bytes == name).then_some(at)).collect();
        assert!(!places.is_empty(), "{function}");
        for at in places {
            library[at] = b'_';
        }
        std::fs::remove_file(&path)?;
        std::fs::write(path, library)?;
        Ok(self)
    }

    /// What the processes of this machine left, as far as they have exited.
    pub fn reports(&self) -> Vec<serde_json::Value> {
        let reports = std::fs::read_dir(self.root.join("reports")).into_iter().flatten().flatten();
        let texts = reports.map(|entry| std::fs::read_to_string(entry.path()).expect("a report"));
        texts.map(|text| serde_json::from_str(&text).expect("JSON")).collect()
    }

    /// The directory of a PCI function, for tests that spoil it.
    pub fn function(&self, address: &str) -> PathBuf {
        let entry = self.root.join("sys/bus/pci/devices").join(address);
        entry.canonicalize().expect(address)
    }

    /// Writes a file of the machine, for tests that spoil it: `proc/uptime`.
    pub fn file(&self, path: &str, text: &str) -> io::Result<()> {
        system::file(&self.root, path, text)
    }

    /// Lets NVML describe another machine than sysfs and hwloc.
    pub fn with_nvml_of(self, machine: &Topology) -> io::Result<Self> {
        std::fs::write(self.root.join("nvml.json"), serde_json::to_string(machine)?)?;
        Ok(self)
    }

    /// Changes what NVML tells of one GPU's health, or of the machine's; `nvml/health.rs` has the
    /// keys. Objects are merged, and `null` takes a fact away.
    pub fn with_health(self, gpu: Option<u32>, facts: serde_json::Value) -> io::Result<Self> {
        health::merge(&self.root, gpu, facts)?;
        Ok(self)
    }

    /// The environment in which a process sees this machine instead of the real one.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let file = |name: &str| self.root.join(name).into_os_string();
        let mut variables = vec![
            ("CUDA_CLUSTER_NVML", library().into_os_string()),
            ("CUDA_CLUSTER_FAKE_NVML", file("nvml.json")),
            ("CUDA_CLUSTER_FAKE_FAULTS", OsString::from(&self.faults)),
            ("CUDA_CLUSTER_SYSFS", file("sys")),
            ("CUDA_CLUSTER_PROCFS", file("proc")),
            ("CUDA_CLUSTER_DEV", file("dev")),
            ("CUDA_CLUSTER_ETC", file("etc")),
            ("HWLOC_XMLFILE", file("hwloc.xml")),
        ];
        if let Some(faults) = &self.driver {
            variables.push(("CUDA_CLUSTER_FAKE_CUDA_FAULTS", OsString::from(faults)));
            variables.push(("LD_LIBRARY_PATH", file("lib")));
        }
        variables
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

/// The fake NVML.
pub fn library() -> PathBuf {
    example("fake_nvml", &["nvml"])
}

/// The stand-in for the CUDA driver.
fn driver() -> PathBuf {
    example("fake_cuda", &["cuda", "nvml"])
}

/// A library that Cargo builds with the tests, from these folders. Running one test target alone does
/// not build it, so that is done here when it is missing or older than its sources.
fn example(name: &str, folders: &[&str]) -> PathBuf {
    let library = built().join(format!("examples/lib{name}.so"));
    let written = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-machine");
    let entries = |folder: &&str| std::fs::read_dir(here.join(folder)).expect("its sources");
    let sources = folders.iter().flat_map(entries).flatten();
    let sources = sources.filter_map(|entry| written(&entry.path()));
    if written(&library) < sources.max() {
        let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
        cargo.args(["build", "--quiet", "--example", name]);
        if built().ends_with("release") {
            cargo.arg("--release");
        }
        let done = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("Cargo runs");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{name} does not build:\n{errors}");
    }
    library
}
