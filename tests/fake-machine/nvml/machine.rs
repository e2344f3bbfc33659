//! The described machine: the part of `topo -o json` that NVML would tell.
//!
//! *Invariant:* fields are named as in the JSON; what it has beyond them is left alone.

use serde::Deserialize;

#[derive(Deserialize)]
pub struct Machine {
    pub driver: Option<String>,
    pub cuda: Option<String>,
    pub gpus: Vec<Gpu>,
    pub nvswitch: Option<u32>,
    #[serde(default)]
    pub links: Vec<Link>,
}

/// A pair of the matrix: `GPU0`, `GPU1`, `PIX`.
#[derive(Deserialize)]
pub struct Link {
    pub a: String,
    pub b: String,
    pub kind: String,
}

#[derive(Deserialize)]
pub struct Gpu {
    pub index: u32,
    pub uuid: Option<String>,
    pub name: Option<String>,
    pub pci: Option<String>,
    pub numa: Option<u32>,
    pub cpus: Option<String>,
    pub memory_bytes: Option<u64>,
    pub bar1_bytes: Option<u64>,
    pub compute_capability: Option<String>,
    pub memory_numa: Option<u32>,
    #[serde(default)]
    pub mig: Vec<Mig>,
    pub mig_mode: Option<bool>,
    /// `default`, `exclusive_process` or `prohibited`.
    pub compute_mode: Option<String>,
    #[serde(default)]
    pub nvlinks: Vec<NvLink>,
    pub c2c: Option<ChipLinks>,
    pub fabric: Option<Fabric>,
    pub pcie: Option<Pcie>,
    pub peers: Option<Vec<u32>>,
    pub display: Option<bool>,
    #[serde(default)]
    pub processes: Vec<u32>,
}

#[derive(Deserialize)]
pub struct Mig {
    pub uuid: String,
    pub profile: String,
    pub memory_bytes: Option<u64>,
}

#[derive(Deserialize)]
pub struct NvLink {
    pub link: u32,
    pub active: bool,
    pub version: Option<u32>,
    /// A PCI address, `switch`, `cpu` or `unknown`.
    pub peer: String,
    pub gb_per_s: Option<f64>,
}

#[derive(Deserialize)]
pub struct Pcie {
    pub gt_per_s: Option<f64>,
    pub width: Option<u32>,
    pub max_gt_per_s: Option<f64>,
    pub max_width: Option<u32>,
}

/// A registration with an NVLink fabric.
#[derive(Clone, Deserialize)]
pub struct Fabric {
    pub state: String,
    pub error: Option<String>,
    #[serde(default)]
    pub clique: u32,
    pub cluster: Option<String>,
    #[serde(default)]
    pub faults: Vec<String>,
}

#[derive(Deserialize)]
pub struct ChipLinks {
    pub links: u32,
    pub gb_per_s: Option<f64>,
}

impl Gpu {
    /// Compute capability as two numbers.
    pub fn capability(&self) -> Option<(i32, i32)> {
        let (major, minor) = self.compute_capability.as_deref()?.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

/// Numbers of a list like `0-31,64-95`.
pub fn members(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        Some(low.parse().ok()?..=high.parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}
