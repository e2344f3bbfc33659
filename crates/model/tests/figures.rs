//! The predictions, compared with published measurements (`figures.yaml`).
//!
//! Prints all figures: `cargo test -p cuda-cluster-model --test figures -- --nocapture`.
#![expect(clippy::print_stdout, reason = "the table is for people")]

use std::path::Path;

use cuda_cluster_model::ids::GpuIndex;
use cuda_cluster_model::predict::{Figure, Prediction, predict_among};
use cuda_cluster_model::topology::{Topology, builtin, parse};
use serde::Deserialize;

#[derive(Deserialize)]
struct Figures {
    figures: Vec<Published>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    source: String,
    machine: String,
    what: What,
    gpus: Vec<GpuIndex>,
    #[serde(default)]
    nics: Vec<String>,
    gb_per_s: Vec<f64>,
    #[expect(dead_code, reason = "for readers of the file")]
    tool: String,
    peer_access: Option<bool>,
    culprit: Option<String>,
    #[expect(dead_code, reason = "for readers of the file")]
    words: Option<String>,
    #[serde(default)]
    held: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum What {
    PairOneWay,
    PairBothWays,
    HostToGpu,
    GpuToHost,
    HostToAll,
    AllToHost,
    AllPairs,
    AllReduceBusbw,
    Nic,
}

fn median(mut values: Vec<f64>) -> f64 {
    assert!(!values.is_empty(), "there is something to compare");
    values.sort_by(f64::total_cmp);
    let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
    f64::midpoint(values[low], values[high])
}

fn machine(published: &Published) -> Topology {
    let name = &published.machine;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/machines/{name}.yaml"));
    let text = builtin(name).map(str::to_owned);
    let text = text.or_else(|| std::fs::read_to_string(path).ok()).expect("a machine of this name");
    let mut machine = parse(&text).expect("it reads");
    let all: Vec<GpuIndex> = machine.gpus.iter().map(|gpu| gpu.index).collect();
    for gpu in &mut machine.gpus {
        match published.peer_access {
            Some(true) => gpu.peers = Some(all.clone()),
            Some(false) => gpu.peers = Some(Vec::new()),
            None => {}
        }
    }
    machine
}

fn predicted(published: &Published) -> Figure {
    let prediction = predict_among(&machine(published), &published.gpus);
    let first = published.gpus[0];
    let gpu = prediction.gpus.iter().find(|figures| figures.gpu == first);
    let gpu = gpu.expect("a GPU of the machine").clone();
    let pair = || {
        let second = published.gpus[1];
        let found = prediction.pairs.iter().find(|pair| (pair.from, pair.to) == (first, second));
        found.expect("a pair of the machine").clone()
    };
    match published.what {
        What::PairOneWay => pair().one_way,
        What::PairBothWays => pair().both_ways,
        What::HostToGpu => gpu.from_host,
        What::GpuToHost => gpu.to_host,
        What::HostToAll => gpu.from_host_with_all,
        What::AllToHost => gpu.to_host_with_all,
        What::AllPairs => gpu.all_pairs,
        What::AllReduceBusbw => prediction.all_reduce,
        What::Nic => through(&published.nics, &prediction),
    }
}

/// What goes through some NICs together.
fn through(names: &[String], prediction: &Prediction) -> Figure {
    let used = prediction.nics.iter().filter(|figure| names.contains(&figure.nic));
    let figures: Vec<Figure> = used.map(|nic| nic.figure.clone()).collect();
    assert_eq!(figures.len(), names.len(), "{names:?}");
    let total: Option<f64> = figures.iter().map(Figure::gb_per_s).sum();
    let first = figures.into_iter().next().expect("a NIC");
    match (first, total) {
        (Figure::Known { limited_by, .. }, Some(gb_per_s)) => {
            Figure::Known { gb_per_s, limited_by }
        }
        (other, _) => other,
    }
}

/// A published figure beside its prediction.
struct Compared {
    published: Published,
    measured: f64,
    predicted: Figure,
}

impl Compared {
    fn of(published: Published) -> Self {
        let measured = median(published.gb_per_s.clone());
        let predicted = predicted(&published);
        Self { published, measured, predicted }
    }

    /// How far the prediction is from the measurement, relative to the latter.
    fn error(&self) -> Option<f64> {
        Some((self.predicted.gb_per_s()? - self.measured) / self.measured)
    }

    fn names_the_culprit(&self) -> Option<bool> {
        let culprit = self.published.culprit.as_ref()?;
        Some(self.predicted.limited_by().is_some_and(|part| part.kind.to_string() == *culprit))
    }

    fn print(&self) {
        let Published { source, machine, what, gpus, held, .. } = &self.published;
        let gpus: Vec<String> = gpus.iter().map(ToString::to_string).collect();
        let (predicted, error) = match (&self.predicted, self.error()) {
            (Figure::Known { gb_per_s, .. }, Some(error)) => {
                (format!("{gb_per_s:.1}"), format!("{:+.0} %", 100.0 * error))
            }
            _ => ("?".to_owned(), "?".to_owned()),
        };
        let by = match &self.predicted {
            Figure::Known { limited_by, .. } => limited_by.name.clone(),
            Figure::Unknown { unknown } => unknown.clone(),
        };
        let held = if *held { "held" } else { "" };
        let culprit = match self.names_the_culprit() {
            Some(true) => " [culprit named]",
            Some(false) => " [culprit missed]",
            None => "",
        };
        println!(
            "{:>7.1} {predicted:>7} {error:>6} {held:4} {:16} {machine} {}  {by}{culprit}  \
             ({source})",
            self.measured,
            format!("{what:?}"),
            gpus.join(","),
        );
    }
}

fn all() -> Vec<Compared> {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/figures.yaml"));
    let read: Figures = serde_yaml::from_str(&text.expect("the file")).expect("it reads");
    read.figures.into_iter().map(Compared::of).collect()
}

fn median_error<'a>(compared: impl Iterator<Item = &'a Compared>) -> f64 {
    median(compared.filter_map(Compared::error).map(f64::abs).collect())
}

#[test]
fn every_third_figure_is_held_back() {
    for (at, compared) in all().iter().enumerate() {
        assert_eq!(compared.published.held, at % 3 == 2, "number {at} of figures.yaml");
    }
}

#[test]
fn predictions_are_near_what_was_measured() {
    let all = all();
    all.iter().for_each(Compared::print);
    let held = || all.iter().filter(|compared| compared.published.held);
    let (of_all, of_held) = (median_error(all.iter()), median_error(held()));
    let untold = all.iter().filter(|compared| compared.error().is_none()).count();
    println!(
        "{} figures, {untold} not told by the topology; median error {:.1} %, of the {} held back \
         {:.1} %",
        all.len(),
        100.0 * of_all,
        held().count(),
        100.0 * of_held
    );
    assert!(all.len() >= 75, "{} figures", all.len());
    assert!(of_all <= 0.15, "median error {of_all}");
    assert!(of_held <= 0.15, "median error of what was held back {of_held}");
}

#[test]
fn most_culprits_are_named() {
    let all = all();
    let named: Vec<bool> = all.iter().filter_map(Compared::names_the_culprit).collect();
    let right = named.iter().filter(|named| **named).count();
    println!("{right} of {} culprits named", named.len());
    assert!(2 * right > named.len());
}
