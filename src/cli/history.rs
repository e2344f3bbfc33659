//! `history`: shows what a cluster's processes used over time, also when nobody looked.

use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::output::{self, Form};
use super::reach;
use crate::cluster::{NoHistory, recorded_history, recorded_pairs};
use crate::ids::ClusterName;
use crate::supervise::state::time_of_day;
use crate::text::in_full;
use crate::units::{HumanBytes, Span};
use crate::wire::history::pairs::{Flow, Flows};
use crate::wire::history::{Curve, Curves};

/// Arguments of `history`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster history demo                      # a line for each process and figure
  cuda-cluster history demo --since 1h
  cuda-cluster history demo -o json | jq '.processes[].name'")]
pub(super) struct Arguments {
    /// The cluster, also one that has ended; optional if only one is running
    name: Option<ClusterName>,
    /// Show only this period before its end, such as 1h [default: all, a week at most]
    #[arg(long, value_name = "SPAN")]
    since: Option<Span>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Form,
}

/// The heights of a mark.
const MARKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Columns of a page that is no terminal.
const PAGE: usize = 80;

/// Columns for the highest figure.
const HIGHEST: usize = 11;

/// Fewer CPUs than this are next to none, whatever the highest was.
const LEAST_CPUS: f64 = 0.1;

/// Lines for pairs.
const PAIRS: usize = 10;

/// Points of the JSON form.
const POINTS: usize = 1000;

/// Of the JSON form.
const VERSION: u32 = 1;

/// The JSON form.
#[derive(Serialize)]
struct Shown {
    version: u32,
    #[serde(flatten)]
    curves: Curves,
    /// What went between the workers, and in which time, in milliseconds since 1970: those that
    /// moved most first.
    pairs: Vec<Flow>,
    pairs_since: Option<u64>,
    pairs_until: Option<u64>,
}

/// Shows a history.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let (paths, _) = reach::find_also_ended(arguments.name.as_ref())?;
    let history = recorded_history(&paths).map_err(|error| Failure::new(Exit::Failed, error))?;
    let span = arguments.since.map(|span| u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX));
    let since = span.and_then(|span| history.before_end(span));
    let flows = match recorded_pairs(&paths) {
        Ok(pairs) => pairs.flows(span.and_then(|span| pairs.before_end(span)), None),
        Err(error) => {
            // There is none where nothing has moved yet, or nobody counts it.
            if !matches!(error, NoHistory::Missing) {
                output::note(&format!(
                    "what went between workers is left out: {}",
                    in_full(&error)
                ));
            }
            Flows::default()
        }
    };
    if matches!(arguments.output, Form::Json) {
        let curves = history.curves(since, None, POINTS);
        let Flows { since: pairs_since, until: pairs_until, pairs } = flows;
        let shown = Shown { version: VERSION, curves, pairs, pairs_since, pairs_until };
        output::print_json(&shown)?;
        return Ok(Exit::Done);
    }
    let names = history.shape().processes.iter().map(String::len).max().unwrap_or(0);
    let columns = output::columns().unwrap_or(PAGE);
    let marks = columns.saturating_sub(names + HIGHEST + 4).max(10);
    // A gap takes a mark, too.
    let mut text = rendered(&history.curves(since, None, marks * 3 / 4), names);
    text.push_str(&busiest(&flows));
    output::print_text(&text)?;
    Ok(Exit::Done)
}

