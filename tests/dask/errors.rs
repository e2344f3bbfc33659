//! Failures are explained within seconds, and leave nothing behind.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{MACHINE, packages, try_up};
use crate::sandbox::{Said, Sandbox};

fn up_with(sandbox: &Sandbox, flags: &[&str]) -> Said {
    let fixed = ["dask", "--name", "no", "--detach"];
    sandbox.run(&[&["up"][..], &MACHINE, &fixed, flags].concat())
}

#[test]
fn a_python_that_is_not_there_or_is_none_is_named() {
    let sandbox = Sandbox::new();
    let said = up_with(&sandbox, &["--python", "/nowhere/python"]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("/nowhere/python is not a Python that can be run"), "{said}");
    let said = up_with(&sandbox, &["--python", "/bin/false"]);
    assert!(said.stderr.contains("/bin/false did not answer like a Python interpreter"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn missing_packages_come_with_the_line_that_installs_them() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let answer = r#"echo '{"version":"3.12.0","prefix":"/","packages":{}}'"#;
    let bare = script(folder.path(), answer);
    let said = up_with(&sandbox, &["--python", &bare, "--protocol", "ucxx"]);
    assert_eq!(said.code, 2, "{said}");
    let line = "python -m pip install dask 'distributed>=2025.4' distributed-ucxx-cu13";
    assert!(said.stderr.contains(line), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn packages_that_do_not_go_together_come_with_the_line_that_mends_them() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let answer = r#"{"version":"3.12.0","prefix":"/","packages":
                     {"dask":"2026.7.1","distributed":"2026.3.0"}}"#;
    let python = script(folder.path(), &format!("echo '{}'", answer.replace('\n', "")));
    let said = up_with(&sandbox, &["--python", &python]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("dask 2026.7.1 and distributed 2026.3.0"), "{said}");
    assert!(said.stderr.contains("pip install dask==2026.3.0"), "{said}");
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_process_that_crashes_at_its_start_is_named_and_nothing_runs_on() {
    if !packages() {
        return;
    }
    for (role, named) in [("scheduler", "scheduler"), ("worker", "gpu0")] {
        let sandbox = Sandbox::new();
        let folder = tempfile::tempdir().expect("a directory");
        let real = super::python::path().display().to_string();
        // The arguments are the package and the role.
        let crash = format!("[ \"$2\" = {role} ] && kill -SEGV $$\nexec {real} \"$@\"");
        let python = script(folder.path(), &crash);
        let flags = ["--python", &python, "--n-workers", "1", "--start-method", "spawn"];
        let said = up_with(&sandbox, &flags);
        assert_eq!(said.code, 1, "{said}");
        let cause = format!("{named} was ended by signal 11");
        assert!(said.stderr.contains(&cause), "{said}");
        sandbox.assert_only_the_causes_are_left("no");
    }
}

/// A program in place of Python.
fn script(folder: &Path, text: &str) -> String {
    let path = folder.join("python");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    path.display().to_string()
}

#[test]
fn a_busy_port_is_an_error_that_names_its_holder() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let held = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = held.local_addr().expect("its address").port().to_string();
    for protocol in ["tcp", "ucxx"] {
        let flags = ["--scheduler-port", &port, "--protocol", protocol];
        let said = try_up(&sandbox, "busy", &flags);
        assert_eq!(said.code, 1, "{said}");
        let holder = format!("port {port} is held by");
        assert!(said.stderr.contains(&holder), "{said}");
        assert!(said.stderr.contains(&format!("(pid {})", std::process::id())), "{said}");
        let events = sandbox.base().join("busy/events.jsonl");
        let events = std::fs::read_to_string(events).expect("events");
        assert!(!events.contains("gpu0"), "no worker is started for nothing: {events}");
    }
}

#[test]
fn what_cannot_be_imported_or_preloaded_is_named() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    for (flags, words) in [
        (["--pre-import", "no_such_module"], "cannot import no_such_module"),
        (["--worker-class", "distributed.NoSuchWorker"], "NoSuchWorker"),
        (["--worker-class", "builtins.int"], "builtins.int: it is no class of Dask workers"),
    ] {
        let said = try_up(&sandbox, "import", &flags);
        assert_eq!(said.code, 1, "{said}");
        assert!(said.stderr.contains(words), "{said}");
    }
}

#[test]
fn what_is_no_file_of_a_scheduler_is_told_when_nobody_goes_on_writing_it() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    for file in ["/dev/null", "/etc/hostname"] {
        let said = try_up(&sandbox, "nowhere", &["--join", file]);
        assert_eq!(said.code, 1, "{said}");
        let why = format!("{file} is no file of a Dask scheduler");
        assert!(said.stderr.contains(&why), "{said}");
    }
}

#[test]
fn certificates_that_cannot_be_used_are_named() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, "no certificate").expect("written");
        path.display().to_string()
    };
    let files = [file("ca.pem"), file("cert.pem"), file("key.pem")];
    let [ca, cert, key] = &files;
    let flags = ["--tls-ca-file", ca, "--tls-cert", cert, "--tls-key", key];
    let said = try_up(&sandbox, "junk", &flags);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("these files do not make a TLS connection: "), "{said}");
    assert!(files.iter().all(|file| said.stderr.contains(file)), "{said}");
    assert!(!said.stderr.contains("Traceback"), "{said}");
}
