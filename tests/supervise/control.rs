//! The control API and the run directory's permissions.

use crate::bench;
use crate::skip;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::bench::{Bench, eventually, launch, request, told_state, until};
use cuda_cluster::supervise::{ClusterPhase, ProcessPhase};

fn curl(socket: &Path, arguments: &[&str]) -> String {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--max-time", "10", "--unix-socket"]);
    let output = curl.arg(socket).args(arguments).output().expect("curl");
    String::from_utf8(output.stdout).expect("text") + &String::from_utf8_lossy(&output.stderr)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_drives_a_cluster_from_its_state_to_its_end() {
    let bench = Bench::new();
    let supervisor = bench.start(launch("curl", &["print=hello ready", "ready", "ready"])).await;
    supervisor.ready().await.expect("READY");
    let run_directory = bench.file("curl");
    let socket = run_directory.join("control.sock");

    let state: serde_json::Value =
        serde_json::from_str(&curl(&socket, &["http://cluster/v1/state"])).expect("JSON");
    for key in ["name", "engine", "state", "scheduler", "workers"] {
        assert!(state.get(key).is_some(), "{key} in {state}");
    }
    for key in
        ["name", "pid", "state", "restarts", "gpu", "cpus", "mems", "containment", "last_exit"]
    {
        assert!(state["workers"][0].get(key).is_some(), "{key} in {}", state["workers"][0]);
    }
    assert_eq!(state["state"], "ready");
    let wide = curl(&socket, &["http://cluster/v1/state?wide=true"]);
    let wide: serde_json::Value = serde_json::from_str(&wide).expect("JSON");
    assert_eq!(wide["workers"][0]["observed"]["threads_outside"], 0);
    assert!(wide["workers"][0]["resident_bytes"].as_u64().is_some_and(|bytes| bytes > 0));

    assert_eq!(curl(&socket, &["http://cluster/health"]), "{\"state\":\"ready\"}");
    let metrics = curl(&socket, &["http://cluster/metrics"]);
    assert!(metrics.contains("cuda_cluster_ready{cluster=\"curl\"} 1\n"), "{metrics}");
    let logs = curl(&socket, &["http://cluster/v1/logs?process=gpu0&tail=5"]);
    assert!(logs.contains("\"text\":\"hello\""), "{logs}");
    assert!(curl(&socket, &["http://cluster/v1/logs?process=../x"]).contains("no process"));

    let mut follow = Command::new("curl");
    follow.args(["--silent", "--no-buffer", "--unix-socket"]).arg(&socket);
    follow.arg("http://cluster/v1/events").stdout(Stdio::piped());
    let mut follower = follow.spawn().expect("curl");
    // The stream has begun once its listener is counted.
    eventually("a listener", || {
        std::fs::read_to_string(format!("/proc/{}/net/unix", follower.id())).is_ok_and(|text| {
            text.lines().filter(|line| line.ends_with("curl/control.sock")).count() > 1
        })
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;

    let restart = ["-X", "POST", "http://cluster/v1/restart/gpu1"];
    assert_eq!(curl(&socket, &restart), "");
    let back = |s: &cuda_cluster::supervise::ClusterState| {
        s.workers[1].restarts == 1 && s.state == ClusterPhase::Ready
    };
    until(&supervisor, "gpu1 is back", back).await;
    let unknown = curl(&socket, &["-X", "POST", "http://cluster/v1/restart/gpu9"]);
    assert_eq!(unknown, "there is no process \"gpu9\"; there are gpu0, gpu1, gpu2\n");

    assert_eq!(curl(&socket, &["-X", "POST", "http://cluster/v1/scale?workers=1"]), "");
    until(&supervisor, "one worker", |state| {
        state.workers[1..].iter().all(|worker| worker.state == ProcessPhase::Stopped)
    })
    .await;
    let many = curl(&socket, &["-X", "POST", "http://cluster/v1/scale?workers=4"]);
    assert_eq!(many, "4 workers are wanted, 3 are planned\n");

    assert_eq!(curl(&socket, &["-X", "POST", "http://cluster/v1/stop?how=graceful"]), "");
    assert!(supervisor.wait().await.is_good());
    follower.kill().ok();
    let events = follower.wait_with_output().expect("its output").stdout;
    let events = String::from_utf8(events).expect("text");
    for event in ["\"event\":\"exited\"", "\"event\":\"ready\"", "\"process\":\"gpu1\""] {
        assert!(events.contains(event), "{event} in {events}");
    }
    assert!(!run_directory.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_else_gets_in() {
    let bench = Bench::new();
    let supervisor = bench.start(launch("private", &["ready"])).await;
    supervisor.ready().await.expect("READY");
    let run_directory = bench.file("private");
    let socket = run_directory.join("control.sock");
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode(&run_directory), mode(&socket)), (0o700, 0o600));
    assert_eq!(mode(&run_directory.join("events.jsonl")), 0o600);

    if !nix::unistd::Uid::effective().is_root() {
        skip::skip("root", "only root can be a second user");
        return;
    }
    let as_nobody = || {
        let mut curl = Command::new("setpriv");
        curl.args(["--reuid", "65534", "--clear-groups", "curl", "--silent", "--max-time", "5"]);
        curl.arg("--unix-socket").arg(&socket).arg("http://cluster/v1/state");
        curl.output().expect("setpriv and curl")
    };
    // The directory keeps a second user out; if it were open, the check of the peer's credentials
    // would.
    assert!(!as_nobody().status.success());
    for path in [bench.folder.path(), &run_directory, &socket] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("opened");
    }
    let answer = as_nobody();
    assert!(!answer.status.success() && answer.stdout.is_empty(), "{answer:?}");
    assert_eq!(request(&socket, "GET", "/health").expect("an answer").0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_directory_that_was_taken_away_comes_back() {
    let bench = Bench::new();
    let mut talkative = launch("away", &["chatter=20 ready"]);
    talkative.supervision.log_rotate_bytes = 4096;
    let directory = bench.acquire("away");
    directory.write_private(&directory.paths().plan(), b"{\"a\":1}").expect("written");
    let paths = directory.paths().clone();
    let supervisor =
        cuda_cluster::supervise::Supervisor::start(talkative, directory, bench::options())
            .await
            .expect("a supervisor");
    supervisor.ready().await.expect("READY");
    // The log's writer may create a file in it while it is being removed.
    let busy = |error: std::io::Error| error.kind() == std::io::ErrorKind::DirectoryNotEmpty;
    while std::fs::remove_dir_all(paths.root()).is_err_and(busy) {}
    eventually("it is back", || told_state(paths.root()).is_some()).await;
    assert_eq!(request(&paths.control(), "GET", "/v1/plan").expect("told").1, "{\"a\":1}");
    assert!(paths.is_alive());
    eventually("its log too", || paths.log("gpu0").exists()).await;
    let recorded = || std::fs::read_to_string(paths.events()).expect("there again");
    let note = "the run directory was removed, and was made again";
    eventually("it is recorded", || recorded().contains(note)).await;
    let state = supervisor.state().borrow().clone();
    assert!(state.notes.is_empty(), "it holds no longer: {:?}", state.notes);
    supervisor.stop(cuda_cluster::supervise::Escalation::Graceful);
    assert!(supervisor.wait().await.is_good());
    assert!(!paths.root().exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_directory_whose_name_was_taken_comes_back_when_that_is_free() {
    let bench = Bench::new();
    let directory = bench.acquire("name");
    let paths = directory.paths().clone();
    let start = cuda_cluster::supervise::Supervisor::start;
    let supervisor =
        start(launch("name", &["ready"]), directory, bench::options()).await.expect("a supervisor");
    supervisor.ready().await.expect("READY");
    // With its parent, as a log-out does it; and another cluster of this name is the first to come.
    let base = paths.root().parent().expect("a parent");
    std::fs::rename(base, base.with_extension("old")).expect("moved");
    std::fs::remove_dir_all(base.with_extension("old")).expect("removed");
    std::fs::DirBuilder::new().mode(0o700).create(base).expect("a folder");
    let other = bench.acquire("name");
    let notes = || supervisor.state().borrow().notes.clone();
    let taken = |note: &String| note.contains("is not back") && note.contains("already running");
    eventually("it says that the name is taken", || notes().iter().any(taken)).await;
    assert!(told_state(paths.root()).is_none(), "it does not touch what is another's");
    other.remove().expect("removed");
    eventually("it is back", || told_state(paths.root()).is_some()).await;
    eventually("and says so no longer", || notes().is_empty()).await;
    let recorded = std::fs::read_to_string(paths.events()).expect("there again");
    assert!(recorded.contains("and was made again"), "{recorded}");
    supervisor.stop(cuda_cluster::supervise::Escalation::Graceful);
    assert!(supervisor.wait().await.is_good());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_directory_that_is_renamed_or_damaged_is_as_it_was() {
    let bench = Bench::new();
    let directory = bench.acquire("moved");
    let paths = directory.paths().clone();
    directory.write_private(&paths.plan(), b"{\"a\":1}").expect("written");
    let supervisor = cuda_cluster::supervise::Supervisor::start(
        launch("moved", &["ready"]),
        directory,
        bench::options(),
    )
    .await
    .expect("a supervisor");
    supervisor.ready().await.expect("READY");
    let recorded = || std::fs::read_to_string(paths.events()).unwrap_or_default();
    let before = recorded();
    assert!(before.contains("started"), "{before}");

    let elsewhere = paths.root().with_file_name("elsewhere");
    std::fs::rename(paths.root(), &elsewhere).expect("renamed");
    eventually("it has its name again", || paths.root().exists()).await;
    assert!(!elsewhere.exists() && paths.is_alive());
    let note = format!("was renamed to {}, and has its name again", elsewhere.display());
    eventually("it is recorded", || recorded().contains(&note)).await;

    let plan = || std::fs::read_to_string(paths.plan()).unwrap_or_default();
    for (damage, to) in [("cut", Some("{\"a\"")), ("other", Some("{}")), ("gone", None)] {
        match to {
            Some(text) => std::fs::write(paths.plan(), text).expect("written"),
            None => std::fs::remove_file(paths.plan()).expect("removed"),
        }
        eventually(damage, || plan() == "{\"a\":1}").await;
    }
    eventually("told", || recorded().contains("plan.json of the run directory was changed")).await;
    assert!(recorded().starts_with(&before), "nothing of the record is lost: {}", recorded());
    let state = supervisor.state().borrow().clone();
    assert!(state.notes.is_empty(), "it is as it was: {:?}", state.notes);
    supervisor.stop(cuda_cluster::supervise::Escalation::Graceful);
    assert!(supervisor.wait().await.is_good());
    assert!(!paths.root().exists());
}
