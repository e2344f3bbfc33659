//! Shows what was measured: an answer, rows, matrices, JSON or a picture.
//!
//! *Invariant:* a row is shown as it was judged.

use std::io::IsTerminal;

use clap::ValueEnum;
use serde::Serialize;

use super::{against, between};
use crate::cli::failure::Failure;
use crate::cli::{heat, output};
use crate::cluster::Verification;
use crate::cluster::measure::{Between, Subject};
use crate::ids::ClusterName;
use crate::predict::Comparison;
use crate::units::Size;
use crate::wire::links::{Pair, Verdict};
use crate::wire::peer::MemoryKind;

/// How it is shown.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cli) enum Form {
    /// A row for each pair and size
    #[default]
    Table,
    /// A coloured matrix for each size
    Heat,
    /// JSON with a stable schema
    Json,
    /// The matrices as an SVG picture
    Svg,
}

/// The result of a measurement.
pub(in crate::cli) struct Outcome {
    name: ClusterName,
    simulated: bool,
    pub(in crate::cli) measured: Verification,
    /// The figures of device memory beside the prediction, if that was asked for.
    pub(in crate::cli) comparison: Option<Comparison>,
}

/// The stable JSON form.
#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    name: &'a ClusterName,
    simulated: bool,
    pairs: &'a [Pair],
    #[serde(skip_serializing_if = "Option::is_none")]
    between_hosts: Option<&'a Between>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against_prediction: Option<&'a Comparison>,
}

impl Outcome {
    /// The outcome of a measurement that has not begun.
    pub(in crate::cli) fn of(subject: &Subject) -> Self {
        let (name, simulated) = (subject.name().clone(), subject.is_simulated());
        Self { name, simulated, measured: Verification::default(), comparison: None }
    }

    /// The figures.
    pub(in crate::cli) fn pairs(&self) -> &[Pair] {
        &self.measured.pairs
    }

    /// Prints the answer: how many pairs are as expected, and those that are not.
    pub(in crate::cli) fn show_answer(&self, strict: bool) -> Result<(), Failure> {
        output::print(&self.answer(strict))?;
        self.note();
        if std::io::stdout().is_terminal() {
            output::note(&"-o table shows each pair, -o heat a matrix");
        }
        if self.simulated {
            output::note(&"the GPUs are simulated: these are figures of host memory");
        }
        Ok(())
    }

    /// How many pairs are as expected, and the rows of those that are not, or that are slow.
    pub(in crate::cli) fn answer(&self, strict: bool) -> String {
        let fails = |pair: &&Pair| !pair.verdict.is_good(strict);
        let bad = self.pairs().iter().filter(fails).count();
        let told: Vec<&Pair> =
            self.pairs().iter().filter(|pair| pair.verdict != Verdict::Ok).collect();
        let all = self.pairs().len();
        let others = self.measured.between.as_ref();
        let others = others.map(|others| between::text(others, false)).unwrap_or_default();
        if all == 0 {
            let nothing = "nothing to verify: fewer than two workers are at work";
            return if others.is_empty() { format!("{nothing}\n") } else { others };
        }
        let mut text = format!("{} of {all} ok", all - bad);
        let ranges: Vec<String> = [MemoryKind::Host, MemoryKind::Device]
            .into_iter()
            .filter_map(|memory| {
                let of = self.pairs().iter().filter(|pair| pair.memory == memory);
                let rates: Vec<f64> = of.filter_map(|pair| pair.gb_per_s).collect();
                Some(format!("{memory} memory {}", between::range(rates.into_iter())?))
            })
            .collect();
        if !ranges.is_empty() {
            text.push_str(&format!(": {}", ranges.join(", ")));
        }
        text.push('\n');
        if !told.is_empty() {
            text.push_str(&format!("\n{}", table(told.into_iter())));
        }
        text + &others
    }

    fn note(&self) {
        let others = self.measured.between.iter().flat_map(|others| &others.notes);
        self.measured.notes.iter().chain(others).for_each(|note| output::note(note));
    }

    /// Prints the rows.
    pub(in crate::cli) fn show(&self, form: Form) -> Result<(), Failure> {
        match form {
            Form::Json => {
                let (name, simulated, pairs) = (&self.name, self.simulated, self.pairs());
                let document = Document {
                    version: 1,
                    name,
                    simulated,
                    pairs,
                    between_hosts: self.measured.between.as_ref(),
                    against_prediction: self.comparison.as_ref(),
                };
                output::print_json(&document)?;
            }
            Form::Svg => output::print(&heat::svg(self.pairs(), self.simulated))?,
            Form::Heat => {
                let width = output::columns().unwrap_or(usize::MAX);
                output::print(&heat::terminal(self.pairs(), width))?;
            }
            Form::Table => output::print(&table(self.pairs().iter()))?,
        }
        if let Some(comparison) = &self.comparison
            && matches!(form, Form::Table | Form::Heat)
        {
            output::print(&format!("\n{}", against::text(comparison)))?;
        }
        if let Some(others) = &self.measured.between
            && matches!(form, Form::Table | Form::Heat)
        {
            output::print(&format!("\n{}", between::text(others, form == Form::Table)))?;
        }
        self.note();
        if self.simulated && matches!(form, Form::Table | Form::Heat) {
            output::note(&"the GPUs are simulated: these are figures of host memory");
        }
        Ok(())
    }
}

/// Rows as text. The latency is that of a small message, one way.
fn table<'a>(pairs: impl Iterator<Item = &'a Pair>) -> String {
    let headings =
        ["from", "to", "memory", "size", "GB/s", "limit", "µs one way", "lanes", "verdict"];
    let rows: Vec<Vec<String>> = pairs.map(cells).collect();
    let less = ["size", "µs one way", "limit", "memory", "lanes"];
    output::fitted(&headings, &rows, &less, "-o json has all")
}

fn cells(pair: &Pair) -> Vec<String> {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    vec![
        pair.from.clone(),
        pair.to.clone(),
        pair.memory.to_string(),
        Size::Bytes(pair.size_bytes).to_string(),
        pair.gb_per_s.map_or("-".to_owned(), heat::figure),
        limit(pair),
        number(pair.latency_us),
        pair.lanes.join(" "),
        pair.verdict.to_string(),
    ]
}

/// `450 (NV18)`; where there is no fixed limit, the usual value: `~10 (host memory)`.
fn limit(pair: &Pair) -> String {
    let link = pair.link.as_deref().unwrap_or_default();
    match (pair.limit_gb_per_s, pair.usual_gb_per_s) {
        (Some(most), _) => format!("{most:.0} ({link})"),
        (None, Some(usual)) => format!("~{usual:.0} ({link})"),
        (None, None) => "-".to_owned(),
    }
}
