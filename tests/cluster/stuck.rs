//! What `why` says of tasks of the native engine that do not end, and of what waits for them.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use cuda_cluster::cluster::{Client, Remote};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::sandbox::{Sandbox, eventually};

/// A cluster of two workers that run the functions of `tests/programs/stuck.rs`.
struct Stuck {
    sandbox: Sandbox,
    client: Client,
}

impl Stuck {
    fn start() -> Self {
        let sandbox = Sandbox::new();
        let program =
            Path::new(env!("CARGO_BIN_EXE_cuda-cluster")).with_file_name("examples/stuck");
        let folder = tempfile::tempdir().expect("a directory");
        symlink(program, folder.path().join("worker")).expect("a link");
        let file = folder.path().join("cluster.yaml");
        let spec = "version: 1\nname: stuck\nnative: {program: ./worker}\n";
        std::fs::write(&file, spec).expect("written");
        let machine = ["--topology", "dgx-1-v100", "--simulate", "--gpus", "0,1", "--detach"];
        let up = ["up", "-f", file.to_str().expect("text")];
        let up = sandbox.run(&[&up[..], &machine[..]].concat());
        assert_eq!(up.code, 0, "{up}");
        let client = Client::connect(&sandbox.base().join("stuck")).expect("it answers");
        Self { sandbox, client }
    }

    /// Tasks of which each waits for the one before, the first one running this on `gpu1`.
    fn chain(&self, function: &str, length: usize) -> Vec<Remote> {
        let first = self.client.task(function).on("gpu1").submit().expect("submitted");
        let mut all = vec![first];
        while all.len() < length {
            let last = all.last().expect("one");
            all.push(self.client.submit("next", &(), &[last]).expect("submitted"));
        }
        all
    }

    fn why(&self) -> (i32, Value) {
        let said = self.sandbox.run(&["why", "stuck", "-o", "json"]);
        (said.code, serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said}")))
    }

    /// The verdict, once it has this standing and this cause.
    fn until(&self, standing: &str, cause: &str) -> (i32, Value) {
        let mut last = (0, Value::Null);
        let is_so = |told: &Value| told["standing"] == standing && told["cause"] == cause;
        eventually("it is told", Duration::from_secs(90), || {
            let (code, told) = self.why();
            last = (code, told["verdict"].clone());
            is_so(&last.1)
        });
        last
    }

    fn end(self) {
        drop(self.client);
        // A task that does not return ends with its process.
        assert_eq!(self.sandbox.run(&["down", "stuck"]).code, 0);
        self.sandbox.assert_nothing_is_left();
    }
}

/// Why it is not seen what the tasks of a process do.
fn unseen<'a>(told: &'a Value, name: &str) -> Option<&'a str> {
    let all = told["evidence"]["unseen"].as_array()?;
    let found = all.iter().find(|one| one["what"] == format!("tasks of {name}"));
    found?["why"].as_str()
}

fn text(verdict: &Value) -> &str {
    verdict["text"].as_str().expect("a sentence")
}

#[test]
fn a_native_task_that_sleeps_is_named_with_its_function_and_those_that_wait_for_it() {
    let stuck = Stuck::start();
    let (code, told) = stuck.why();
    assert_eq!((code, &told["verdict"]["standing"]), (0, &Value::from("idle")), "{told}");
    let tasks = stuck.chain("sleep_long", 6);
    let (code, verdict) = stuck.until("stalled", "sleeps");
    assert_eq!((code, &verdict["odd"]), (5, &serde_json::json!(["gpu1"])), "{verdict}");
    assert_eq!(verdict["groups"][0]["condition"]["place"], "sleep_long", "{verdict}");
    let named = format!("task {} (sleep_long) has run on gpu1 for ", tasks[0].id());
    assert!(text(&verdict).contains(&named), "{verdict}");
    assert!(text(&verdict).ends_with(", and 5 others wait for it"), "{verdict}");
    drop(tasks);
    stuck.end();
}