/// A line for each of the pairs that moved most, and for all others together.
fn busiest(flows: &Flows) -> String {
    let mut text = String::new();
    let (Some(since), Some(until), [_, ..]) = (flows.since, flows.until, &*flows.pairs) else {
        return text;
    };
    // Writing to a string can't fail.
    let _ = writeln!(text, "from worker to worker, {} to {}", at(since), at(until));
    let names = |flow: &Flow| format!("{} → {}", flow.from, flow.to);
    let shown = &flows.pairs[..flows.pairs.len().min(PAIRS)];
    let wide = shown.iter().map(|flow| names(flow).chars().count()).max().unwrap_or(0);
    for flow in shown {
        let [mean, highest, bytes] =
            [flow.mean_bytes_per_s, flow.highest_bytes_per_s, flow.bytes].map(decimal);
        let names = names(flow);
        let _ = writeln!(text, "  {names:wide$}  {mean}/s mean, {highest}/s highest, {bytes}");
    }
    if let others @ [_, ..] = &flows.pairs[shown.len()..] {
        let pairs = if others.len() == 1 { "pair" } else { "pairs" };
        let bytes = others.iter().map(|flow| flow.bytes).sum();
        let _ = writeln!(text, "  and {} other {pairs}: {}", others.len(), decimal(bytes));
    }
    text
}

/// Bytes in the decimal units in which links are told.
fn decimal(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["TB", "GB", "MB", "kB"];
    let mut size = 1e12;
    for unit in UNITS {
        // What would be told as a thousand of the smaller unit is one of this.
        if bytes as f64 >= size * 0.9995 {
            return format!("{:.1} {unit}", bytes as f64 / size);
        }
        size /= 1000.0;
    }
    format!("{bytes} B")
}

/// A part for each figure, with a line for each process.
fn rendered(curves: &Curves, names: usize) -> String {
    let mut text = String::new();
    let (Some(first), Some(last)) = (curves.at.first(), curves.at.last()) else {
        return "nothing is known of this time\n".to_owned();
    };
    let each = curves.ms.iter().max().map_or(0, |ms| u64::from(*ms));
    let each = Span(Duration::from_secs((each + 500) / 1000));
    // Writing to a string can't fail.
    let _ = writeln!(
        text,
        "{} to {}, a mark is about {each}: the highest in it; '·': not there, ' ': not known",
        at(*first),
        at(*last)
    );
    let figures = curves.processes.first().map(|process| process.figures.keys());
    for figure in figures.into_iter().flatten() {
        let of = |process: &Curve| {
            process.figures[figure].highest.iter().flatten().copied().fold(0.0, f64::max)
        };
        let highest = curves.processes.iter().map(of).fold(0.0, f64::max);
        if highest <= 0.0 {
            continue;
        }
        let full = match figure.as_str() {
            "cpus" => highest.max(LEAST_CPUS),
            share if share.ends_with("_percent") => 100.0,
            _ => highest,
        };
        let _ = writeln!(text, "{figure}");
        for process in &curves.processes {
            let marks = marks(process, figure, full);
            let is_known = process.figures[figure].highest.iter().any(Option::is_some);
            let most = if is_known { told(figure, of(process)) } else { "not known".to_owned() };
            let _ = writeln!(text, "  {:names$}  {marks} {most}", process.name);
        }
    }
    text
}

/// A mark for each point.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share is between 0 and 1"
)]
fn marks(process: &Curve, figure: &str, highest: f64) -> String {
    let points = process.figures[figure].highest.iter().zip(&process.up);
    let mark = |(value, up): (&Option<f64>, &Option<u8>)| match (value, up) {
        (Some(value), _) => {
            let heights = (MARKS.len() - 1) as f64;
            MARKS[((value / highest).clamp(0.0, 1.0) * heights).round() as usize]
        }
        (None, Some(0)) => '·',
        (None, _) => ' ',
    };
    points.map(mark).collect()
}

/// A figure's value with its unit.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bytes are no fractions, and not less than none"
)]
fn told(figure: &str, value: f64) -> String {
    match figure.strip_suffix("_per_s").unwrap_or(figure) {
        bytes if bytes.ends_with("_bytes") => {
            let bytes = HumanBytes(value as u64).to_string();
            if figure.ends_with("_per_s") { format!("{bytes}/s") } else { bytes }
        }
        _ if figure.ends_with("_per_s") => format!("{value:.1}/s"),
        _ if figure.ends_with("_percent") => format!("{value:.0} %"),
        _ => format!("{value:.2}"),
    }
}

