//! Laws of folding, and what a damaged file becomes.

use proptest::prelude::*;

use super::form::SpanOf;
use super::*;

const BEGAN: u64 = 1_800_000_000_000;
const TEN: u32 = 10_000;

fn shape(processes: usize, figures: usize) -> Shape {
    let names = |word: &str, count| (0..count).map(|at| format!("{word}{at}")).collect();
    Shape::new(names("gpu", processes), names("figure", figures))
}

fn span(at: u64, value: Option<f64>, shape: &Shape) -> Span {
    let up = if value.is_some() { 100 } else { 0 };
    let count = shape.processes.len();
    Span {
        at,
        ms: TEN,
        states: vec![State { phase: 2, up, restarts: 1 }; count],
        figures: vec![Figure::of(value); count * shape.figures.len()],
    }
}

/// A file, written as a supervisor does.
#[derive(Debug)]
pub(super) struct Disk<F: Form> {
    pub(super) rings: form::Rings<F>,
    pub(super) bytes: Vec<u8>,
}

impl<F: Form> Disk<F> {
    pub(super) fn new(shape: F) -> Self {
        Self { bytes: shape.header(), rings: form::Rings::new(shape) }
    }

    pub(super) fn add(&mut self, span: &SpanOf<F>) {
        for (place, record) in self.rings.add(span) {
            let place = usize::try_from(place).expect("a place");
            let end = place + record.len();
            self.bytes.resize(self.bytes.len().max(end), 0);
            self.bytes[place..end].copy_from_slice(&record);
        }
    }

    pub(super) fn read(&self) -> form::History<F> {
        form::History::read(&self.bytes).expect("it is whole")
    }
}

fn known(span: &Span) -> Option<(f32, f32)> {
    span.figures[0].known()
}

#[test]
fn a_peak_of_ten_seconds_is_seen_a_week_later_and_the_file_does_not_grow() {
    let mut disk = Disk::new(shape(2, 1));
    let day = 24 * 360;
    let full = disk.rings.shape().bytes();
    for at in 0..6 * day {
        let value = if at == 1000 { 77.0 } else { 1.0 };
        disk.add(&span(BEGAN + at * 10_000, Some(value), disk.rings.shape()));
        assert!(disk.bytes.len() as u64 <= full);
    }
    let history = disk.read();
    let (first, last) = history.bounds().expect("it is not empty");
    assert_eq!(last, BEGAN + (6 * day - 1) * 10_000);
    assert!(first <= BEGAN, "all of six days is known: {first}");
    for most in [1, 7, 300, 10_000] {
        let spans = history.between(first, last, most);
        let highest = spans.iter().filter_map(known).map(|(_, highest)| highest);
        assert_eq!(highest.fold(0.0, f32::max), 77.0, "in {most}");
        assert!(spans.len() <= most + 1);
    }
}

#[test]
fn an_hour_is_known_in_steps_of_ten_seconds_and_before_it_in_minutes() {
    let mut disk = Disk::new(shape(1, 1));
    let steps = 3 * 360;
    for at in 1..=steps {
        disk.add(&span(BEGAN + at * 10_000, Some(at as f64), disk.rings.shape()));
    }
    let end = BEGAN + steps * 10_000;
    let fine = disk.read().between(end - 3_000_000, end, 100_000);
    assert_eq!(fine.len(), 300);
    assert!(fine.iter().all(|span| span.ms == TEN));
    let coarse = disk.read().between(BEGAN, end - 3_700_000, 100_000);
    assert!(coarse.iter().all(|span| span.ms == 60_000 || span.begin() == BEGAN), "{coarse:?}");
    let covered: u64 = coarse.iter().map(|span| u64::from(span.ms)).sum();
    assert!(covered >= 2 * 3_600_000 - 100_000, "nothing is missing between them: {covered}");
}

#[test]
fn no_line_is_drawn_over_a_gap_or_over_a_process_that_does_not_run() {
    let mut disk = Disk::new(shape(1, 1));
    let at = |step: u64| BEGAN + step * 10_000;
    // The machine sleeps from 3 to 20, and the process is away at 22.
    for (step, value) in [
        (1, Some(1.0)),
        (2, Some(2.0)),
        (3, Some(3.0)),
        (20, Some(4.0)),
        (21, Some(5.0)),
        (22, None),
        (23, Some(6.0)),
    ] {
        disk.add(&span(at(step), value, disk.rings.shape()));
    }
    let curves = disk.read().curves(None, None, 1000);
    let mean = &curves.processes[0].figures["figure0"].mean;
    let unknown: Vec<usize> = (0..mean.len()).filter(|at| mean[*at].is_none()).collect();
    assert_eq!(unknown, [3, 6], "{mean:?}");
    assert_eq!(curves.processes[0].up[3..7], [None, Some(100), Some(100), Some(0)]);
    assert!(curves.at.is_sorted() && curves.at[3] > at(3) && curves.at[3] < at(19));
}

#[test]
fn what_very_many_processes_need_stays_in_the_budget() {
    for processes in [0, 1, 9, 73, 1000, 4000] {
        let shape = shape(processes, 6);
        let header = shape.header().len() as u64;
        assert!(shape.bytes() <= BUDGET + header, "{processes}: {}", shape.bytes());
        assert!(shape.levels.iter().all(|level| level.slots > 0));
    }
    assert_eq!(shape(9, 6).levels, LEVELS, "eight workers have all of it");
}

