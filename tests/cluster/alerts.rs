//! The rules for Prometheus's alerts: their own tests, and whether what they ask for is told.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use cuda_cluster::topology;
use serde_json::{Value, json};

use super::dashboard::{EIGHT, Served, down};
use super::fake_machine::FakeMachine;
use super::sandbox::{Sandbox, eventually};
use super::skip::skip;

const RULES: &str = include_str!("../../configs/alerts.yml");
const TESTS: &str = include_str!("../../configs/alerts-test.yml");

/// Whether there is Prometheus, after saying so if not.
fn promtool() -> bool {
    let there = Command::new("promtool").arg("--version").output().is_ok();
    if !there {
        skip("prometheus", "there is no promtool; scripts/setup.sh --tests");
    }
    there
}

fn yaml(text: &str) -> Value {
    serde_yaml::from_str(text).expect("YAML")
}

/// The rules, each with its name.
fn rules(all: &Value) -> Vec<(&str, &str)> {
    let rules = all["groups"][0]["rules"].as_array().expect("rules");
    let all = rules.iter().map(|rule| Some((rule["alert"].as_str()?, rule["expr"].as_str()?)));
    all.collect::<Option<_>>().expect("alerts, each with an expression")
}

/// Tests these rules with the tests that are kept beside them.
fn tested(folder: &Path, rules: &str) -> Output {
    std::fs::write(folder.join("alerts.yml"), rules).expect("written");
    std::fs::write(folder.join("alerts-test.yml"), TESTS).expect("written");
    let mut command = Command::new("promtool");
    command.args(["test", "rules", "alerts-test.yml"]).current_dir(folder);
    command.output().expect("promtool")
}

#[test]
fn each_alert_is_raised_by_what_it_is_for_and_by_nothing_else() {
    if !promtool() {
        return;
    }
    let folder = tempfile::tempdir().expect("a directory");
    let said = tested(folder.path(), RULES);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let mut check = Command::new("promtool");
    check.args(["check", "rules", "alerts.yml"]).current_dir(folder.path());
    let said = check.output().expect("promtool");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));

    // The test of each fails without it, and if it is raised by everything that has a series.
    let all = yaml(RULES);
    let names: Vec<&str> = rules(&all).into_iter().map(|(name, _)| name).collect();
    let failures = |changed: &[usize], expression: &str| {
        let mut other = all.clone();
        for at in changed {
            other["groups"][0]["rules"][at]["expr"] = json!(expression);
        }
        let said = tested(folder.path(), &other.to_string());
        assert!(!said.status.success(), "{changed:?} {expression}");
        String::from_utf8_lossy(&said.stderr).into_owned()
    };
    for (at, name) in names.iter().enumerate() {
        let text = failures(&[at], "vector(0) > 1");
        assert!(text.contains(name), "{name}: {text}");
    }
    let text = failures(&(0..names.len()).collect::<Vec<_>>(), "{__name__=~\".+\"}");
    for name in names {
        assert!(text.contains(name), "{name}: {text}");
    }
}

#[test]
fn the_alerts_ask_for_metrics_that_are_told_and_a_failed_cluster_is_one() {
    let folder = tempfile::tempdir().expect("a directory");
    let machine = topology::parse(topology::builtin("dgx-h100").expect("built in"));
    let fake = FakeMachine::write(&machine.expect("a machine"), folder.path()).expect("written");
    let sandbox = Sandbox::new();
    let asked = ["--n-workers", "2", "--name", "well", "--memory-limit", "1GiB", "--detach"];
    let up = sandbox.run(&[&EIGHT[..], &asked].concat());
    assert_eq!(up.code, 0, "{up}");
    let ranks = ["run", "--topology", "dgx-h100", "--simulate", "--n-workers", "2", "--audit"];
    let audited =
        sandbox.spawn(&[&ranks[..], &["--name", "audited", "--", "sleep", "1000"]].concat());
    let bad = sandbox.run(&[&ranks[..6], &["--name", "bad", "--", "false"]].concat());
    assert_ne!(bad.code, 0, "{bad}");
    let mut dashboard = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    dashboard.args(["dashboard", "--no-browser"]).envs(fake.environment());
    let served = Served::of(sandbox.spawn_program(dashboard));
    let bench = sandbox.run(&["bench", "tasks", "well", "--count", "100"]);
    assert_eq!(bench.code, 0, "{bench}");

    let mut metrics = String::new();
    eventually("the audit's first look", Duration::from_secs(60), || {
        metrics = served.metrics().body;
        metrics.contains("cuda_cluster_audit_downgrades{cluster=\"audited\"} 0\n")
    });
    for sample in [
        "cuda_cluster_failed{cluster=\"bad\"} 1\n",
        "cuda_cluster_ended_timestamp_seconds{cluster=\"bad\"} 1",
        "cuda_cluster_failed{cluster=\"well\"} 0\n",
        "cuda_cluster_supervisor_answers{cluster=\"well\"} 1\n",
        "cuda_cluster_process_memory_limit_bytes{cluster=\"well\",process=\"gpu1\"} 1073741824\n",
        "cuda_cluster_process_wanted{cluster=\"well\",process=\"gpu1\"} 1\n",
        "cuda_cluster_process_cpu_seconds_total{cluster=\"well\",process=\"scheduler\"} ",
        "cuda_cluster_process_gpu_errors{cluster=\"well\",process=\"gpu0\"} 0\n",
        "cuda_cluster_gpu_uncorrected_errors{gpu=\"7\"} 0\n",
        "cuda_cluster_spilled_bytes_total{cluster=\"well\",process=\"gpu0\",tier=\"disk\"} 0\n",
        "cuda_cluster_transfers_sent_total{cluster=\"well\",process=\"gpu0\"} ",
    ] {
        assert!(metrics.contains(sample), "{sample} in {metrics}");
    }
    let finished = metrics.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        series
            .starts_with("cuda_cluster_tasks_finished_total{")
            .then(|| value.parse::<f64>().ok())?
    });
    assert!(finished.sum::<f64>() >= 100.0, "{metrics}");

    let told: BTreeSet<&str> = metrics.lines().filter_map(|line| line.split('{').next()).collect();
    let all = yaml(RULES);
    for (name, expression) in rules(&all) {
        let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let asked: Vec<&str> =
            words.filter(|word| word.starts_with("cuda_cluster_") || *word == "up").collect();
        assert!(!asked.is_empty(), "{name} asks for nothing");
        for metric in asked {
            // `up` is Prometheus's own.
            assert!(metric == "up" || told.contains(metric), "{metric} of {name} in {metrics}");
        }
    }
    served.end();
    down(&sandbox, "well");
    down(&sandbox, "audited");
    audited.wait();
    // What says why a cluster has failed stays.
    sandbox.assert_only_the_causes_are_left("bad");
}
