//! How clients find a cluster: the output of `up` and of `env`.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{down, packages, python, try_up, try_up_in, up};
use crate::sandbox::{Said, Sandbox};

/// Evaluates the output of `env` in a shell, then creates a plain `Client()`.
const CONNECT: &str = r#"eval "$("$0" env "$1")"; cd /; exec "$2" -c "
from distributed import Client
client = Client()
print(client.scheduler.address, len(client.scheduler_info(n_workers=-1)['workers']))
""#;

fn connect(sandbox: &Sandbox, name: &str) -> Said {
    let mut shell = Command::new("sh");
    shell.args(["-c", CONNECT, env!("CARGO_BIN_EXE_cuda-cluster"), name]).arg(python::path());
    sandbox.spawn_program(shell).wait()
}

#[test]
fn a_plain_client_finds_the_cluster_whose_environment_it_has() {
    if !packages() {
        return;
    }
    for protocol in ["tcp", "ucxx"] {
        let sandbox = Sandbox::new();
        up(&sandbox, "found", &["--n-workers", "2", "--protocol", protocol]);
        let address = sandbox.state("found")["scheduler"]["address"].clone();
        let address = address.as_str().expect("an address");
        let said = connect(&sandbox, "found");
        assert!(said.stdout.contains(&format!("{address} 2\n")), "{said}");
        let said = sandbox.run(&["env", "found", "-o", "json"]);
        let shown: Value = serde_json::from_str(&said.stdout).expect("JSON");
        assert_eq!((&shown["version"], &shown["name"]), (&1.into(), &"found".into()), "{said}");
        assert_eq!(shown["env"]["DASK_SCHEDULER_ADDRESS"], address, "{said}");
        let ucx = shown["env"].as_object().expect("variables").keys().any(|k| k.starts_with("UCX"));
        assert_eq!(ucx, protocol == "ucxx", "{said}");
        down(&sandbox, "found");
    }
}

#[test]
fn the_environment_of_no_cluster_is_an_error_and_nothing_to_evaluate() {
    let sandbox = Sandbox::new();
    for arguments in [&["env", "nowhere"][..], &["env"], &["env", "nowhere", "-o", "json"]] {
        let said = sandbox.run(arguments);
        assert_eq!((said.code, said.stdout.as_str()), (2, ""), "{said}");
        assert!(said.stderr.starts_with("error: no cluster"), "{said}");
        assert!(said.stderr.contains("hint: "), "{said}");
    }
}

#[test]
fn up_says_where_the_scheduler_is_and_that_it_is_not_where_it_was_asked_to_be() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dashboard = taken.local_addr().expect("its address").to_string();
    // Whether or not another process has the usual port, it is taken now.
    let usual = TcpListener::bind("127.0.0.1:8786");
    let flags = ["--n-workers", "1", "--dashboard-address", &dashboard];
    let said = try_up(&sandbox, "said", &flags);
    drop(usual);
    assert_eq!(said.code, 0, "{said}");
    let state = sandbox.state("said");
    let address = state["scheduler"]["address"].as_str().expect("an address");
    let link = state["scheduler"]["dashboard"].as_str().expect("a link");
    let line = format!("scheduler at {address}, dashboard at {link}");
    assert!(said.stderr.contains(&line), "{said}");
    assert!(link.starts_with("http://127.0.0.1:") && link.ends_with("/status"), "{link}");
    let page = Command::new(python::path())
        .args(["-c", "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).status)", link])
        .output();
    assert_eq!(page.expect("Python starts").stdout, b"200\n", "{link}");
    let port = dashboard.rsplit(':').next().expect("a port");
    assert!(said.stderr.contains(&format!("port {port} is held by ")), "{said}");
    // Another test may have had the usual port when this one wanted it, and let go of it.
    let elsewhere = !address.ends_with(":8786");
    assert_eq!(said.stderr.contains("port 8786 is held by "), elsewhere, "{said}");
    assert!(sandbox.run(&["ps", "said"]).stdout.contains(&line));
    down(&sandbox, "said");
}

#[test]
fn dashboards_are_there_when_somebody_opens_them() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    for (name, prefix) in [("plain", None), ("front", Some("front"))] {
        let prefixed = prefix.map(|prefix| ["--dashboard-prefix", prefix]);
        let prefixed = prefixed.iter().flatten().copied();
        let flags: Vec<&str> = ["--n-workers", "1"].into_iter().chain(prefixed).collect();
        let found = up(&sandbox, name, &flags).tell("pages");
        let state = sandbox.run(&["ps", name, "-o", "json"]).stdout;
        let state: Value = serde_json::from_str(&state).expect("JSON");
        assert_eq!(found["link"], state["scheduler"]["dashboard"], "as `ps` has it");
        assert_eq!(found["bokeh before"], false, "it is not loaded before");
        for (page, status) in found["pages"].as_object().expect("pages") {
            let expected = if page.ends_with("nowhere") { 404 } else { 200 };
            assert_eq!(*status, expected, "{page}");
        }
        down(&sandbox, name);
    }
}

#[test]
fn relative_certificates_lie_beside_the_spec_or_where_the_user_stands() {
    if !packages() {
        return;
    }
    let folder = tempfile::tempdir().expect("a directory");
    let certificates = folder.path().join("certificates");
    std::fs::create_dir(&certificates).expect("made");
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=story"])
        .args(["-keyout", "key.pem", "-out", "cert.pem"])
        .current_dir(&certificates)
        .output();
    if !made.is_ok_and(|made| made.status.success()) {
        crate::skip::skip("openssl", "there is no openssl to make a certificate with");
        return;
    }
    let spec = certificates.join("spec.yaml").display().to_string();
    let text = "version: 1\ntls: {ca_file: cert.pem, cert: cert.pem, key: key.pem}\n";
    std::fs::write(&spec, text).expect("written");
    let flags = ["--tls-ca-file", "cert.pem", "--tls-cert", "./cert.pem", "--tls-key", "key.pem"];
    for (directory, flags) in [(Path::new("/"), &["-f", &spec][..]), (&certificates, &flags)] {
        let sandbox = Sandbox::new();
        let flags = [flags, &["--n-workers", "1"]].concat();
        let said = try_up_in(&sandbox, directory, "tls", &flags);
        assert_eq!(said.code, 0, "{said}");
        let said = connect(&sandbox, "tls");
        assert!(said.stdout.starts_with("tls://"), "{said}");
        assert!(said.stdout.trim_end().ends_with(" 1"), "{said}");
        down(&sandbox, "tls");
    }

    let sandbox = Sandbox::new();
    let said = try_up_in(&sandbox, Path::new("/"), "tls", &flags);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.stderr.contains("--tls-ca-file: /cert.pem cannot be read"), "{said}");
    assert!(said.stderr.contains("hint: "), "{said}");
    sandbox.assert_nothing_is_left();
}
