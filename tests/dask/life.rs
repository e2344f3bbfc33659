//! Restarts, retirement, shutdown, and the death of the supervisor, as users of a nanny expect
//! them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{down, packages, run_directory, try_up, up, worker};
use crate::python::{Story, ask};
use crate::sandbox::{Sandbox, eventually};

#[test]
fn a_clients_restart_brings_all_workers_back_and_a_retired_one_stays_away() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "again", &["--n-workers", "3"]);
    let names: Vec<String> =
        workers_of(&sandbox, "again").iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(names.len(), 3);
    let found = cluster.tell("restart");
    assert_eq!(found["workers"].as_array().map(Vec::len), Some(2), "{found}");
    let state = sandbox.state("again");
    assert_eq!(state["state"], "ready", "a retired worker is no failure: {state}");
    assert_eq!(worker(&state, "gpu2")["state"], "stopped");
    assert_eq!(worker(&state, "gpu0")["restarts"], 1);
    down(&sandbox, "again");
}

fn workers_of(sandbox: &Sandbox, name: &str) -> Vec<String> {
    let state = sandbox.state(name);
    let workers = state["workers"].as_array().expect("workers");
    workers.iter().map(|worker| worker["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_clients_shutdown_ends_the_cluster() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "over", &["--n-workers", "2"]).tell("shutdown");
    eventually("the cluster is gone", Duration::from_secs(20), || {
        sandbox.try_state("over").is_none()
    });
    sandbox.assert_nothing_is_left();
}

#[test]
#[allow(clippy::print_stderr)] // How long it took is for people; a test that times is none.
fn a_worker_that_never_lets_go_of_the_lock_dies_with_the_supervisor() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "stuck", &["--n-workers", "2"]);
    cluster.tell("hang");
    let state = sandbox.state("stuck");
    sandbox.kill(state["supervisor_pid"].as_u64().expect("a pid"));
    let killed = Instant::now();
    eventually("no process", Duration::from_secs(60), || sandbox.pids().is_empty());
    eprintln!("all gone {} ms after the supervisor was killed", killed.elapsed().as_millis());
    sandbox.assert_no_shared_memory_is_left();
}

#[test]
fn workers_come_with_the_work_and_go_without_it() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "adapt", &["--n-workers", "3", "--adapt-minimum", "1"]);
    let found = cluster.tell("adapt");
    assert_eq!(found["workers"].as_array().map(Vec::len), Some(1), "{found}");
    assert_eq!(sandbox.state("adapt")["state"], "ready", "who is not needed is no failure");
    down(&sandbox, "adapt");
}

#[test]
fn a_worker_of_age_is_replaced_and_that_is_no_failure() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    up(&sandbox, "old", &["--n-workers", "2", "--lifetime", "3s"]);
    eventually("both are replaced", Duration::from_secs(120), || {
        let state = sandbox.state("old");
        let workers = state["workers"].as_array().expect("workers");
        workers.iter().all(|worker| worker["restarts"].as_u64() >= Some(1))
    });
    assert!(!run_directory(&sandbox, "old").join("crashes").exists(), "nobody crashed");
    down(&sandbox, "old");
}

#[test]
fn a_worker_beyond_its_memory_is_ended_and_comes_back() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "full", &["--n-workers", "1", "--memory-limit", "700MB"]);
    cluster.tell("hoard");
    let state = sandbox.state("full");
    let reason = worker(&state, "gpu0")["last_exit"]["reason"].as_str().expect("a reason");
    let expected = "reached 95 % of its memory limit of 700 MB (";
    assert!(reason.starts_with(expected), "{reason}");
    assert_eq!(sandbox.run(&["down", "full"]).code, 0);
    sandbox.assert_only_the_causes_are_left("full");
}

#[test]
fn a_dead_schedulers_workers_come_back_to_the_next_one() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "headless", &["--n-workers", "2"]);
    sandbox.kill(sandbox.state("headless")["scheduler"]["pid"].as_u64().expect("a pid"));
    eventually("all are back", Duration::from_secs(120), || {
        let state = sandbox.state("headless");
        state["scheduler"]["restarts"] == 1 && state["state"] == "ready"
    });
    assert_eq!(cluster.tell("spread")["workers"], json!(["gpu0", "gpu1"]));
    assert_eq!(sandbox.run(&["down", "headless"]).code, 0);
    sandbox.assert_only_the_causes_are_left("headless");
}

#[test]
fn fewer_workers_keep_the_data_of_those_that_go() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "fewer", &["--n-workers", "3"]);
    cluster.tell("leave_data");
    assert_eq!(sandbox.run(&["scale", "fewer", "1"]).code, 0);
    let found = cluster.tell("find_data");
    let expected = json!({ "gpu0": "from gpu0", "gpu1": "from gpu1", "gpu2": "from gpu2" });
    assert_eq!(found, expected);
    down(&sandbox, "fewer");
}

