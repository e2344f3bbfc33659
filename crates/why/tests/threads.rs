//! Every log that people asked about: the channels that a person reads from it, and the cause that
//! its thread found.
#![allow(clippy::print_stdout, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cuda_cluster_why::wires::{Channel, read};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thread {
    source: String,
    kind: Kind,
    text: String,
    channels: Vec<Channel>,
    stated: String,
    cause: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Nccl,
    Ras,
    Ucx,
}

/// Threads, written before there was a reader, and after; and what we have made UCX say ourselves.
const TIMES: [&str; 3] = ["before", "after", "own"];

fn folder(time: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/threads").join(time)
}

fn threads(time: &str) -> Vec<Thread> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder(time))
        .into_iter()
        .flatten()
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "yaml"))
        .collect();
    files.sort();
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).expect("it can be read");
        let threads: Vec<Thread> = serde_yaml::from_str(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        threads
    };
    files.iter().flat_map(read).collect()
}

/// The first cause that is read, as the word of the list.
fn first_cause(text: &str) -> String {
    let wires = read(text);
    let Some(found) = wires.causes.first() else { return "none".to_owned() };
    let value = serde_json::to_value(found.cause).expect("it has a text form");
    value.as_str().expect("a word").to_owned()
}

#[test]
fn the_channels_are_those_that_a_person_reads() {
    let mut wrong = Vec::new();
    let mut stated = 0;
    for thread in TIMES.into_iter().flat_map(threads) {
        let expected: BTreeSet<Channel> = thread.channels.into_iter().collect();
        let found: BTreeSet<Channel> = read(&thread.text).channels.into_iter().collect();
        stated += usize::from(!expected.is_empty());
        if found != expected {
            wrong.push(format!("{}: {found:#?} instead of {expected:#?}", thread.source));
        }
    }
    println!("channels: {stated} logs with some");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_cause_is_the_one_that_the_thread_found() {
    let (mut right, mut all) = (0, 0);
    for time in TIMES {
        let threads = threads(time);
        let of_time = threads.len();
        let mut missed = Vec::new();
        for thread in threads {
            let found = first_cause(&thread.text);
            if found != thread.cause {
                let Thread { source, kind, cause, stated, .. } = thread;
                missed.push(format!("{source} ({kind:?}): {found} instead of {cause}: {stated}"));
            }
        }
        println!("{time}: {} of {of_time}", of_time - missed.len());
        missed.iter().for_each(|one| println!("  missed: {one}"));
        right += of_time - missed.len();
        all += of_time;
    }
    assert!(all >= 62, "there are {all} logs");
    assert!(right * 60 >= all * 50, "{right} of {all}");
}

#[test]
fn nobody_is_accused_whose_wires_are_well() {
    for thread in TIMES.into_iter().flat_map(threads) {
        if thread.cause == "none" {
            let causes = read(&thread.text).causes;
            assert_eq!(causes, [], "{}: {}", thread.source, thread.stated);
        }
    }
}

#[test]
fn none_of_their_lines_is_a_riddle() {
    for thread in TIMES.into_iter().flat_map(threads) {
        let wires = read(&thread.text);
        assert!(wires.any() || !wires.causes.is_empty(), "{}", thread.source);
    }
}