/// A time, as RFC 3339 but for the milliseconds.
fn at(ms: u64) -> String {
    let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string();
    format!("{} {}Z", at.get(..10).unwrap_or_default(), time_of_day(&at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::history::{Figure, History, Rings, Shape, Span as Seen, State};

    #[test]
    fn the_busiest_pairs_have_a_line_each_and_the_others_one() {
        assert_eq!(busiest(&Flows::default()), "");
        let flow = |from: u64, bytes| Flow {
            from: format!("gpu{from}"),
            to: "gpu0".to_owned(),
            bytes,
            mean_bytes_per_s: bytes / 60,
            highest_bytes_per_s: bytes / 10,
        };
        let pairs = vec![flow(10, 72_000_000_000), flow(1, 999_960), flow(2, 900)];
        let (since, until) = (Some(1_800_000_000_000), Some(1_800_000_060_000));
        let mut flows = Flows { since, until, pairs };
        let expected = "\
from worker to worker, 2027-01-15 08:00:00Z to 2027-01-15 08:01:00Z
  gpu10 → gpu0  1.2 GB/s mean, 7.2 GB/s highest, 72.0 GB
  gpu1 → gpu0   16.7 kB/s mean, 100.0 kB/s highest, 1.0 MB
  gpu2 → gpu0   15 B/s mean, 90 B/s highest, 900 B
";
        assert_eq!(busiest(&flows), expected);
        flows.pairs.extend((3..12).map(|from| flow(from, 100)));
        let text = busiest(&flows);
        assert_eq!(text.lines().count(), 12);
        assert!(text.ends_with("  and 2 other pairs: 200 B\n"), "{text}");
    }

    #[test]
    fn a_death_is_a_gap_and_a_peak_stands_out() {
        let names = ["gpu0", "gpu1"].map(str::to_owned).to_vec();
        let figures = ["cpus", "resident_bytes", "spilled_bytes", "gpu_busy_percent"];
        let figures = figures.map(str::to_owned).to_vec();
        let mut rings = Rings::new(Shape::new(names, figures));
        let mut bytes = rings.header().to_vec();
        for step in 1..=8 {
            let value = |worker: u64| match (worker, step) {
                (1, 5..=6) => None,
                (1, 4) => Some(8.0),
                _ => Some(1.0),
            };
            let state = |worker| State {
                up: if value(worker).is_some() { 100 } else { 0 },
                ..State::default()
            };
            let of = |worker| {
                let bytes = value(worker).map(|gib| gib * f64::from(1 << 30));
                let busy = value(worker).map(|share| 10.0 * share).filter(|_| worker == 1);
                [value(worker), bytes, Some(0.0), busy].map(Figure::of)
            };
            let states = vec![state(0), state(1)];
            let figures = [of(0), of(1)].concat();
            let span = Seen { at: 1_800_000_000_000 + step * 10_000, ms: 10_000, states, figures };
            for (place, record) in rings.add(&span) {
                let place = usize::try_from(place).expect("a place");
                bytes.resize(bytes.len().max(place + record.len()), 0);
                bytes[place..place + record.len()].copy_from_slice(&record);
            }
        }
        let history = History::read(&bytes).expect("a history");
        let text = rendered(&history.curves(None, None, 8), 4);
        let expected = "\
2027-01-15 08:00:10Z to 2027-01-15 08:01:20Z, a mark is about 10s: the highest in it; '·': not there, ' ': not known
cpus
  gpu0  ▂▂▂▂▂▂▂▂ 1.00
  gpu1  ▂▂▂█··▂▂ 8.00
gpu_busy_percent
  gpu0           not known
  gpu1  ▂▂▂▇··▂▂ 80 %
resident_bytes
  gpu0  ▂▂▂▂▂▂▂▂ 1.0 GiB
  gpu1  ▂▂▂█··▂▂ 8.0 GiB
";
        assert_eq!(text, expected);
    }
}
