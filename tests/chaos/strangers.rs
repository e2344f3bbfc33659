//! Another user of this machine tries to access a cluster whose parent directories are open.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cuda_cluster::os::shared_memory;
use cuda_cluster::supervise::{ClusterPhase, ProcessPhase};
use nix::unistd::{Uid, User};

use crate::bench::{example, told_state};
use crate::place::Place;
use crate::{Tally, faults, skip};

/// Inodes of the sockets of these processes.
fn sockets(pids: &[u32]) -> BTreeSet<String> {
    let descriptors =
        pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).ok());
    descriptors
        .flatten()
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter_map(|target| {
            let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect()
}

/// Ports on which these sockets listen.
fn ports(own: &BTreeSet<String>) -> Vec<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let mut ports = Vec::new();
    for line in tables.iter().flatten().flat_map(|table| table.lines().skip(1)) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let listens = fields[3] == "0A" && own.contains(fields[9]);
        let port = fields[1].rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
        ports.extend(port.filter(|_| listens).map(|port| port.to_string()));
    }
    ports
}

/// Abstract sockets of these.
fn abstract_sockets(own: &BTreeSet<String>) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|fields| fields.len() > 7 && own.contains(fields[6]));
    named.map(|fields| fields[7].to_owned()).filter(|name| name.starts_with('@')).collect()
}

/// System V segments of these processes that others may attach to.
fn open_segments(pids: &[u32]) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let open = |fields: &[&str]| {
        let creator = fields.get(4).and_then(|field| field.parse().ok());
        let mode = fields.get(2).and_then(|field| u32::from_str_radix(field, 8).ok());
        creator.is_some_and(|pid| pids.contains(&pid)) && mode.is_none_or(|mode| mode & 0o077 > 0)
    };
    let lines = table.lines().filter(|line| open(&line.split_whitespace().collect::<Vec<_>>()));
    lines.map(str::to_owned).collect()
}

/// A copy of the stranger where every user can execute it.
fn stranger() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("ccs").tempdir_in("/tmp").expect("a directory");
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(folder.path(), mode(0o755)).expect("its mode");
    let copy = folder.path().join("stranger");
    // By another process: what this one holds open for writing, its children may be found to hold, too.
    let copied = Command::new("cp").args([&example("stranger"), &copy]).status().expect("cp runs");
    assert!(copied.success(), "{copied}");
    std::fs::set_permissions(&copy, mode(0o755)).expect("its mode");
    folder
}

#[test]
fn another_user_finds_no_open_door() {
    let nobody = User::from_name("nobody").ok().flatten();
    let Some(nobody) = nobody.filter(|_| Uid::effective().is_root()) else {
        return skip::skip("root", "only root can become another user");
    };
    let mut tally = Tally::new("strangers");
    let place = Place::new("strangers");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.sandbox.runtime(), open).expect("its mode");
    let copy = stranger();
    {
        let up = ["up", "--topology", "dgx-h100", "--simulate", "--n-workers", "2", "--name"];
        let arguments = [&up[..], &["strangers", "--detach"]].concat();
        let said = place.command(&arguments).status().expect("it runs");
        assert!(said.success(), "{said}");
        let before = told_state(&place.run_directory()).expect("a state");
        for _ in 0..faults(1).min(20) {
            attack(&place, copy.path(), &nobody, &mut tally);
        }
        let after = told_state(&place.run_directory()).expect("a state");
        assert_eq!(after.state, ClusterPhase::Ready);
        for (before, after) in before.workers.iter().zip(&after.workers) {
            assert_eq!((after.pid, after.state), (before.pid, ProcessPhase::Ready));
        }
        let cgroup = place.cgroup();
        assert!(place.command(&["down", "strangers"]).status().expect("it runs").success());
        place.gone(&tally, cgroup.as_deref());
    }
}

fn attack(place: &Place, folder: &Path, nobody: &User, tally: &mut Tally) {
    let pids = place.pids();
    let own = sockets(&pids);
    let (ports, names, segments) = (ports(&own), abstract_sockets(&own), open_segments(&pids));
    let base = place.sandbox.runtime().join("cuda-cluster");
    let mut doors = vec![format!("all={}", base.display())];
    let inside = walk(&base);
    for path in &inside {
        let verbs = ["connect", "read", "write", "list", "make"];
        doors.extend(verbs.map(|verb| format!("{verb}={}", path.display())));
    }
    let prefix = shared_memory::prefix(&base);
    for entry in std::fs::read_dir("/dev/shm").expect("shared memory").flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            doors.push(format!("all={}", entry.path().display()));
        }
    }
    for pid in &pids {
        doors.extend(["mem", "environ", "maps"].map(|what| format!("read=/proc/{pid}/{what}")));
        doors.push(format!("list=/proc/{pid}/fd"));
    }
    for verb in ["connect", "send"] {
        doors.extend(names.iter().map(|name| format!("{verb}={name}")));
    }
    doors.extend(ports.iter().map(|port| format!("tcp={port}")));
    for door in &doors {
        tally.count(door.split('=').next().unwrap_or_default());
    }
    let said = Command::new(folder.join("stranger"))
        .args(&doors)
        .uid(nobody.uid.as_raw())
        .gid(nobody.gid.as_raw())
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .expect("a stranger");
    assert!(!names.is_empty(), "UCX has a socket for each worker");
    let told = String::from_utf8_lossy(&said.stdout);
    assert!(inside.iter().any(|path| path.ends_with("control.sock")), "{inside:?}");
    assert_eq!(told, "tried\n", "{}", String::from_utf8_lossy(&said.stderr));
    assert_eq!(segments, Vec::<String>::new(), "System V segments that others may attach to");
}

/// Everything below a directory, as seen by its owner.
fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = vec![folder.to_owned()];
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(walk(&path)) } else { found.push(path) }
    }
    found
}