#[test]
fn a_file_is_as_long_as_the_readme_says() {
    let long = |workers: usize, figures| {
        cuda_cluster_model::units::HumanBytes(shape(workers + 1, figures).bytes()).to_string()
    };
    // Of simulated GPUs and of real ones.
    assert_eq!([long(8, 7), long(8, 8)], ["1.1 MiB", "1.3 MiB"]);
    assert_eq!([long(72, 7), long(72, 8)], ["8.0 MiB", "8.0 MiB"]);
}

#[test]
fn a_file_without_a_figure_that_was_added_later_is_read() {
    let of = |figures: &[&str]| {
        let names = figures.iter().map(|name| (*name).to_owned()).collect();
        let mut disk = Disk::new(Shape::new(vec!["gpu0".to_owned()], names));
        disk.add(&span(BEGAN, Some(1.0), disk.rings.shape()));
        disk.read().curves(None, None, 10).processes.remove(0).figures
    };
    let (old, new) = (of(&["cpus"]), of(&["cpus", "gpu_busy_percent"]));
    assert_eq!(old["cpus"].mean, new["cpus"].mean);
    assert!(!old.contains_key("gpu_busy_percent"), "it is not known, and no zero");
}

#[test]
fn what_is_no_history_or_of_another_version_is_said() {
    let whole = shape(2, 2);
    let told = |bytes: &[u8]| History::read(bytes).expect_err("an error").to_string();
    assert_eq!(told(b""), "this is no history of a cluster");
    assert_eq!(told(b"{\"version\":1}"), "this is no history of a cluster");
    assert!(told(&whole.header()[..10]).contains("it is cut"));
    assert!(told(&whole.header()[..40]).contains("its length is wrong"));
    let other = Shape { version: 7, ..whole.clone() };
    assert_eq!(
        told(&other.header()),
        "the history has version 7, and this program reads version 1"
    );
    let vast = Shape { levels: vec![Level { every_ms: 1, slots: u32::MAX }], ..whole };
    assert!(told(&vast.header()).contains("too much"));
}

#[test]
fn half_a_record_is_none() {
    let mut disk = Disk::new(shape(3, 2));
    for step in 1..=3 {
        disk.add(&span(BEGAN + step * 10_000, Some(1.0), disk.rings.shape()));
    }
    let record = disk.rings.shape().record_bytes();
    let second = disk.rings.shape().header().len() + record;
    disk.bytes[second + record / 2..second + record].fill(0);
    let history = disk.read();
    assert_eq!(history.between(BEGAN, BEGAN + 30_000, 10_000).len(), 2);
    disk.bytes.truncate(second + record + 5);
    assert_eq!(disk.read().bounds(), Some((BEGAN, BEGAN + 10_000)), "the file is cut");
}

proptest! {
    /// Whatever was read: nothing higher appears, nothing highest is lost, nothing is known of a
    /// time of which nothing was, and time runs forwards.
    #[test]
    fn folding_loses_no_peak_and_invents_nothing(
        steps in prop::collection::vec((1u64..400, prop::option::of(0.0..1e6f64)), 1..400),
        most in 1usize..500,
    ) {
        let mut disk = Disk::new(shape(1, 1));
        let mut at = BEGAN;
        let mut read = Vec::new();
        for (pause, value) in steps {
            // Most are as usual; some come late.
            at += if pause < 350 { 10_000 } else { pause * 10_000 };
            disk.add(&span(at, value, disk.rings.shape()));
            read.push((at, value.map(single)));
        }
        let history = disk.read();
        let (first, last) = history.bounds().expect("it is not empty");
        prop_assert_eq!(last, at);
        let spans = history.between(first, last, most);
        prop_assert!(spans.len() <= most + 1);
        prop_assert!(spans.windows(2).all(|two| two[0].at < two[1].at));
        let kept = read.iter().filter(|(at, _)| *at > first).filter_map(|(_, value)| *value);
        let (low, high) = kept.clone().fold((f32::MAX, f32::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let told: Vec<(f32, f32)> = spans.iter().filter_map(known).collect();
        prop_assert_eq!(told.is_empty(), kept.clone().next().is_none());
        if !told.is_empty() {
            prop_assert_eq!(told.iter().map(|(_, highest)| *highest).fold(f32::MIN, f32::max), high);
            let slack = high.abs() * 1e-5 + 1e-5;
            prop_assert!(told.iter().all(|(mean, highest)| mean <= highest && *mean >= low - slack));
        }
        // A span tells of a process exactly if it ran then.
        for span in &spans {
            prop_assert_eq!(span.states[0].up > 0, known(span).is_some());
        }
    }

    #[test]
    fn no_file_makes_a_reader_fail(mut bytes in prop::collection::vec(any::<u8>(), 0..400), begins: bool) {
        if begins {
            bytes.splice(0..0, MAGIC);
        }
        let _ = History::read(&bytes);
    }

    #[test]
    fn a_damaged_file_is_read_without_what_is_damaged(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut disk = Disk::new(shape(2, 2));
        for step in 1..=40 {
            disk.add(&span(BEGAN + step * 10_000, Some(1.0), disk.rings.shape()));
        }
        for (at, byte) in damage {
            let at = at.index(disk.bytes.len());
            disk.bytes[at] = byte;
        }
        disk.bytes.truncate(keep.index(disk.bytes.len()) + 1);
        if let Ok(history) = History::read(&disk.bytes) {
            let curves = history.curves(None, None, 100);
            prop_assert!(curves.at.is_sorted());
            prop_assert!(history.bounds().is_none_or(|(first, last)| first >= BEGAN && last <= BEGAN + 400_000));
        }
    }
}
