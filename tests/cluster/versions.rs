//! What other versions of the program have left. `tests/fixtures/versions` has, for each version, the
//! run directories of a cluster that was taken down after a worker had died (`old`), and of one
//! whose supervisor and guardian were killed (`vanished`); what the latter's supervisor would answer
//! is there, too.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use nix::fcntl::{Flock, FlockArg};

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

const LEVITATED: &str = r#"{"at":"2026-11-23T13:36:50.951Z","process":"gpu0","event":"levitated"}"#;

/// Stands in for the supervisor of a version: holds the run directory's lock, and answers with its
/// files until it is asked to stop. `state` changes what it says of the cluster; `None` is a version
/// that does not have this request.
fn supervisor(live: &Path, state: impl Fn(String) -> Option<String>) -> JoinHandle<()> {
    let read = |file: &str| fs::read_to_string(live.join(file)).expect("read");
    let state = state(read("state.json").replacen("vanished", "live", 1));
    let (plan, last) = (read("plan.json"), read("events.jsonl"));
    let ended = r#"{"at":"2026-11-23T13:36:51Z","process":null,"event":"cluster","state":"stopped","cause":null}"#;
    let first = last.lines().next().expect("an event").to_owned();
    let events = format!("data: {first}\n\ndata: {LEVITATED}\n\ndata: {ended}\n\n");
    let directory = fs::File::open(live).expect("a directory");
    let lock = Flock::lock(directory, FlockArg::LockExclusiveNonblock).expect("nobody has it");
    let listener = UnixListener::bind(live.join("control.sock")).expect("a socket");
    std::thread::spawn(move || {
        let lock = lock;
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let head = BufReader::new(&stream).lines().map_while(Result::ok);
            let head: Vec<String> = head.take_while(|line| !line.is_empty()).collect();
            let Some(asked) = head.first().and_then(|line| line.split([' ', '?']).nth(1)) else {
                continue;
            };
            let body = match asked {
                "/v1/state" => state.as_deref(),
                "/v1/plan" => Some(plan.as_str()),
                "/v1/events" => Some(events.as_str()),
                "/health" | "/v1/stop" => Some("{}"),
                _ => None,
            };
            let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
            let body = body.unwrap_or_default();
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
            );
            // Who only looks whether somebody is there hangs up.
            let _ = stream.write_all(answer.as_bytes());
            if asked == "/v1/stop" {
                break;
            }
        }
        drop(lock);
    })
}

/// A change to what a supervisor says of its cluster.
type Change = fn(String) -> Option<String>;

#[test]
fn a_cluster_that_another_version_runs_is_read_or_said_to_be_another_versions() {
    // What `ps` says: of the cluster, or why it cannot.
    let same: Change = Some;
    let more: Change = |state| {
        let state = state.replace("\"deaths_at_work\":1,", "\"levitates\":[1],");
        Some(state.replacen("\"version\":1,", "\"version\":1,\"levitation\":{\"m\":3},", 1))
    };
    let phase: Change = |state| Some(state.replacen("\"ready\",\"sup", "\"levitates\",\"sup", 1));
    let less: Change = |state| Some(state.replacen("\"containment\":\"cgroup\",", "", 1));
    let later: Change = |state| Some(state.replacen("\"version\":1", "\"version\":9", 1));
    let none: Change = |_| None;
    for (change, unread) in [
        (same, None),
        (more, None),
        (phase, Some("unknown variant `levitates`")),
        (less, Some("missing field `containment`")),
        (later, Some("it has version 9, and this program reads version 1")),
        (none, Some("it does not know this request")),
    ] {
        for version in versions() {
            let sandbox = Sandbox::new();
            let live = sandbox.base().join("live");
            copy(&version.join("vanished"), &live);
            let supervisor = supervisor(&live, change);
            for form in ["table", "wide", "json"] {
                let said = sandbox.run(&["ps", "live", "-o", form]);
                match unread {
                    None => assert!(said.code == 0 && said.stdout.contains("gpu1"), "{said}"),
                    Some(why) => {
                        let whose = "the supervisor is of another version of this program";
                        assert!(said.code == 1 && said.stderr.contains(whose), "{said}");
                        assert!(said.stderr.contains(why), "{why}: {said}");
                        let hint = "hint: use the version that started the cluster";
                        assert!(said.stderr.contains(hint), "{said}");
                    }
                }
            }
            let said = sandbox.run(&["logs", "live", "gpu1"]);
            assert!(said.code == 0 && said.stdout.contains("ready peers=1"), "{said}");
            let said = sandbox.run(&["events", "live", "--follow"]);
            assert!(said.code == 0 && said.stdout.contains(LEVITATED), "{said}");
            assert!(said.stdout.contains("cluster: stopped"), "{said}");
            let said = sandbox.run(&["scale", "live", "1"]);
            let words = "of another version of this program; /v1/scale?workers=1: it does not know";
            assert!(said.code == 1 && said.stderr.contains(words), "{said}");
            let said = sandbox.run(&["verify", "live"]);
            assert!(said.code == 1 && said.stderr.contains("error: "), "{said}");
            let said = sandbox.run(&["down", "live"]);
            assert!(said.code == 0 && said.stderr.contains("live is down"), "{said}");
            supervisor.join().expect("it was asked to stop");
        }
    }
}
