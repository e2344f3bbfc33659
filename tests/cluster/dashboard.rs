//! The page's server: who is let in, what a report and Prometheus are told.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use cuda_cluster::topology;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::browser::{Answer, Browser, http};
use super::fake_machine::FakeMachine;
use super::packages::python;
use super::sandbox::{Running, Sandbox, eventually};
use super::skip::skip;

pub(crate) const EIGHT: [&str; 4] = ["up", "--topology", "dgx-h100", "--simulate"];

/// A dashboard that is being served.
pub(crate) struct Served {
    running: Running,
    pub(crate) link: String,
    address: String,
    token: String,
}

impl Served {
    pub(crate) fn start(sandbox: &Sandbox) -> Self {
        Self::of(sandbox.spawn(&["dashboard", "--no-browser"]))
    }

    pub(crate) fn of(mut running: Running) -> Self {
        let link = running.first_line();
        let (address, token) = link.split_once("/?token=").expect("a link with a token");
        let address = address.strip_prefix("http://").expect("a link").to_owned();
        Self { running, address, token: token.to_owned(), link }
    }

    /// Sends a request with these headers besides the right host.
    pub(crate) fn ask(&self, line: &str, headers: &[&str]) -> Answer {
        let host = format!("Host: {}", self.address);
        self.ask_host(line, &[&[host.as_str()], headers].concat())
    }

    fn ask_host(&self, line: &str, headers: &[&str]) -> Answer {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        http(stream, &format!("{line} HTTP/1.1"), headers, "")
    }

    pub(crate) fn cookie(&self) -> String {
        let port = self.address.rsplit_once(':').expect("a port").1;
        format!("Cookie: other=1; cuda-cluster-{port}={}", self.token)
    }

    /// What Prometheus is told.
    pub(crate) fn metrics(&self) -> Answer {
        self.ask("GET /metrics", &[&format!("Authorization: Bearer {}", self.token)])
    }

    pub(crate) fn pid(&self) -> u64 {
        self.running.pid()
    }

    pub(crate) fn end(mut self) {
        self.running.signal(Signal::SIGINT);
        let said = self.running.wait();
        assert_eq!(said.code, 130, "{said}");
    }
}

/// Two workers of Dask.
pub(crate) fn up_dask(sandbox: &Sandbox, rest: &[&str]) {
    let python = python().display().to_string();
    let what = ["up", "--topology", "dgx-a100", "--simulate", "--n-workers", "2", "--detach"];
    let dask = ["--engine", "dask", "--python", &python, "--ready-within", "10m"];
    let up = sandbox.run(&[&what[..], &dask, rest].concat());
    assert_eq!(up.code, 0, "{up}");
}

pub(crate) fn down(sandbox: &Sandbox, name: &str) {
    let down = sandbox.run(&["down", name]);
    assert_eq!(down.code, 0, "{down}");
}

