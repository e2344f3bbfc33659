//! `cuda-cluster plan --predict`: shows what the GPUs of a plan should deliver.
//!
//! Does not predict; `crate::predict` does.
//!
//! *Invariant:* a figure that the topology does not tell is shown as `?`, and the reason below.

use std::collections::{BTreeMap, BTreeSet};

use anstyle::Style;
use serde::Serialize;

use super::failure::Failure;
use super::output::{self, headed, section};
use crate::ids::GpuIndex;
use crate::plan::Plan;
use crate::predict::{Component, Figure, Prediction, predict_among};
use crate::text::wrapped;
use crate::topology::Topology;

/// The version of the JSON form.
const VERSION: u32 = 1;

/// Width of a page.
const PAGE: usize = 80;

/// Columns of a matrix that fit a page.
const COLUMNS: usize = 9;

const BOLD: Style = Style::new().bold();

#[derive(Serialize)]
struct Document {
    version: u32,
    #[serde(flatten)]
    prediction: Prediction,
}

/// Prints what the GPUs of a plan should deliver while all others are idle.
pub(super) fn print(machine: &Topology, plan: &Plan, as_json: bool) -> Result<(), Failure> {
    let workers = plan.workers.iter().filter_map(|worker| worker.gpu.as_ref());
    let chosen: BTreeSet<GpuIndex> = workers.map(|gpu| gpu.index).collect();
    let prediction = predict_among(machine, &chosen.into_iter().collect::<Vec<_>>());
    if as_json {
        return output::print_json(&Document { version: VERSION, prediction });
    }
    output::print_text(&page(&prediction))
}

fn page(prediction: &Prediction) -> String {
    let machine = prediction.machine.as_deref().unwrap_or("this machine");
    let gpus = match prediction.gpus.len() {
        0 => "its GPUs, of which the plan has none,".to_owned(),
        1 => "its GPU".to_owned(),
        count => format!("{count} GPUs"),
    };
    let mut text = format!("{BOLD}{machine}{BOLD:#}: what {gpus} should deliver, in GB/s\n");
    text.push_str("From the topology alone; nothing is measured.\n");
    let one_way = prediction.pairs.iter().map(|pair| (pair.from, pair.to, &pair.one_way));
    let both_ways = prediction.pairs.iter().map(|pair| (pair.from, pair.to, &pair.both_ways));
    matrix(&mut text, "Each pair alone, one way", &one_way.collect::<Vec<_>>());
    matrix(&mut text, "Each pair alone, both ways, sum", &both_ways.collect::<Vec<_>>());
    if prediction.pairs.len() > 1 {
        let sum = cell(&prediction.all_reduce);
        section(&mut text, "All-reduce of all, bus bandwidth", &[sum]);
    }
    hosts(&mut text, prediction);
    nics(&mut text, prediction);
    section(&mut text, "What limits", &limits(prediction));
    section(&mut text, "Unknown (?)", &listed(unknown(prediction)));
    section(&mut text, "Assumed", &listed(prediction.assumed.iter().map(String::as_str)));
    text
}

/// A bandwidth with two or three digits.
fn cell(figure: &Figure) -> String {
    match figure.gb_per_s() {
        Some(rate) if rate >= 99.95 => format!("{rate:.0}"),
        Some(rate) => format!("{rate:.1}"),
        None => "?".to_owned(),
    }
}

/// Figures of pairs, in parts that fit a page; one line if all are the same.
fn matrix(text: &mut String, heading: &str, pairs: &[(GpuIndex, GpuIndex, &Figure)]) {
    let cells: BTreeMap<(GpuIndex, GpuIndex), String> =
        pairs.iter().map(|(from, to, figure)| ((*from, *to), cell(figure))).collect();
    let distinct: BTreeSet<&String> = cells.values().collect();
    if let [one] = distinct.iter().collect::<Vec<_>>()[..] {
        section(text, heading, &[format!("{one}  every pair")]);
        return;
    }
    let gpus: BTreeSet<GpuIndex> = pairs.iter().map(|(from, _, _)| *from).collect();
    let gpus: Vec<GpuIndex> = gpus.into_iter().collect();
    let mut lines = Vec::new();
    for columns in gpus.chunks(COLUMNS) {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        let names: Vec<String> = columns.iter().map(|gpu| format!("gpu{gpu}")).collect();
        let headings: Vec<&str> =
            ["from \\ to"].into_iter().chain(names.iter().map(String::as_str)).collect();
        let dash = || "-".to_owned();
        let cells = |from: GpuIndex| {
            let cell = |to: &GpuIndex| cells.get(&(from, *to)).cloned().unwrap_or_else(dash);
            columns.iter().map(cell).collect::<Vec<_>>()
        };
        let rows = gpus.iter().map(|gpu| [vec![format!("gpu{gpu}")], cells(*gpu)].concat());
        lines.extend(output::table(&headings, rows).lines().map(str::to_owned));
    }
    section(text, heading, &lines);
}

