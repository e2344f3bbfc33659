//! What the links of a machine carry, for its picture.
//!
//! Finds nothing out: `predict::link_rates` does.
//!
//! *Invariant:* a link whose rate is not known has none here.

use std::collections::BTreeMap;

use super::Device;
use crate::ids::GpuIndex;

/// What each link carries in one direction, in 10⁹ bytes per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkRates {
    /// The PCIe link of each device.
    pub devices: BTreeMap<Device, f64>,
    /// The link above each PCIe switch, by the id of its bridge.
    pub uplinks: BTreeMap<String, f64>,
    /// The interconnect of the sockets.
    pub sockets: Option<f64>,
    /// The NVLinks of a pair of GPUs, smaller index first.
    pub pairs: BTreeMap<(GpuIndex, GpuIndex), f64>,
    /// All NVLinks of a GPU to NVSwitches.
    pub switched: BTreeMap<GpuIndex, f64>,
    /// NVLink-C2C between a GPU and its CPU, or its NVLinks to it.
    pub chips: BTreeMap<GpuIndex, f64>,
}