#[test]
fn a_native_task_that_waits_for_nobody_is_named_and_one_that_computes_is_no_stall() {
    let stuck = Stuck::start();
    let waits = stuck.chain("wait_for_nobody", 2);
    let (code, verdict) = stuck.until("stalled", "lock");
    assert_eq!((code, &verdict["odd"]), (5, &serde_json::json!(["gpu1"])), "{verdict}");
    assert!(text(&verdict).contains("has a task that waits for a lock"), "{verdict}");
    assert!(text(&verdict).contains(" (wait_for_nobody), for "), "{verdict}");
    assert!(text(&verdict).ends_with(", and 1 other waits for it"), "{verdict}");
    let computes = stuck.client.task("compute").on("gpu0").submit().expect("submitted");
    let (code, verdict) = stuck.until("working", "works");
    // On a machine with much to do a thread of gpu1 may be about to run, which could end its wait.
    let odd = verdict["odd"].as_array().expect("a list");
    assert!(code == 0 && odd.contains(&"gpu0".into()), "{verdict}");
    assert!(text(&verdict).contains(" (compute) has run on gpu0 for "), "{verdict}");
    drop((waits, computes));
    stuck.end();
}

#[test]
fn a_worker_that_is_stopped_is_told_of_with_the_task_and_the_data_that_it_has() {
    let stuck = Stuck::start();
    // So little goes through UCX: its owner has to be asked.
    let data = stuck.client.task("matrix.chunk").on("gpu1");
    let data = data.arguments(&(1u64, 0u64, 0u64, 64u64)).submit().expect("submitted");
    data.wait().expect("computed");
    let tasks = stuck.chain("sleep_long", 2);
    eventually("it runs", Duration::from_secs(60), || {
        stuck.why().1["evidence"]["tasks"]["placed"][0]["runs"] == true
    });
    let pid = stuck.sandbox.state("stuck")["workers"][1]["pid"].as_u64().expect("it runs");
    stuck.sandbox.signal(pid, Signal::SIGSTOP);
    let (_, verdict) = stuck.until("stalled", "stopped");
    let named = format!("task {} (sleep_long) has been with gpu1 for ", tasks[0].id());
    assert!(text(&verdict).contains(&named), "{verdict}");
    let (_, told) = stuck.why();
    let unseen = told["evidence"]["unseen"].to_string();
    assert!(unseen.contains("tasks of gpu1") && unseen.contains("was not asked"), "{unseen}");
    let wants = stuck.client.task("next").inputs(&[&data]).on("gpu0").submit().expect("submitted");
    let fetched = format!("gpu0 has been fetching object {} from gpu1 for ", data.id());
    let mut last = String::new();
    eventually("its data is waited for", Duration::from_secs(60), || {
        last = text(&stuck.why().1["verdict"]).to_owned();
        last.contains(&fetched)
    });
    assert!(last.contains(", for which 1 task waits there"), "{last}");
    stuck.sandbox.signal(pid, Signal::SIGCONT);
    drop((tasks, data, wants));
    stuck.end();
}

#[test]
fn workers_whose_scheduler_is_stopped_could_not_be_asked() {
    let stuck = Stuck::start();
    let pid = stuck.sandbox.state("stuck")["scheduler"]["pid"].as_u64().expect("it runs");
    stuck.sandbox.signal(pid, Signal::SIGSTOP);
    let (_, told) = stuck.why();
    let why = "it does not run now, so it was not asked";
    assert_eq!(unseen(&told, "scheduler"), Some(why), "{told}");
    let why = "it could not be asked: workers are asked through the scheduler, which does not run \
               now";
    for worker in ["gpu0", "gpu1"] {
        assert_eq!(unseen(&told, worker), Some(why), "{told}");
    }
    stuck.sandbox.signal(pid, Signal::SIGCONT);
    let (_, told) = stuck.why();
    assert_eq!(unseen(&told, "gpu0"), None, "{told}");
    stuck.end();
}
