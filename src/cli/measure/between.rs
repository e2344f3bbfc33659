//! Shows what was measured between machines.
//!
//! *Invariant:* how many pairs there are is said with how many were measured.

use crate::cli::{heat, output};
use crate::cluster::measure::Between;
use crate::units::Size;
use crate::wire::links::between::{Rail, Row, Verdict};

/// The answer: how many pairs are as planned, and those that are not; all of them if `each`.
pub(super) fn text(between: &Between, each: bool) -> String {
    let hosts = between.hosts.len();
    if between.pairs == 0 {
        return "between hosts: no pairs, because all workers are on one\n".to_owned();
    }
    let (measured, pairs) = (between.measured.len(), between.pairs);
    let ok = between.measured.iter().filter(|row| row.verdict == Verdict::Ok);
    let rates = between.measured.iter().filter_map(|row| row.gb_per_s);
    let which = match (measured == pairs, measured < between.chosen) {
        (true, _) => "",
        (_, true) => ", as far as the time sufficed",
        (_, false) if between.is_sample => ", each host with each other and each NIC once",
        _ => "",
    };
    let count = ok_and_range(ok.count(), measured, rates);
    let mut text = format!("between {hosts} hosts: {measured} of {pairs} pairs{which}: {count}\n");
    let told = |row: &&Row| each || row.verdict != Verdict::Ok;
    let rows: Vec<Vec<String>> = between.measured.iter().filter(told).map(cells).collect();
    if !rows.is_empty() {
        let headings = ["from", "host", "to", "host", "moved", "GB/s", "lanes", "verdict"];
        let less = ["moved", "lanes", "host", "host"];
        text.push_str(&format!("\n{}", output::fitted(&headings, &rows, &less, "-o json has all")));
    }
    let differing: Vec<&Rail> = between.rails.iter().filter(|rail| !rail.is_one).collect();
    if !between.rails.is_empty() {
        let (one, all) = (between.rails.len() - differing.len(), between.rails.len());
        text.push_str(&format!("rails: {one} of {all} workers have the same NIC on both hosts\n"));
    }
    differing.iter().for_each(|rail| text.push_str(&format!("  {rail}\n")));
    text
}

/// `11 of 12 ok, 0.91 to 1.10 GB/s`.
fn ok_and_range(ok: usize, all: usize, rates: impl Iterator<Item = f64>) -> String {
    let range = range(rates).map(|range| format!(", {range}")).unwrap_or_default();
    format!("{ok} of {all} ok{range}")
}

/// `0.91 to 1.10 GB/s`; `None` without figures.
pub(super) fn range(rates: impl Iterator<Item = f64>) -> Option<String> {
    let rates: Vec<f64> = rates.collect();
    let least = rates.iter().copied().reduce(f64::min)?;
    let most = rates.iter().copied().reduce(f64::max)?;
    Some(format!("{} to {} GB/s", heat::figure(least), heat::figure(most)))
}

fn cells(row: &Row) -> Vec<String> {
    vec![
        row.from.clone(),
        row.from_host.clone(),
        row.to.clone(),
        row.to_host.clone(),
        Size::Bytes(row.moved_bytes).to_string(),
        row.gb_per_s.map_or("-".to_owned(), heat::figure),
        row.lanes.join(" "),
        row.verdict.to_string(),
    ]
}
