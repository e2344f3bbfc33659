//! `bench links --against prediction`: what was measured beside what the topology promises.
//!
//! Compares nothing; `crate::predict` does.
//!
//! *Invariant:* only device memory is compared, of the largest messages that were measured.

use clap::ValueEnum;

use crate::cli::failure::{Exit, Failure};
use crate::cluster::measure::{Memory, Subject, Together};
use crate::ids::GpuIndex;
use crate::predict::{Compared, Comparison, Figure, Load, Measured, against};
use crate::wire::links::Pair;
use crate::wire::peer::MemoryKind;

/// What is below this share of the prediction is slow. Of published figures the prediction is 4 %
/// off in the median (`crates/model/tests/figures.rs`).
const SHARE: f64 = 0.8;

/// The most slow pairs that are named.
const NAMED: usize = 8;

/// What measurements are compared with.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Against {
    /// What `plan --predict` says
    Prediction,
}

impl Against {
    /// Refuses what no prediction is about.
    pub(in crate::cli) fn check(
        self,
        subject: &Subject,
        memory: Option<Memory>,
    ) -> Result<(), Failure> {
        let refuse = |text: &str, hint: &'static str| {
            Err(Failure::new(Exit::Usage, anyhow::anyhow!("{text}")).hint(hint))
        };
        if subject.is_simulated() {
            return refuse(
                "the GPUs are simulated, so nothing can be measured of their links",
                "see what they should deliver: cuda-cluster plan --predict",
            );
        }
        if memory == Some(Memory::Host) {
            return refuse(
                "the prediction is about device memory",
                "leave --memory out, or give --memory device",
            );
        }
        Ok(())
    }

    /// Compares what was measured in device memory; `None` if nothing was.
    pub(in crate::cli) fn compare(
        self,
        subject: &Subject,
        pairs: &[Pair],
        together: Together,
    ) -> Option<Comparison> {
        let gpu = |name: &str| -> Option<GpuIndex> {
            let worker = subject.plan().workers.iter().find(|worker| worker.name == name)?;
            Some(worker.gpu.as_ref()?.index)
        };
        let device = || pairs.iter().filter(|pair| pair.memory == MemoryKind::Device);
        let largest = device().map(|pair| pair.size_bytes).max()?;
        let measured = device().filter(|pair| pair.size_bytes == largest).filter_map(|pair| {
            let (from, to) = (gpu(&pair.from)?, gpu(&pair.to)?);
            Some(Measured { from, to, gb_per_s: pair.gb_per_s? })
        });
        let measured: Vec<Measured> = measured.filter(|pair| pair.from != pair.to).collect();
        let load = match together {
            Together::None => Load::Alone,
            Together::BothWays => Load::BothWays,
            Together::All => Load::All,
        };
        Some(against(subject.machine()?, load, &measured, SHARE))
    }
}

/// The comparison in a few lines.
pub(super) fn text(comparison: &Comparison) -> String {
    let known: Vec<(f64, &Compared)> =
        comparison.pairs.iter().filter_map(|pair| Some((pair.share()?, pair))).collect();
    let unknown = comparison.pairs.len() - known.len();
    let mut slow: Vec<&(f64, &Compared)> = known.iter().filter(|(_, pair)| pair.is_slow).collect();
    slow.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut text = format!(
        "against the prediction: {} of {} pairs reach {:.0} % of it\n",
        known.len() - slow.len(),
        known.len(),
        SHARE * 100.0
    );
    for (share, pair) in slow.iter().take(NAMED) {
        let Figure::Known { gb_per_s, limited_by } = &pair.predicted else { continue };
        text.push_str(&format!(
            "  gpu{} → gpu{}: {:.1} of {gb_per_s:.1} GB/s ({:.0} %), which {} would carry\n",
            pair.from,
            pair.to,
            pair.measured_gb_per_s,
            share * 100.0,
            limited_by.name
        ));
    }
    if slow.len() > NAMED {
        text.push_str(&format!("  and {} more\n", slow.len() - NAMED));
    }
    for suspect in &comparison.suspects {
        text.push_str(&format!(
            "  {} of the {} slow pairs and {} of the others pass {}\n",
            suspect.slow,
            slow.len(),
            suspect.good,
            suspect.component.name
        ));
    }
    if !slow.is_empty() && comparison.suspects.is_empty() {
        text.push_str("  no part of the machine explains them by itself\n");
    }
    if unknown > 0 {
        text.push_str(&format!("  of {unknown} more pairs the topology tells too little\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{Component, ComponentKind, Suspect};

    #[test]
    fn the_slowest_are_named_and_what_they_share() {
        let component =
            |name: &str| Component { kind: ComponentKind::NvLink, name: name.to_owned() };
        let pair = |to: u32, measured_gb_per_s: f64| Compared {
            from: GpuIndex(0),
            to: GpuIndex(to),
            measured_gb_per_s,
            predicted: Figure::Known {
                gb_per_s: 100.0,
                limited_by: component("18 NVLinks of gpu0"),
            },
            is_slow: measured_gb_per_s < 80.0,
        };
        let unknown =
            Compared { predicted: Figure::Unknown { unknown: "x".to_owned() }, ..pair(3, 7.0) };
        let comparison = Comparison {
            pairs: vec![pair(1, 99.0), pair(2, 40.0), Compared { is_slow: false, ..unknown }],
            suspects: vec![Suspect {
                component: component("18 NVLinks of gpu2"),
                slow: 1,
                good: 0,
            }],
        };
        assert_eq!(
            text(&comparison),
            "against the prediction: 1 of 2 pairs reach 80 % of it\n  \
             gpu0 → gpu2: 40.0 of 100.0 GB/s (40 %), which 18 NVLinks of gpu0 would carry\n  \
             1 of the 1 slow pairs and 0 of the others pass 18 NVLinks of gpu2\n  \
             of 1 more pairs the topology tells too little\n"
        );
    }
}