#[test]
fn the_page_lets_in_who_has_the_token_and_changes_nothing_for_pages_elsewhere() {
    let sandbox = Sandbox::new();
    let up = sandbox
        .run(&[&EIGHT[..], &["--n-workers", "2", "--name", "secretive", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    let cookie = served.cookie();

    for path in ["/", "/page.js", "/api/clusters", "/api/clusters/secretive/live", "/?token=abc"] {
        for headers in [&[][..], &["Cookie: cuda-cluster=1"], &["Authorization: Bearer abc"]] {
            let answer = served.ask(&format!("GET {path}"), headers);
            assert_eq!(answer.status, 401, "{path}: {answer:?}");
            assert!(!answer.body.contains("secretive"), "{answer:?}");
        }
        for host in ["evil.example", "evil.example:80", "127.0.0.1", "localhost:1"] {
            let answer =
                served.ask_host(&format!("GET {path}"), &[&format!("Host: {host}"), &cookie]);
            assert_eq!(answer.status, 421, "{path} of {host}: {answer:?}");
        }
    }

    let welcome = served.ask(&format!("GET /?token={}", served.token), &[]);
    assert_eq!(welcome.status, 200, "{welcome:?}");
    let set = welcome.head.lines().find(|line| line.starts_with("set-cookie:")).expect("a cookie");
    assert!(set.contains("httponly") && set.contains("samesite=strict"), "{set}");
    assert!(!welcome.body.contains(&served.token), "{welcome:?}");

    let page = served.ask("GET /", &[&cookie]);
    assert_eq!(page.status, 200, "{page:?}");
    let policy = page.head.lines().find(|line| line.starts_with("content-security-policy:"));
    let policy = policy.expect("a policy");
    assert!(
        policy.contains("default-src 'none'") && policy.contains("script-src 'self'"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    assert!(!page.body.contains(&served.token) && !page.body.contains("secretive"), "{page:?}");
    let clusters = served.ask("GET /api/clusters", &[&cookie]);
    assert!(clusters.body.contains("secretive"), "{clusters:?}");

    let worker = sandbox.state("secretive")["workers"][0]["pid"].clone();
    let change = "/api/clusters/secretive/restart/gpu0";
    let (own, origin) = ("X-Cuda-Cluster: page", format!("Origin: http://{}", served.address));
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        for headers in [
            &[cookie.as_str()][..],
            &[&cookie, own],
            &[&cookie, &origin],
            &[&cookie, own, "Origin: http://evil.example"],
            &[&cookie, own, "Origin: null"],
        ] {
            let answer = served.ask(&format!("{method} {change}"), headers);
            assert_eq!(answer.status, 403, "{method} {headers:?}: {answer:?}");
        }
        let answer = served.ask(&format!("{method} {change}"), &[own, &origin]);
        assert_eq!(answer.status, 401, "{method}: {answer:?}");
    }
    let before = sandbox.state("secretive")["workers"][0]["pid"].clone();
    assert_eq!(before, worker, "none of these has restarted it");
    let answer = served.ask(&format!("POST {change}"), &[&cookie, own, &origin]);
    assert_eq!(answer.status, 202, "{answer:?}");
    eventually("a restart", Duration::from_secs(30), || {
        let state = sandbox.state("secretive");
        state["state"] == "ready" && state["workers"][0]["pid"] != before
    });
    let unknown =
        served.ask("POST /api/clusters/secretive/restart/gpu77", &[&cookie, own, &origin]);
    assert_eq!(unknown.status, 404, "{unknown:?}");
    for path in [
        "/api/clusters/..%2Fx/events",
        "/api/clusters/secretive/log/file?process=..%2Fsecret",
        "/secret",
    ] {
        let answer = served.ask(&format!("GET {path}"), &[&cookie]);
        assert!((400..500).contains(&answer.status), "{path}: {answer:?}");
    }
    served.end();
    down(&sandbox, "secretive");
}

#[test]
fn the_page_listens_where_only_this_user_or_this_machine_can_reach_it() {
    let sandbox = Sandbox::new();
    for (listen, words) in [
        ("0.0.0.0:0", ["not a loopback address", "hint: from another machine: ssh -L"]),
        ("localhost", ["neither an address", "hint:"]),
        ("/nowhere/x.sock", ["cannot listen on /nowhere/x.sock", "No such file"]),
    ] {
        let said = sandbox.run(&["dashboard", "--no-browser", "--listen", listen]);
        assert!(said.code == 2 || said.code == 1, "{said}");
        assert!(words.iter().all(|word| said.stderr.contains(word)), "{said}");
    }

    let path = sandbox.runtime().join("page.sock");
    let text = path.to_str().expect("a path");
    let mut running = sandbox.spawn(&["dashboard", "--listen", text]);
    assert_eq!(running.first_line(), text);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&path).expect("a socket").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let ask = |line: &str, headers: &[&str]| {
        http(
            UnixStream::connect(&path).expect("it listens"),
            &format!("{line} HTTP/1.1"),
            headers,
            "",
        )
    };
    // As jupyter-server-proxy asks, with the browser's host.
    let page = ask("GET /", &["Host: hub.example", "X-Forwarded-Prefix: /user/me/proxy"]);
    assert_eq!(page.status, 200, "{page:?}");
    for reference in ["=\"/", "://"] {
        assert!(!page.body.contains(reference), "URLs are relative: {}", page.body);
    }
    let change = "POST /api/clusters/x/stop";
    let refused =
        ask(change, &["Host: hub.example", "Origin: https://evil.example", "X-Cuda-Cluster: page"]);
    assert_eq!(refused.status, 403, "{refused:?}");
    let passed =
        ask(change, &["Host: hub.example", "Origin: https://hub.example", "X-Cuda-Cluster: page"]);
    assert_eq!(passed.status, 502, "there is no such cluster: {passed:?}");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.wait().code, 143);
    assert!(!path.exists(), "the socket goes with the server");
}

#[test]
fn no_command_line_has_the_token_and_a_file_of_this_user_alone_leads_a_browser_to_the_page() {
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let [opened, token] = ["opened", "token"].map(|name| folder.path().join(name));
    let program = folder.path().join("xdg-open");
    let script = format!("#!/bin/sh\necho \"$*\" > {0}.new && mv {0}.new {0}\n", opened.display());
    std::fs::write(&program, script).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).expect("its mode");
    let path = std::env::var("PATH").unwrap_or_default();
    let browser = Browser::start();
    let token = token.to_str().expect("a path");
    for flags in [&["dashboard"][..], &["dashboard", "--token-file", token]] {
        let mut dashboard = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        dashboard.args(flags).env("DISPLAY", ":77");
        dashboard.env("PATH", format!("{}:{path}", folder.path().display()));
        let served = Served::of(sandbox.spawn_program(dashboard));
        eventually("a browser is started", Duration::from_secs(30), || opened.exists());
        let line = std::fs::read_to_string(&opened).expect("its arguments");
        assert!(!line.contains(&served.token), "{line}");
        for process in std::fs::read_dir("/proc").expect("proc").flatten() {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            assert!(!line.contains(&served.token), "{line}");
        }
        let file = std::path::Path::new(line.trim());
        let mode = |path: &std::path::Path| {
            let permissions = std::fs::metadata(path).expect("it exists").permissions();
            std::os::unix::fs::PermissionsExt::mode(&permissions) & 0o777
        };
        assert_eq!((mode(file), mode(file.parent().expect("a directory"))), (0o600, 0o700));
        let page = std::fs::read_to_string(file).expect("readable by its owner");
        assert!(page.contains(&format!("url={}", served.link)), "{page}");
        if let Some(browser) = &browser {
            browser.open(&format!("file://{}", file.display()));
            browser.wait_for(
                "document.querySelector('#footer')?.textContent.includes('cuda-cluster')",
            );
        }
        served.end();
        assert!(!file.exists(), "the file goes with the server");
        std::fs::remove_file(&opened).expect("removed");
    }
    sandbox.assert_nothing_is_left();
}

#[test]
fn a_report_has_machine_plan_state_events_and_logs_but_no_secrets() {
    let sandbox = Sandbox::new();
    let spec = sandbox.runtime().join("spec.yaml");
    std::fs::write(
        &spec,
        "version: 1\nworker: {env: {MY_API_TOKEN: hush-hush, MY_WORD: visible}}\n",
    )
    .expect("written");
    let spec = spec.to_str().expect("a path");
    let asked = ["-f", spec, "--n-workers", "2", "--name", "told", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &asked].concat());
    assert_eq!(up.code, 0, "{up}");
    let secret = std::fs::read_to_string(sandbox.base().join("told/secret")).expect("a secret");
    let report = sandbox.run(&["report", "told", "-f", "-"]);
    assert_eq!(report.code, 0, "{report}");
    let told: Value = serde_json::from_str(&report.stdout).expect("JSON");
    assert_eq!(told["machine"]["gpus"].as_array().map(Vec::len), Some(8));
    assert_eq!(told["plan"]["workers"][1]["env"]["MY_WORD"], "visible");
    assert_eq!(told["plan"]["workers"][1]["env"]["MY_API_TOKEN"], "***");
    assert_eq!(told["state"]["state"], "ready");
    assert!(told["events"].to_string().contains("ready"), "{told:#}");
    assert!(told["logs"]["gpu0"].as_array().is_some_and(|lines| !lines.is_empty()), "{told:#}");
    assert!(!report.stdout.contains("hush-hush") && !report.stdout.contains(secret.trim()));

    let file = sandbox.runtime().join("report.json");
    let said = sandbox.run(&["report", "-f", file.to_str().expect("a path")]);
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stderr.contains("report.json"), "{said}");
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&file).expect("a file").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    down(&sandbox, "told");
    let gone = sandbox.run(&["report", "told"]);
    assert_eq!(gone.code, 2, "{gone}");
}

