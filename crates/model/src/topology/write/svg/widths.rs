//! The widths of lines: what their links carry, where that is known.
//!
//! *Invariant:* a line as wide as another in the same picture carries as much, up to the widest,
//! and a dashed one is of a link of which nothing is known.

use std::collections::BTreeMap;

use super::Canvas;
use super::layout::Wire;
use crate::ids::GpuIndex;
use crate::text::xml_escaped;
use crate::topology::LinkRates;

/// Pixels for the square root of a rate in GB/s: 2.8 for PCIe 4, 11 for the NVLinks of an H100.
const SCALE: f64 = 0.55;
const NARROWEST: f64 = 1.2;
/// That of 648 GB/s.
const WIDEST: f64 = 14.0;

/// The most widths that the legend shows.
const SHOWN: usize = 5;

/// The colour of lines in the legend that stand for all colours.
const ANY: &str = "#8a94a8";

/// Draws lines, and remembers how wide they were.
pub(super) struct Widths<'a> {
    rates: &'a LinkRates,
    /// Rates by their words.
    drawn: BTreeMap<(u64, String), f64>,
    unknown: bool,
}

impl<'a> Widths<'a> {
    pub(super) fn new(rates: &'a LinkRates) -> Self {
        Self { rates, drawn: BTreeMap::new(), unknown: false }
    }

    /// Whether lines differ in width by what is known.
    pub(super) fn are_told(&self) -> bool {
        *self.rates != LinkRates::default()
    }

    /// What a wire carries: the narrowest part of it.
    pub(super) fn of_wire(&self, wire: &Wire<'_>) -> Option<f64> {
        let device = wire.device.map(|device| self.rates.devices.get(&device));
        let uplink = |name: &Option<&str>| name.and_then(|id| self.rates.uplinks.get(id));
        let uplinks = wire.passed.iter().chain(&wire.switch).map(uplink);
        let rates: Option<Vec<&f64>> = device.into_iter().chain(uplinks).collect();
        rates?.into_iter().copied().min_by(f64::total_cmp)
    }

    pub(super) fn of_pair(&self, a: u32, b: u32) -> Option<f64> {
        self.rates.pairs.get(&(GpuIndex(a), GpuIndex(b))).copied()
    }

    /// What a GPU sends over all of its NVLinks.
    pub(super) fn of_gpu(&self, gpu: u32) -> Option<f64> {
        let own = |(a, b): &(GpuIndex, GpuIndex)| a.0 == gpu || b.0 == gpu;
        let pairs = self.rates.pairs.iter().filter(|(pair, _)| own(pair)).map(|(_, rate)| rate);
        let of_pairs = pairs.copied().reduce(|all, rate| all + rate);
        self.rates.switched.get(&GpuIndex(gpu)).copied().or(of_pairs)
    }

    /// What joins a GPU to its CPU beside PCIe.
    pub(super) fn of_chips(&self, gpu: u32) -> Option<f64> {
        self.rates.chips.get(&GpuIndex(gpu)).copied()
    }

    pub(super) fn of_sockets(&self) -> Option<f64> {
        self.rates.sockets
    }

    /// The attributes of a line that carries this, or else is as wide as `plain`, and what is said
    /// of it.
    pub(super) fn stroke(&mut self, rate: Option<f64>, plain: f64) -> (String, Option<String>) {
        match rate {
            _ if !self.are_told() => (format!("stroke-width=\"{plain:.1}\""), None),
            Some(rate) => {
                let words = words(rate);
                self.drawn.insert((key(rate), words.clone()), rate);
                (format!("stroke-width=\"{:.1}\"", width(rate)), Some(words))
            }
            None => {
                self.unknown = true;
                (dashed(), Some("not predicted".to_owned()))
            }
        }
    }

    /// A line of a link, and what it is called.
    pub(super) fn line(
        &mut self,
        canvas: &mut Canvas,
        ends: [(f64, f64); 2],
        (colour, plain): (&str, f64),
        rate: Option<f64>,
    ) {
        let [(x1, y1), (x2, y2)] = ends;
        let (stroke, words) = self.stroke(rate, plain);
        match words {
            None => canvas.line((x1, y1), (x2, y2), colour, plain),
            Some(words) => canvas.push(&format!(
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" \
                 stroke=\"{colour}\" {stroke}><title>{}</title></line>",
                xml_escaped(&words)
            )),
        }
    }

    /// Lines for the legend: attributes with words.
    pub(super) fn legend(&self) -> Vec<(String, String)> {
        let drawn: Vec<f64> = self.drawn.values().copied().collect();
        let last = drawn.len().saturating_sub(1);
        let most = SHOWN.min(drawn.len());
        let at = |number: usize| number * last / most.saturating_sub(1).max(1);
        let shown = (0..most).filter_map(|number| drawn.get(at(number)));
        let sample = |rate: &f64| {
            (format!("stroke=\"{ANY}\" stroke-width=\"{:.1}\"", width(*rate)), words(*rate))
        };
        let unknown = (format!("stroke=\"{ANY}\" {}", dashed()), "not predicted".to_owned());
        shown.map(sample).chain(self.unknown.then_some(unknown)).collect()
    }
}

fn width(rate: f64) -> f64 {
    (SCALE * rate.sqrt()).clamp(NARROWEST, WIDEST)
}

fn dashed() -> String {
    "stroke-width=\"1.6\" stroke-dasharray=\"3 3\"".to_owned()
}

/// `2.5 GB/s`, `382 GB/s`.
fn words(rate: f64) -> String {
    if rate < 9.95 { format!("{rate:.1} GB/s") } else { format!("{rate:.0} GB/s") }
}

/// What sorts rates.
fn key(rate: f64) -> u64 {
    // A rate is not negative, and its bits are in its order then.
    if rate < 9.95 { (rate * 10.0).round().to_bits() } else { (rate.round() * 10.0).to_bits() }
}
