//! Hosts that are reached over ssh, as `ps`, `top` and the page show them. Instead of ssh a script
//! runs the command here, with run directories of its own for each host;
//! `tests/python/test_hosts.py` has a real one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::browser::Browser;
use super::dashboard::{Served, down};
use super::packages::{packages, python};
use super::sandbox::Sandbox;
use super::screen::Screen;
use super::skip::skip;

/// Runs its last word, a command, where the machine has the name of the one before, a host, and
/// run directories of its own.
const SSH: &str = r#"#!/bin/sh
for word; do host=$command command=$word; done
export XDG_RUNTIME_DIR="$XDG_RUNTIME_DIR/$host"
mkdir -m 700 -p "$XDG_RUNTIME_DIR"
exec unshare --uts sh -c "hostname $host; exec $command"
"#;

fn up(sandbox: &Sandbox, name: &str) {
    let ssh = sandbox.runtime().join("ssh");
    std::fs::write(&ssh, SSH).expect("written");
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    let spec = sandbox.runtime().join("spec.yaml");
    let (ssh, program) = (ssh.display(), env!("CARGO_BIN_EXE_cuda-cluster"));
    let text = format!(
        "version: 1\nengine: dask\nscheduler: {{host: 127.0.0.1}}\n\
         dask: {{hosts: [localhost, b, c], ssh: [{ssh}], hosts_program: {program}}}\n"
    );
    std::fs::write(&spec, text).expect("written");
    let (spec, python) = (spec.display().to_string(), python().display().to_string());
    let machine = ["--topology", "dgx-a100", "--simulate", "--gpus", "0", "--python", &python];
    let rest = ["--name", name, "--detach", "--protocol", "tcp", "--ready-within", "10m"];
    let up = sandbox.run(&[&["up", "-f", &spec], &machine[..], &rest].concat());
    assert_eq!(up.code, 0, "{up}");
}

/// The process of a host that the connection leads to.
fn member(sandbox: &Sandbox, host: &str) -> u64 {
    let here = format!("XDG_RUNTIME_DIR={}\0", sandbox.runtime().join(host).display());
    let read = |pid: u64, what: &str| {
        let text = std::fs::read(Path::new("/proc").join(pid.to_string()).join(what));
        String::from_utf8_lossy(&text.unwrap_or_default()).into_owned()
    };
    let is_it = |pid: &u64| {
        read(*pid, "cmdline").contains("\0__member\0") && read(*pid, "environ").contains(&here)
    };
    sandbox.pids().into_iter().find(is_it).expect("a process")
}

#[test]
fn hosts_over_ssh_are_shown_with_their_state_and_why_a_connection_ended() {
    if !nix::unistd::geteuid().is_root() {
        return skip("root", "only root can give a host a name of its own");
    }
    let Some(browser) = Browser::start().filter(|_| packages()) else { return };
    let sandbox = Sandbox::new();
    up(&sandbox, "three");
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    let row = |table: &str, name: &str, pattern: &str| {
        browser.wait_for(&format!(
            "[...document.querySelectorAll('{table} tbody tr')].some((row) => \
             /^{name} {pattern}/.test(row.innerText.replace(/\\s+/g, ' ')))"
        ));
    };
    row("#host-table", "host-b", "● READY b 0");
    row("#host-table", "host-c", "● READY c 0");
    let joined = "document.querySelectorAll('#joined-table tr.good').length === 2";
    browser.wait_for(joined);
    let workers =
        "[...document.querySelectorAll('#worker-table tbody th')].map((it) => it.innerText)";
    assert_eq!(browser.script(&format!("return {workers}.join(' ')")), "scheduler gpu0");

    let mut top = Screen::start(&sandbox, (120, 40), &["top", "three"]);
    top.wait_for("host-b");
    // Beyond the last one is the last one.
    "jjjj".chars().for_each(|key| top.type_in(&key.to_string()));
    top.wait_for("host-c: brings up the workers of c, process ");

    sandbox.kill(member(&sandbox, "c"));
    let why = "could not go on: the connection to c is lost: ssh ended: signal: 9 (SIGKILL)";
    let pattern = why.replace('(', "\\(").replace(')', "\\)");
    row("#host-table", "host-c", &format!("● READY c 1 .*{pattern}"));
    browser.wait_for(joined);
    browser.picture("hosts-1440-light");
    top.wait_for("the connection to c is lost");
    top.wait_until("its restart", |text| {
        let row = text.lines().find(|line| line.starts_with("host-c ")).unwrap_or_default();
        row.contains("READY") && row.contains(" 1 ")
    });
    top.type_in("q");
    assert_eq!(top.wait(), Some(0));
    let ps = sandbox.run(&["ps", "three"]).stdout;
    let shown = |name: &str, words: &str| {
        ps.lines().any(|line| line.starts_with(name) && line.contains(words))
    };
    assert!(shown("host-c", why) && shown("host-b", " b "), "{ps}");

    // It can be selected, and leads back here from the page of all clusters.
    browser.click("#all");
    row("[data-part=hosts]", "c", &format!("● 1 READY host-c ● READY: {pattern}.* three 1"));
    row("[data-part=hosts]", "b", "● 1 READY host-b ● READY three 1");
    for (width, scheme) in [(1440, "light"), (390, "dark")] {
        browser.look_like(width, scheme);
        browser.picture(&format!("overview-hosts-{width}-{scheme}"));
        browser.assert_it_fits(&format!("at {width}"));
    }
    browser.look_like(1440, "light");
    browser.click("[data-part=hosts] tr:last-child a");
    browser.wait_for("document.querySelector('#details-title')?.textContent === 'host-c'");
    let told =
        "document.querySelector('#details').textContent.includes('Brings up the workers ofc')";
    browser.wait_for(told);
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "three");
    sandbox.assert_only_the_causes_are_left("three");
}