#[test]
fn a_supervisor_that_does_not_answer_is_not_ready_for_prometheus_and_keeps_no_other() {
    let sandbox = Sandbox::new();
    for name in ["stopped", "well"] {
        let asked = ["--n-workers", "1", "--name", name, "--detach"];
        let up = sandbox.run(&[&EIGHT[..], &asked].concat());
        assert_eq!(up.code, 0, "{up}");
    }
    let served = Served::start(&sandbox);
    let supervisor = sandbox.state("stopped")["supervisor_pid"].as_u64().expect("a pid");
    sandbox.signal(supervisor, Signal::SIGSTOP);
    let metrics = served.metrics().body;
    sandbox.signal(supervisor, Signal::SIGCONT);
    assert!(metrics.contains("cuda_cluster_ready{cluster=\"stopped\"} 0\n"), "{metrics}");
    assert!(metrics.contains("cuda_cluster_ready{cluster=\"well\"} 1\n"), "{metrics}");
    served.end();
    down(&sandbox, "stopped");
    down(&sandbox, "well");
    sandbox.assert_nothing_is_left();
}

#[test]
fn strangers_that_say_nothing_do_not_keep_the_page_from_others() {
    let sandbox = Sandbox::new();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 128; exec \"$@\"", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(["dashboard", "--no-browser"]);
    let served = Served::of(sandbox.spawn_program(command));
    let silent: Vec<TcpStream> =
        (0..400).map(|_| TcpStream::connect(&served.address).expect("it listens")).collect();
    // Those that are too many are dropped; a request is let in when the others' time is over.
    eventually("it answers", Duration::from_secs(60), || {
        let ask = std::panic::AssertUnwindSafe(|| served.metrics().status);
        std::panic::catch_unwind(ask).is_ok_and(|status| status == 200)
    });
    // Who does not know the token keeps no connection either.
    let mut stranger = TcpStream::connect(&served.address).expect("it listens");
    stranger.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    write!(stranger, "GET / HTTP/1.1\r\nHost: {}\r\n\r\n", served.address).expect("sent");
    let mut answer = String::new();
    stranger.read_to_string(&mut answer).expect("its end");
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    drop(silent);
    served.end();
}

