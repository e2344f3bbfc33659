//! Laws of counting and folding, and what a damaged file becomes.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::history::tests::Disk;

const BEGAN: u64 = 1_800_000_000_000;

fn names(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("gpu{at}")).collect()
}

/// A file about so many workers.
fn disk(workers: usize) -> Disk<Shape> {
    Disk::new(Shape::new(names(workers)))
}

/// Every worker has received so much from every other.
fn all_to_all(at: u64, ms: u32, workers: u16, bytes: u64) -> Span {
    let of = |from| (0..workers).filter(move |to| *to != from).map(move |to| (from, to));
    let pair = |(from, to)| Pair { from, to, bytes, highest: 7.0 };
    Span { at, ms, pairs: (0..workers).flat_map(of).map(pair).collect() }
}

fn flow<'a>(flows: &'a Flows, from: &str, to: &str) -> Option<&'a Flow> {
    flows.pairs.iter().find(|flow| flow.from == from && flow.to == to)
}

fn total(flows: &Flows) -> u64 {
    flows.pairs.iter().map(|flow| flow.bytes).sum()
}

#[test]
fn all_bytes_of_days_are_told_once_and_the_file_does_not_grow() {
    let mut disk = disk(3);
    let full = disk.rings.shape().bytes();
    let steps: u64 = 3 * 24 * 120;
    for step in 1..=steps {
        disk.add(&all_to_all(BEGAN + step * 30_000, 30_000, 3, step));
        assert!(disk.bytes.len() as u64 <= full);
    }
    let flows = disk.read().flows(None, None);
    assert_eq!((flows.since, flows.until), (Some(BEGAN), Some(BEGAN + steps * 30_000)));
    assert_eq!(flows.pairs.len(), 6);
    let bytes = steps * (steps + 1) / 2;
    assert!(flows.pairs.iter().all(|flow| flow.bytes == bytes), "{flows:?}");
    let hour = disk.read().flows(Some(BEGAN + (steps - 120) * 30_000), None);
    assert_eq!(flow(&hour, "gpu0", "gpu2").map(|flow| flow.bytes), Some(120 * steps - 119 * 60));
}

#[test]
fn a_part_of_a_span_has_a_part_of_its_bytes_and_no_mean_is_above_its_highest() {
    let mut disk = disk(2);
    let pair = Pair { from: 0, to: 1, bytes: 30_000, highest: 1000.0 };
    disk.add(&Span { at: BEGAN, ms: 30_000, pairs: vec![pair] });
    disk.add(&Span { at: BEGAN + 10_000, ms: 10_000, pairs: vec![pair] });
    let read = disk.read();
    let flows = read.flows(Some(BEGAN - 10_000), Some(BEGAN));
    let expected = Flow {
        from: "gpu0".to_owned(),
        to: "gpu1".to_owned(),
        bytes: 10_000,
        mean_bytes_per_s: 1000,
        highest_bytes_per_s: 1000,
    };
    assert_eq!(flows.pairs, [expected]);
    let late = read.flows(Some(BEGAN), None);
    assert_eq!(late.pairs[0].bytes, 30_000);
    assert_eq!(late.pairs[0].mean_bytes_per_s, 1000, "they were not received in ten seconds");
    assert_eq!(read.flows(Some(BEGAN + 20_000), None), Flows::default());
}

#[test]
fn a_file_stays_in_its_budget_however_many_workers_there_are() {
    for workers in [0, 1, 2, 8, 72, 100, 128, 1000] {
        let shape = Shape::new(names(workers));
        let header = shape.header().len() as u64;
        assert!(shape.bytes() <= BUDGET + header, "{workers}: {}", shape.bytes());
        assert!(shape.levels.iter().all(|level| level.slots > 0));
    }
    let long = |workers| {
        cuda_cluster_model::units::HumanBytes(Shape::new(names(workers)).bytes()).to_string()
    };
    // As the README says.
    assert_eq!([2, 8, 100].map(long), ["122.5 KiB", "2.3 MiB", "4.0 MiB"]);
}

#[test]
fn of_a_hundred_workers_the_last_spans_are_whole() {
    let mut disk = disk(100);
    for step in 1..=20 {
        disk.add(&all_to_all(BEGAN + step * 30_000, 30_000, 100, 5));
    }
    let flows = disk.read().flows(Some(BEGAN + 18 * 30_000), None);
    assert_eq!(flows.pairs.len(), 9900);
    assert_eq!(total(&flows), 2 * 5 * 9900);
    assert!(disk.bytes.len() as u64 <= BUDGET + 100_000);
}

#[test]
fn of_more_pairs_than_a_ring_has_room_for_the_busiest_are_kept() {
    let mut disk = disk(300);
    let mut span = all_to_all(BEGAN, 30_000, 300, 5);
    for pair in span.pairs.iter_mut().filter(|pair| pair.from == 299) {
        pair.bytes = 500;
    }
    disk.add(&span);
    let flows = disk.read().flows(None, None);
    assert!(flows.pairs.len() > 19_000);
    assert!(flows.pairs[..299].iter().all(|flow| flow.from == "gpu299" && flow.bytes == 500));
}

