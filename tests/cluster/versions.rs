//! What other versions of the program have left. `tests/fixtures/versions` has, for each version, the
//! run directories of a cluster that was taken down after a worker had died (`old`), and of one
//! whose supervisor and guardian were killed (`vanished`).

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::sandbox::Sandbox;

/// The folders of all versions.
fn versions() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/versions");
    let all = fs::read_dir(all).expect("fixtures").map(|entry| entry.expect("an entry").path());
    all.collect()
}

fn copy(from: &Path, to: &Path) {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(to).expect("made");
    for entry in fs::read_dir(from).expect("a folder") {
        let from = entry.expect("an entry").path();
        let to = to.join(from.file_name().expect("a name"));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("copied");
        }
    }
}

/// Replaces a text in a file.
fn change(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).expect("read");
    assert!(text.contains(from), "{from}: {text}");
    fs::write(path, text.replacen(from, to, 1)).expect("written");
}

#[test]
fn what_every_version_has_left_is_read() {
    for version in versions() {
        let sandbox = Sandbox::new();
        for name in ["old", "vanished"] {
            copy(&version.join(name), &sandbox.base().join(name));
        }
        let said = |arguments: &[&str], words: &[&str]| {
            let said = sandbox.run(arguments);
            assert_eq!(said.code, 0, "{}: {said}", version.display());
            for word in words {
                assert!(said.stdout.contains(word), "{word}: {}: {said}", version.display());
            }
            said.stdout
        };
        let causes = ["old: stopped at 2", "vanished: failed", "ended without a word", "gpu1"];
        said(&["ps", "-a"], &causes);
        said(&["ps", "-a", "-o", "json"], &["\"restarts\""]);
        said(&["logs", "old", "gpu1"], &["ready peers=1"]);
        let events = said(&["events", "old"], &["gpu1: was ended by signal 9", "cluster: stopped"]);
        let file = fs::read_to_string(version.join("old/events.jsonl")).expect("events");
        assert_eq!(events.lines().count(), file.lines().count(), "none is left out: {events}");
        assert!(!events.contains('{'), "each is told in words: {events}");
        let old = |file: &str| version.join("old").join(file).display().to_string();
        let (plan, topology) = (old("plan.json"), old("topology.json"));
        said(&["topo", "--topology", &topology], &["GPU1"]);
        said(&["plan", "--topology", &topology], &["gpu1"]);
        said(&["up", "--plan", &plan, "--name", "again", "--detach"], &["gpu1"]);
        said(&["down", "again"], &[]);
        said(&["down", "--all"], &[]);
    }
}

#[test]
fn what_a_later_version_has_left_is_said_to_be_so() {
    let sandbox = Sandbox::new();
    let newest = versions().into_iter().max().expect("a version");
    let later = sandbox.base().join("later");
    copy(&newest.join("old"), &later);
    change(&later.join("state.json"), "\"version\":1", "\"version\":9");
    change(&later.join("plan.json"), "\"version\": 2", "\"version\": 9");
    change(&later.join("topology.json"), "\"version\":1", "\"version\":9");
    let levitated = r#"{"at":"2026-11-23T13:36:50.951Z","process":"gpu0","event":"levitated"}"#;
    change(&later.join("events.jsonl"), "\n", &format!("\n{levitated}\n"));
    let said = sandbox.run(&["ps", "-a"]);
    let words = "later: ended; its last state is unreadable: it has version 9, and this program \
                 reads version 1";
    assert!(said.code == 0 && said.stdout.contains(words), "{said}");
    let said = sandbox.run(&["events", "later"]);
    assert!(said.code == 0 && said.stdout.contains(levitated), "{said}");
    let of = |file: &str| later.join(file).display().to_string();
    for (arguments, words) in [
        (["up", "--plan", &of("plan.json")], "version 9 is not 2, which this program reads"),
        (["topo", "--topology", &of("topology.json")], "version: 9 is not supported"),
    ] {
        let said = sandbox.run(&arguments);
        assert!(said.code == 2 && said.stderr.contains(words), "{said}");
    }
}