#[test]
fn prometheus_scrapes_every_cluster_and_the_dashboards_for_grafana_ask_for_what_is_there() {
    if Command::new("promtool").arg("--version").output().is_err() {
        skip("prometheus", "there is no promtool; scripts/setup.sh --tests");
        return;
    }
    let folder = tempfile::tempdir().expect("a directory");
    let machine = topology::parse(topology::builtin("dgx-h100").expect("built in"));
    let machine = machine.expect("a machine");
    let fake = FakeMachine::write(&machine, folder.path()).expect("written");
    let sandbox = Sandbox::new();
    for name in ["one", "two"] {
        let asked = ["--n-workers", "2", "--name", name, "--detach"];
        let up = sandbox.run(&[&EIGHT[..], &asked].concat());
        assert_eq!(up.code, 0, "{up}");
    }
    let config = include_str!("../../configs/prometheus.yml");
    let token = folder.path().join("token");
    let mut dashboard = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    dashboard.args(["dashboard", "--no-browser", "--token-file"]).arg(&token);
    dashboard.envs(fake.environment());
    let served = Served::of(sandbox.spawn_program(dashboard));
    assert_eq!(std::fs::read_to_string(&token).expect("a token").trim(), served.token);

    let metrics = served.metrics().body;
    for sample in [
        "cuda_cluster_ready{cluster=\"one\"} 1",
        "cuda_cluster_ready{cluster=\"two\"} 1",
        "cuda_cluster_gpu_busy_ratio{gpu=\"7\"} 0\n",
        "cuda_cluster_gpu_temperature_celsius{gpu=\"0\"} 40",
        "cuda_cluster_gpu_power_watts{gpu=\"1\"} 301",
        "cuda_cluster_gpu_nvlink_sent_bytes_total{gpu=\"2\"}",
        "cuda_cluster_downgraded_connections{cluster=\"one\"} 0",
        "cuda_cluster_lane_connections{cluster=\"two\",lane=\"cma/memory\"} 2",
    ] {
        assert!(metrics.contains(sample), "{sample} in {metrics}");
    }
    let file = folder.path().join("metrics");
    std::fs::write(&file, &metrics).expect("written");
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(std::fs::File::open(&file).expect("a file"));
    let checked = check.output().expect("promtool");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));

    let known = |name: &str| metrics.contains(&format!("\n{name}{{"));
    let grafana: Value =
        serde_json::from_str(include_str!("../../configs/grafana.json")).expect("JSON");
    let targets = grafana["panels"].as_array().expect("panels").iter().flat_map(|panel| {
        panel["targets"].as_array().expect("targets").iter().filter_map(|one| one["expr"].as_str())
    });
    for expression in targets {
        let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        for name in words.filter(|word| word.starts_with("cuda_cluster_")) {
            // This machine has no RDMA ports that count, and simulated workers no pools yet.
            let elsewhere = name.contains("_nic_") || name.contains("_device_pool_");
            assert!(elsewhere || known(name), "{name} of {expression}");
        }
    }

    let config = config.replace("127.0.0.1:8788", &served.address).replace("15s", "1s");
    let file = folder.path().join("prometheus.yml");
    std::fs::write(&file, config).expect("written");
    let rules = folder.path().join("alerts.yml");
    std::fs::write(rules, include_str!("../../configs/alerts.yml")).expect("written");
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", file.display()));
    prometheus.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let mut prometheus = sandbox.spawn_program(prometheus);
    let asked = |path: &str| {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        // An answer to 1.0 comes in one piece.
        let line = format!("GET /api/v1/{path} HTTP/1.0");
        let answer = http(stream, &line, &[&format!("Host: 127.0.0.1:{port}")], "");
        serde_json::from_str::<Value>(&answer.body).ok()
    };
    eventually("Prometheus has both clusters", Duration::from_secs(60), || {
        let answer = asked("query?query=sum(cuda_cluster_ready)");
        answer.is_some_and(|value| value["data"]["result"][0]["value"][1] == "2")
    });
    // A cluster that nothing is wrong with alarms nobody, which each rule was asked.
    eventually("its rules were asked", Duration::from_secs(120), || {
        let answer = asked("rules").unwrap_or_default();
        let rules = answer["data"]["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
        rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok")
    });
    let alerts = asked("alerts").expect("an answer");
    assert_eq!(alerts["data"]["alerts"].to_string(), "[]");
    prometheus.signal(Signal::SIGTERM);
    prometheus.wait();
    served.end();
    down(&sandbox, "one");
    down(&sandbox, "two");
    sandbox.assert_nothing_is_left();
}