#[test]
fn a_span_of_which_a_record_is_damaged_is_left_out_whole() {
    let mut disk = disk(8);
    for step in 0..3 {
        disk.add(&all_to_all(BEGAN + step * 30_000, 30_000, 8, 1));
    }
    assert_eq!(total(&disk.read().flows(None, None)), 3 * 56);
    let record = disk.rings.shape().record_bytes();
    // The third of four records of the second span.
    let place = disk.rings.header().len() + 6 * record;
    disk.bytes[place + record / 2] ^= 1;
    assert_eq!(total(&disk.read().flows(None, None)), 2 * 56);
    disk.bytes.truncate(place);
    assert_eq!(total(&disk.read().flows(None, None)), 56, "the file is cut");
    assert_eq!(disk.read().bounds(), Some((BEGAN - 30_000, BEGAN)));
}

#[test]
fn what_is_no_history_or_of_another_version_is_said() {
    let told = |bytes: &[u8]| History::read(bytes).expect_err("an error").to_string();
    assert_eq!(told(b""), "this is no history of a cluster");
    let other = super::super::Shape::new(names(2), Vec::new());
    assert_eq!(told(&other.header()), "this is no history of a cluster", "but of processes");
    let shape = Shape::new(names(2));
    assert!(told(&shape.header()[..10]).contains("it is cut"));
    assert!(told(&Shape { version: 7, ..shape.clone() }.header()).contains("has version 7"));
    let vast = Shape { pairs_per_record: u32::MAX, ..shape };
    assert!(told(&vast.header()).contains("too much"));
}

#[test]
fn a_worker_is_known_by_its_name_and_by_all_addresses_that_it_had() {
    let mut counts = Counts::new(&names(2), BEGAN);
    counts.know("tcp://a:1", 0);
    counts.know("tcp://a:2", 0);
    let received = ["gpu0", "tcp://a:1", "tcp://a:2", "tcp://b:1", "gpu1"];
    let received: BTreeMap<String, u64> =
        received.iter().map(|name| ((*name).to_owned(), 100)).collect();
    let said = Said { pid: Some(1), at_ms: 5000, received_from: &received };
    let span = counts.since(BEGAN + 10_000, &[None, Some(said)]).expect("an answer");
    // What is unknown, and what it has from itself, is left out.
    let pair = Pair { from: 0, to: 1, bytes: 300, highest: 30.0 };
    assert_eq!(span, Span { at: BEGAN + 10_000, ms: 10_000, pairs: vec![pair] });
    assert_eq!(counts.since(BEGAN + 20_000, &[None, Some(said)]), None, "nothing new was said");
    // It is the same if its process has ended since, and another has not answered yet.
    let ended = Said { pid: None, ..said };
    assert_eq!(counts.since(BEGAN + 30_000, &[None, Some(ended)]), None);
    for address in 0..1000 {
        counts.know(&format!("tcp://c:{address}"), 0);
    }
    assert!(counts.known_addresses() <= 32, "addresses of long ago are given up");
}

/// What one worker does between two readings.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// It receives so much from another.
    Receives { from: usize, bytes: u64 },
    /// It answers.
    Answers,
    /// It ends, after its last answer or before; its successor counts from zero.
    Restarts,
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let step = prop_oneof![
        3 => (0..4usize, 1..1u64 << 40).prop_map(|(from, bytes)| Step::Receives { from, bytes }),
        3 => Just(Step::Answers),
        1 => Just(Step::Restarts),
    ];
    (0..4usize, step)
}

/// A worker as it counts.
#[derive(Clone, Debug)]
struct Worker {
    pid: u32,
    began: u64,
    received: BTreeMap<String, u64>,
    said: Option<(u64, BTreeMap<String, u64>)>,
}