#[test]
fn executed_workers_do_what_forked_ones_do() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "spawn", &["--n-workers", "2", "--start-method", "spawn"]);
    let found = cluster.tell("look");
    assert_eq!(found["workers"].as_object().map(serde_json::Map::len), Some(2), "{found}");
    down(&sandbox, "spawn");
}

/// Asks a fork server for a process, as the guardian does, and lets it begin or not.
const FORKED: &str = r#"
import json, os, signal, socket, sys, tempfile
from cuda_cluster_dask import fork_server
from cuda_cluster_fork import birth

PR_SET_CHILD_SUBREAPER = 36
birth.libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
path = os.path.join(tempfile.mkdtemp(), "fork")
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
listener.listen()
server = os.fork()
if server == 0:
    fork_server.serve(listener)
found = {}
for begins in (False, True):
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(path)
    (orders, write), (status, report), (output, log) = os.pipe(), os.pipe(), os.pipe()
    # Orders that nobody can follow: whoever tries says so.
    os.write(write, b"{}")
    question = json.dumps({"guardian": os.getpid()}).encode()
    socket.send_fds(asking, [question], [orders, report, log])
    pid = json.loads(asking.recv(1024))["pid"]
    for descriptor in (orders, write, report, log):
        os.close(descriptor)
    if begins:
        asking.send(b"{}")
    asking.close()
    _, ended = os.waitpid(pid, 0)
    said = os.read(status, 1024).decode() + os.read(output, 1024).decode()
    found["begun" if begins else "not begun"] = [os.waitstatus_to_exitcode(ended), said]
os.kill(server, signal.SIGKILL)
os.waitpid(server, 0)
os.unlink(path)
os.rmdir(os.path.dirname(path))
json.dump(found, sys.stdout)
"#;

#[test]
fn a_forked_process_does_nothing_until_the_guardian_knows_it() {
    if !packages() {
        return;
    }
    let found = ask(FORKED);
    assert_eq!(found["not begun"], json!([125, ""]), "{found}");
    assert_eq!(found["begun"][0], json!(125), "nobody could follow its orders: {found}");
    assert!(found["begun"][1].as_str().is_some_and(|said| said.contains("KeyError")), "{found}");
}

#[test]
fn two_clusters_of_workers_form_one_dask_cluster() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let first = up(&sandbox, "first", &["--gpus", "0-1"]);
    let file = run_directory(&sandbox, "first").join("scheduler.json").display().to_string();
    // A host is the workers' own, since there is no scheduler.
    let asked = ["--gpus", "0-1", "--join", &file, "--host", "127.0.0.2"];
    let said = try_up(&sandbox, "second", &asked);
    assert_eq!(said.code, 0, "{said}");
    let state = sandbox.state("second");
    assert!(state["scheduler"].is_null());
    // Without the shim's note that a process was executed and not forked.
    assert!(worker(&state, "gpu1")["notes"].as_array().is_some_and(Vec::is_empty), "{state}");
    let address = worker(&state, "gpu1")["address"].to_string();
    assert!(address.contains("127.0.0.2:"), "{state}");
    let found = first.tell("spread");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let joined = |gpu: &str| format!("{}-second-{gpu}", host.trim());
    let mut everybody = vec!["gpu0".to_owned(), "gpu1".to_owned(), joined("gpu0"), joined("gpu1")];
    everybody.sort();
    assert_eq!(found["workers"], json!(everybody));
    let guests = sandbox.state("first")["joined"].clone();
    let of = |guests: &Value, key: &str| {
        let all = guests.as_array().expect("guests").iter();
        let mut all: Vec<String> = all.map(|one| one[key].to_string().replace('"', "")).collect();
        all.sort();
        all
    };
    assert_eq!(of(&guests, "name"), [joined("gpu0"), joined("gpu1")]);
    assert_eq!(of(&guests, "cluster"), ["second", "second"]);
    assert_eq!(of(&guests, "process"), ["gpu0", "gpu1"]);
    assert_eq!(of(&guests, "host"), [host.trim(), host.trim()]);
    assert_eq!(of(&guests, "gpu"), ["0", "1"]);
    assert_eq!(of(&guests, "state"), ["ready", "ready"]);
    assert!(sandbox.state("second")["joined"].is_null(), "it has no scheduler");
    let table = sandbox.run(&["ps", "first"]).stdout;
    assert!(table.contains("JOINED") && table.contains(&joined("gpu1")), "{table}");
    assert_eq!(sandbox.run(&["down", "second"]).code, 0);
    let found = Story::of(&sandbox, "first").tell("spread");
    assert_eq!(found["workers"], json!(["gpu0", "gpu1"]));
    let guests = sandbox.state("first")["joined"].clone();
    assert_eq!(of(&guests, "state"), ["left", "left"]);
    assert_eq!(of(&guests, "reason"), ["it was retired", "it was retired"]);
    let events = sandbox.run(&["events", "first"]).stdout;
    for what in ["has joined", "has left: it was retired"] {
        assert_eq!(events.matches(what).count(), 2, "{events}");
    }
    down(&sandbox, "first");
}

