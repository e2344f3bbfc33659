//! What single links carry of large copies, by their generation.
//!
//! Does not know who shares a link; `ways` does.
//!
//! *Invariant:* a share is a median of the published figures in `tests/figures.yaml` that are not
//! held back, rounded; where there are none, the comment says what is assumed. Rates are in 10⁹
//! bytes per second and one direction.

use crate::topology::{Gpu, NvLink, PcieLink};

/// The share of a link between sockets that copies between GPUs reach, taken as one PCIe link of 16
/// lanes of the GPUs' generation: 18.5 to 21 of 31.5 GB/s on EPYC 7002 and 7003, 32 to 47 of 63 on
/// EPYC 9004 and 9005. No topology tells the interconnect.
const SOCKETS: f64 = 0.61;

/// The share of its PCIe link that a copy without peer access reaches, through buffers in the
/// host's memory: 11.4 of 15.75, 21.6 to 24 of 31.5.
pub(super) const STAGED: f64 = 0.70;

/// The same for both directions together: 21 to 30 of 31.5, 43 to 46 of 63.
pub(super) const STAGED_BOTH_WAYS: f64 = 0.88;

/// The same where both GPUs are below one uplink, which the copy passes up and down: 9.9 of 15.75
/// (TITAN RTX), 8.6 (DGX-1, DGX-2), 17.6 of 31.5.
pub(super) const STAGED_BELOW_ONE_UPLINK: f64 = 0.56;

/// The part of a port's rate that it carries: 12 of 12.5, 24.5 of 25, 48 of 50 GB/s.
const PORT: f64 = 0.96;

/// What an all-reduce of NCCL reaches of the copies over the same NVLinks, as its bus bandwidth:
/// kernels send 128 bytes a packet where copy engines send 256 (NVIDIA/nccl-tests#149).
pub(super) const RING_OVER_NVLINK: f64 = 0.83;

/// The same where NVSwitches add up (NVLink SHARP, since Hopper): 478 GB/s of 450.
pub(super) const SWITCHES_ADD: f64 = 1.25;

/// The same over PCIe: 18.9 of 26 GB/s, 39 of 55.
pub(super) const RING_OVER_PCIE: f64 = 0.70;

/// A PCIe link as far as one end or more tell it: `None` without a rate or a width.
///
/// Idle links slow down but do not narrow, so that the highest rate and the lanes in use count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bus {
    gt_per_s: f64,
    lanes: u32,
}

impl Bus {
    pub(super) fn of(link: Option<&PcieLink>) -> Option<Self> {
        let link = link?;
        let gt_per_s = link.max_gt_per_s.or(link.gt_per_s)?;
        Some(Self { gt_per_s, lanes: link.width.or(link.max_width)? })
    }

    /// The link of which both ends are told.
    pub(super) fn slower(self, other: Self) -> Self {
        let gt_per_s = self.gt_per_s.min(other.gt_per_s);
        Self { gt_per_s, lanes: self.lanes.min(other.lanes) }
    }

    /// The generation's number, and the share that copies reach after encoding. 6: none measured,
    /// taken as 5.
    fn generation(self) -> (u32, f64) {
        match self.gt_per_s {
            rate if rate <= 2.5 => (1, 0.79),
            rate if rate <= 5.0 => (2, 0.79),
            rate if rate <= 8.0 => (3, 0.80),
            rate if rate <= 16.0 => (4, 0.83),
            rate if rate <= 32.0 => (5, 0.87),
            _ => (6, 0.87),
        }
    }

    /// What the link carries after encoding (8 of 10 bits, then 128 of 130, then all).
    pub(super) fn whole(self) -> f64 {
        let encoding = match self.gt_per_s {
            rate if rate < 8.0 => 0.8,
            rate if rate < 64.0 => 128.0 / 130.0,
            _ => 1.0,
        };
        encoding * self.gt_per_s / 8.0 * f64::from(self.lanes)
    }

    /// What copies reach of it.
    pub(super) fn copies(self) -> f64 {
        self.generation().1 * self.whole()
    }

    /// What copies between sockets reach on a machine whose fastest link is this one.
    pub(super) fn between_sockets(self) -> f64 {
        SOCKETS * Self { lanes: 16, ..self }.whole()
    }
}

impl std::fmt::Display for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PCIe x{} gen {}", self.lanes, self.generation().0)
    }
}

/// What copies reach over so many NVLinks of a GPU; `None` if neither their version nor the GPU's
/// generation is told.
pub(super) fn nvlinks(gpu: &Gpu, count: usize) -> Option<f64> {
    let told = |link: &NvLink| link.active.then_some(link.version).flatten();
    let version = gpu.nvlinks.iter().find_map(told).or_else(|| version_of(gpu))?;
    let (whole, share) = match version {
        ..=1 => (20.0, 0.88),
        2 => (25.0, 0.94),
        3 => (25.0, 0.92),
        4 => (25.0, 0.85),
        _ => (50.0, 0.853),
    };
    // The links of graphics cards are slower than their generation's (RTX A6000: 14.06).
    let rate = gpu.slowest_nvlink_gb_per_s().map_or(whole, |rate| rate.min(whole));
    Some(share * rate * count as f64)
}

/// NVLink's version by the GPU's generation: P100 has 1, V100 2, A100 3, H100 4, B200 5.
fn version_of(gpu: &Gpu) -> Option<u32> {
    gpu.compute_capability.map(|capability| match capability.major {
        ..=8 => capability.major.saturating_sub(5),
        9 => 4,
        _ => 5,
    })
}

/// What copies reach over NVLink-C2C: 273 to 346 of 447 GB/s on GH200, 193 to 211 of 224 on GB200.
pub(super) fn chip_links(gpu: &Gpu) -> Option<f64> {
    let whole = gpu.c2c?.gb_per_s?;
    let hopper = gpu.compute_capability.is_some_and(|capability| capability.major <= 9);
    Some(whole * if hopper { 0.665 } else { 0.86 })
}

/// What a NIC's port carries of its rate.
pub(crate) fn port(rate_gbps: f64) -> f64 {
    PORT * rate_gbps / 8.0
}