proptest! {
    /// Whatever workers receive, whenever they answer and restart: the file has each byte that the
    /// supervisor was told before a reading exactly once, in the fine level and in what is folded.
    #[test]
    fn bytes_are_conserved(
        readings in prop::collection::vec((1u64..100, prop::collection::vec(step(), 0..8)), 1..150),
        cut in 0u64..2000,
    ) {
        let mut disk = disk(4);
        let mut counts = Counts::new(&names(4), BEGAN);
        let worker = |pid| Worker { pid, began: BEGAN, received: BTreeMap::new(), said: None };
        let mut workers: Vec<Worker> = (0..4).map(worker).collect();
        let (mut at, mut pids) = (BEGAN, 4);
        // What was told, by sender and receiver, and what of it each process had told before.
        let mut told: BTreeMap<(usize, usize), u64> = BTreeMap::new();
        let mut seen: Vec<BTreeMap<String, u64>> = vec![BTreeMap::new(); 4];
        for (pause, steps) in readings {
            at += pause * 10_000;
            for (number, (place, step)) in steps.into_iter().enumerate() {
                let worker = &mut workers[place];
                match step {
                    Step::Receives { from, bytes } if from != place => {
                        *worker.received.entry(format!("gpu{from}")).or_default() += bytes;
                    }
                    Step::Receives { .. } => {}
                    Step::Answers => {
                        let at_ms = at - worker.began + number as u64;
                        worker.said = Some((at_ms, worker.received.clone()));
                    }
                    Step::Restarts => {
                        pids += 1;
                        *worker = Worker { pid: pids, began: at, ..worker.clone() };
                        (worker.received, worker.said) = (BTreeMap::new(), None);
                        seen[place].clear();
                    }
                }
            }
            for (to, worker) in workers.iter().enumerate() {
                for (sender, bytes) in worker.said.iter().flat_map(|(_, received)| received) {
                    let from: usize = sender[3..].parse().expect("a number");
                    let before = seen[to].insert(sender.clone(), *bytes).unwrap_or(0);
                    *told.entry((from, to)).or_default() += bytes - before;
                }
            }
            let said: Vec<Option<Said>> = workers.iter().map(|worker| {
                let (at_ms, received_from) = worker.said.as_ref()?;
                Some(Said { pid: Some(worker.pid), at_ms: *at_ms, received_from })
            }).collect();
            if let Some(span) = counts.since(at, &said) {
                let ms = u64::from(span.ms.max(1));
                for pair in &span.pairs {
                    let mean = pair.bytes as f64 * 1000.0 / ms as f64;
                    prop_assert!(f64::from(pair.highest) <= mean * 1.0001, "{pair:?} in {ms} ms");
                    prop_assert!(pair.highest > 0.0);
                }
                disk.add(&span);
            }
        }
        let history = disk.read();
        let flows = history.flows(None, None);
        for flow in &flows.pairs {
            let place = |name: &str| name[3..].parse::<usize>().expect("a number");
            prop_assert_eq!(told.remove(&(place(&flow.from), place(&flow.to))), Some(flow.bytes));
            prop_assert!(flow.mean_bytes_per_s <= flow.highest_bytes_per_s);
        }
        prop_assert!(told.values().all(|bytes| *bytes == 0), "{:?}", told);
        // Two parts of the time have what all of it has, but for what is divided.
        if let (Some(since), Some(until)) = (flows.since, flows.until) {
            let middle = (since + cut * 10_000).min(until);
            let parts = [history.flows(None, Some(middle)), history.flows(Some(middle), None)];
            let both: u64 = parts.iter().map(total).sum();
            prop_assert!(both <= total(&flows) && both + 200 >= total(&flows));
        }
    }

    #[test]
    fn no_file_makes_a_reader_fail(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        begins: bool,
    ) {
        if begins {
            bytes.splice(0..0, MAGIC);
        }
        let _ = History::read(&bytes);
    }

    #[test]
    fn any_shape_and_any_records_are_read(
        workers in 0usize..5,
        pairs_per_record in 0u32..40,
        levels in prop::collection::vec((any::<u32>(), 0u32..200_000), 0..4),
        records in prop::collection::vec(
            (any::<u64>(), any::<u32>(), any::<[u32; 2]>(), prop::collection::vec(any::<u8>(), 0..700)),
            0..9,
        ),
        from: Option<u64>,
        to: Option<u64>,
    ) {
        let level = |(every_ms, slots)| Level { every_ms, slots };
        let levels = levels.into_iter().map(level).collect();
        let version = super::super::VERSION;
        let shape = Shape { version, workers: names(workers), pairs_per_record, levels };
        let mut bytes = shape.header();
        // Records that say that they are whole.
        for (at, ms, parts, mut body) in records {
            body.resize(shape.record_bytes() - HEAD, 0);
            let parts = parts.map(|part| part % 3).map(u32::to_le_bytes);
            let [at, ms] = [&at.to_le_bytes()[..], &ms.to_le_bytes()];
            let mut record = [at, ms, &[0; 8], parts.as_flattened(), &body].concat();
            let check = super::super::check(&record);
            record[12..20].copy_from_slice(&check);
            bytes.extend(record);
        }
        let history = History::read(&bytes).expect("its beginning is right");
        let flows = history.flows(from, to);
        prop_assert!(flows.pairs.iter().all(|flow| flow.from != flow.to));
    }

    #[test]
    fn a_damaged_file_is_read_without_what_is_damaged(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut disk = disk(6);
        for step in 1..=40 {
            disk.add(&all_to_all(BEGAN + step * 30_000, 30_000, 6, step));
        }
        let all = total(&disk.read().flows(None, None));
        for (at, byte) in damage {
            let at = at.index(disk.bytes.len());
            disk.bytes[at] = byte;
        }
        disk.bytes.truncate(keep.index(disk.bytes.len()) + 1);
        if let Ok(history) = History::read(&disk.bytes) {
            prop_assert!(total(&history.flows(None, None)) <= all);
            let within = |(first, last)| first >= BEGAN && last <= BEGAN + 1_200_000;
            prop_assert!(history.bounds().is_none_or(within));
        }
    }
}