/// What each GPU exchanges with all others, and with the host.
fn hosts(text: &mut String, prediction: &Prediction) {
    let row = |gpu: &crate::predict::GpuFigures| {
        let figures = [
            &gpu.all_pairs,
            &gpu.from_host,
            &gpu.to_host,
            &gpu.from_host_with_all,
            &gpu.to_host_with_all,
        ];
        let cells = figures.map(cell);
        let single = prediction.gpus.len() < 2;
        let with_others = |at: usize| single && [0, 3, 4].contains(&at);
        let cells = cells.into_iter().enumerate();
        let cells = cells.map(|(at, cell)| if with_others(at) { "-".to_owned() } else { cell });
        [vec![format!("gpu{}", gpu.gpu)], cells.collect()].concat()
    };
    let headings = ["", "all pairs", "from host", "to host", "from host, all", "to host, all"];
    let table = output::table(&headings, prediction.gpus.iter().map(row));
    let lines: Vec<String> = table.lines().map(str::to_owned).collect();
    let heading = "Each GPU: sent with all pairs at once; host alone, and with all GPUs at once";
    section(text, heading, &lines);
}

/// What each GPU sends through each NIC; GPUs with the same figures share their rows.
/// A figure, and the NICs that have it.
type Same<'a> = (String, Vec<&'a str>);

fn nics(text: &mut String, prediction: &Prediction) {
    let mut of_gpus: BTreeMap<GpuIndex, Vec<Same<'_>>> = BTreeMap::new();
    for nic in &prediction.nics {
        let rows = of_gpus.entry(nic.gpu).or_default();
        let shown = cell(&nic.figure);
        match rows.iter_mut().find(|(figure, _)| *figure == shown) {
            Some((_, names)) => names.push(&nic.nic),
            None => rows.push((shown, vec![&nic.nic])),
        }
    }
    let mut groups: Vec<(Vec<String>, Vec<Same<'_>>)> = Vec::new();
    for (gpu, rows) in of_gpus {
        match groups.iter_mut().find(|(_, others)| *others == rows) {
            Some((gpus, _)) => gpus.push(format!("gpu{gpu}")),
            None => groups.push((vec![format!("gpu{gpu}")], rows)),
        }
    }
    let rows = groups.into_iter().flat_map(|(gpus, rows)| {
        let head = gpus.join(", ");
        let row = move |(at, (figure, names)): (usize, Same<'_>)| {
            let head = if at == 0 { head.clone() } else { String::new() };
            (head, format!("{figure}  {}", names.join(", ")))
        };
        rows.into_iter().enumerate().map(row)
    });
    section(text, "To a NIC, alone", &headed(rows.collect(), PAGE - 2));
}

/// The parts that limit each kind of figure; those that differ only in which one are counted.
fn limits(prediction: &Prediction) -> Vec<String> {
    let gpus = &prediction.gpus;
    let pairs = &prediction.pairs;
    let host = gpus.iter().flat_map(|gpu| [&gpu.from_host, &gpu.to_host]);
    let all = gpus.iter().flat_map(|gpu| [&gpu.from_host_with_all, &gpu.to_host_with_all]);
    let rows: [(&str, Vec<&Figure>); 6] = [
        ("one way", pairs.iter().map(|pair| &pair.one_way).collect()),
        ("both ways", pairs.iter().map(|pair| &pair.both_ways).collect()),
        ("all pairs", gpus.iter().map(|gpu| &gpu.all_pairs).collect()),
        ("host alone", host.collect()),
        ("host, all", all.collect()),
        ("NIC", prediction.nics.iter().map(|nic| &nic.figure).collect()),
    ];
    let row = |(what, figures): (&str, Vec<&Figure>)| {
        let parts: BTreeSet<&Component> =
            figures.iter().filter_map(|figure| figure.limited_by()).collect();
        let mut alike: BTreeMap<_, Vec<&str>> = BTreeMap::new();
        for part in parts {
            alike.entry((part.kind, part.like())).or_default().push(&part.name);
        }
        let named = |names: &Vec<&str>| match names.len() {
            1 => names[0].to_owned(),
            count => format!("{}, and {} like it", names[0], count - 1),
        };
        let words = alike.values().map(named).collect::<Vec<_>>().join("; ");
        (!words.is_empty()).then(|| (what.to_owned(), words))
    };
    headed(rows.into_iter().filter_map(row).collect(), PAGE - 2)
}

fn unknown(prediction: &Prediction) -> BTreeSet<&str> {
    let pairs = prediction.pairs.iter().flat_map(|pair| [&pair.one_way, &pair.both_ways]);
    let gpus = prediction.gpus.iter().flat_map(|gpu| [&gpu.from_host, &gpu.to_host]);
    let figures = pairs.chain(gpus).chain(prediction.nics.iter().map(|nic| &nic.figure));
    figures.filter_map(reason).collect()
}

/// Why a figure is unknown.
fn reason(figure: &Figure) -> Option<&str> {
    match figure {
        Figure::Unknown { unknown } => Some(unknown),
        Figure::Known { .. } => None,
    }
}

/// Texts that begin on a line each.
fn listed<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let hang = |(at, words): (usize, String)| if at == 0 { words } else { format!("  {words}") };
    let lines = texts.into_iter().flat_map(|text| {
        wrapped(text, PAGE - 4).into_iter().enumerate().map(hang).collect::<Vec<_>>()
    });
    lines.collect()
}
