//! `doctor --bandwidth`: how fast data moves between the host and GPUs and between GPUs, as a table
//! or JSON.

use super::super::failure::Failure;
use super::super::{heat, output};
use crate::cluster::doctor::bandwidth::{Measured, PathVerdict, Way, bandwidth};
use crate::topology::Topology;

/// Prints the rows, after the findings.
pub(super) fn print(rows: &[Measured]) -> Result<(), Failure> {
    match rows {
        [] => Ok(()),
        rows => output::print(&format!("\n{}", table(rows))),
    }
}

/// Measures all ways of a machine.
pub(super) fn measured(topology: &Topology) -> Vec<Measured> {
    let rows = bandwidth(topology);
    if rows.is_empty() {
        output::note(&"the bandwidth was not measured, because there is no GPU");
    }
    rows
}

/// Whether a way has failed.
pub(super) fn has_failed(rows: &[Measured]) -> bool {
    rows.iter().any(|row| row.verdict == PathVerdict::Failed)
}

fn table(rows: &[Measured]) -> String {
    let headings = ["from", "to", "way", "GB/s", "allowed", "path", "µs", "verdict"];
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    output::fitted(&headings, &rows, &["µs", "path", "way"], "-o json has all")
}

fn cells(row: &Measured) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let way = row.way.map(|way| match way {
        Way::Peer => "peer",
        Way::Staged => "staged",
        Way::Host => "host",
    });
    vec![
        row.from.clone(),
        row.to.clone(),
        or_dash(way.map(str::to_owned)),
        or_dash(row.gb_per_s.map(heat::figure)),
        or_dash(row.allowed_gb_per_s.map(|most| format!("{most:.0}"))),
        or_dash(row.path.clone()),
        or_dash(row.latency_us.map(|micros| format!("{micros:.1}"))),
        verdict(row),
    ]
}

fn verdict(row: &Measured) -> String {
    let word = match row.verdict {
        PathVerdict::Ok => "ok",
        PathVerdict::Slow => "slow",
        PathVerdict::CannotTell => "can't tell",
        PathVerdict::LeftOut => "left out",
        PathVerdict::Failed => "FAILED",
    };
    if row.text.is_empty() { word.to_owned() } else { format!("{word}: {}", row.text) }
}