#[test]
fn workers_of_a_scheduler_elsewhere_return_to_it_and_their_cluster_ends_when_it_is_gone() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    // An address of its own: on the usual one another test's scheduler may take the port.
    let host = up(&sandbox, "host", &["--gpus", "0", "--host", "127.0.0.77"]);
    let file = run_directory(&sandbox, "host").join("scheduler.json").display().to_string();
    let said = try_up(&sandbox, "guests", &["--gpus", "0-1", "--join", &file]);
    assert_eq!(said.code, 0, "{said}");
    let kill_scheduler = || {
        let scheduler = sandbox.state("host")["scheduler"]["pid"].as_i64().expect("a pid");
        let scheduler = nix::unistd::Pid::from_raw(i32::try_from(scheduler).expect("a pid"));
        nix::sys::signal::kill(scheduler, nix::sys::signal::Signal::SIGKILL).expect("it lives");
    };
    kill_scheduler();
    eventually("everybody is back", Duration::from_secs(60), || {
        let is_ready = |cluster: &str| sandbox.state(cluster)["state"] == "ready";
        let has_died = worker(&sandbox.state("guests"), "gpu1")["restarts"] != 0;
        has_died && is_ready("host") && is_ready("guests")
    });
    let names = host.tell("spread")["workers"].as_array().map(Vec::len);
    assert_eq!(names, Some(3));
    // Nobody brings this one back.
    let down = sandbox.run(&["down", "host", "--kill"]);
    assert_eq!(down.code, 0, "{down}");
    eventually("the guests have ended", Duration::from_secs(90), || {
        sandbox.try_state("guests").is_none()
    });
    let events = sandbox.run(&["events", "guests"]).stdout;
    assert!(events.contains("leaves: no scheduler at "), "{events}");
    let ended = sandbox.run(&["ps", "-a", "guests"]).stdout;
    assert!(ended.contains("failed at") && ended.contains("is lost: no scheduler at "), "{ended}");
}

#[test]
fn a_worker_whose_event_loop_hangs_is_not_ready_and_a_scheduler_that_is_stopped_neither() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "mute", &["--n-workers", "2", "--answer-within", "5s"]);
    // Long enough for each to have been asked and to have answered.
    std::thread::sleep(Duration::from_secs(6));
    let events = sandbox.run(&["events", "mute"]).stdout;
    assert!(!events.contains("not answering"), "{events}");
    let scheduler = sandbox.state("mute")["scheduler"]["pid"].as_i64().expect("a pid");
    let scheduler = nix::unistd::Pid::from_raw(i32::try_from(scheduler).expect("a pid"));
    let tell = |signal| nix::sys::signal::kill(scheduler, signal).expect("it lives");
    tell(nix::sys::signal::Signal::SIGSTOP);
    eventually("the scheduler is not READY", Duration::from_secs(60), || {
        let state = sandbox.state("mute");
        state["scheduler"]["state"] == "unresponsive" && state["state"] == "unresponsive"
    });
    tell(nix::sys::signal::Signal::SIGCONT);
    eventually("READY again", Duration::from_secs(60), || {
        sandbox.state("mute")["state"] == "ready"
    });
    cluster.tell("hang");
    eventually("the worker is not READY", Duration::from_secs(60), || {
        let state = sandbox.state("mute");
        worker(&state, "gpu0")["state"] == "unresponsive" && state["state"] == "unresponsive"
    });
    assert_eq!(worker(&sandbox.state("mute"), "gpu1")["state"], "ready");
    let down = sandbox.run(&["down", "mute", "--kill"]);
    assert_eq!(down.code, 0, "{down}");
}

#[test]
fn a_cluster_whose_run_directory_was_removed_is_measured_and_starts_workers_again() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    drop(up(&sandbox, "tidied", &["--gpus", "0-1"]));
    std::fs::remove_dir_all(run_directory(&sandbox, "tidied")).expect("removed");
    let is_ready = || sandbox.try_state("tidied").is_some_and(|state| state["state"] == "ready");
    let works = || sandbox.run(&["verify", "tidied", "--rounds", "1"]).code == 0;
    eventually("it is measured", Duration::from_secs(60), || is_ready() && works());
    assert_eq!(sandbox.run(&["restart", "tidied", "gpu0"]).code, 0);
    eventually("READY again", Duration::from_secs(60), || is_ready() && works());
    Story::of(&sandbox, "tidied").tell("spread");
    down(&sandbox, "tidied");
}
