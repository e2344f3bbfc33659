//! What other users of the machine can reach of a cluster's processes.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::sandbox::Sandbox;

fn up(sandbox: &Sandbox, flags: &[&str]) -> Value {
    let up = ["up", "--topology", "dgx-h100", "--simulate", "--n-workers", "2", "--detach"];
    let said = sandbox.run(&[&up[..], &["--name", "near"], flags].concat());
    assert_eq!(said.code, 0, "{said}");
    sandbox.state("near")
}

/// Inodes of the TCP sockets of this machine that listen.
fn listeners() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // The state and the inode, proc(5); 0A is LISTEN.
            if fields[3] == "0A" {
                found.insert(fields[9].to_owned());
            }
        }
    }
    found
}

/// Names of the processes that listen on a TCP port.
fn who_listens(state: &Value) -> Vec<String> {
    let listeners = listeners();
    let workers = state["workers"].as_array().expect("workers").iter();
    let listens = |process: &&Value| {
        let pid = process["pid"].as_u64().expect("a pid");
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("it lives").flatten();
        let targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.into_iter().any(|target| {
            let target = target.display().to_string();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            inode.is_some_and(|inode| listeners.contains(inode))
        })
    };
    let all = workers.chain([&state["scheduler"]]);
    let named = all.filter(listens).map(|process| process["name"].as_str().expect("a name"));
    named.map(str::to_owned).collect()
}

/// System V segments that a process of the cluster has made, or has attached.
fn segments(state: &Value) -> Vec<String> {
    let workers = state["workers"].as_array().expect("workers").iter();
    let pids: Vec<u64> =
        workers.chain([&state["scheduler"]]).filter_map(|one| one["pid"].as_u64()).collect();
    let text = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let made = text.lines().skip(1).filter(|line| {
        // The creator and the last to attach, proc(5).
        let fields = line.split_whitespace().skip(4).take(2);
        fields.filter_map(|pid| pid.parse().ok()).any(|pid: u64| pids.contains(&pid))
    });
    let maps = pids.iter().flat_map(|pid| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.lines().filter(|line| line.contains("/SYSV")).map(str::to_owned).collect::<Vec<_>>()
    });
    made.map(str::to_owned).chain(maps).collect()
}

#[test]
fn no_process_of_a_native_cluster_listens_on_tcp_or_has_a_system_v_segment() {
    let sandbox = Sandbox::new();
    for flags in [&[][..], &["--enable-nvlink"], &["--enable-nvlink", "--enable-infiniband"]] {
        let state = up(&sandbox, flags);
        assert_eq!(who_listens(&state), [""; 0], "{flags:?}");
        assert_eq!(segments(&state), [""; 0], "{flags:?}");
        let verified = sandbox.run(&["verify", "near"]);
        assert_eq!(verified.code, 0, "{verified}");
        assert_eq!(sandbox.run(&["down", "near"]).code, 0);
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn tcp_that_was_asked_for_is_there_and_the_plan_says_who_can_reach_it() {
    let sandbox = Sandbox::new();
    let flags = ["--enable-tcp-over-ucx"];
    let state = up(&sandbox, &flags);
    assert_eq!(who_listens(&state), ["gpu0", "gpu1"]);
    assert_eq!(segments(&state), [""; 0]);
    let plan = sandbox.run(&[&["plan", "--topology", "dgx-h100"][..], &flags].concat());
    let told = "UCX listens on TCP ports without authentication: every user of this machine can";
    assert!(plan.stdout.contains(told) || plan.stderr.contains(told), "{plan}");
    assert_eq!(sandbox.run(&["down", "near"]).code, 0);
    sandbox.assert_nothing_is_left();
}
