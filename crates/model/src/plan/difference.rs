//! How two plans differ: what `up` reports when the cluster already runs with another plan.
//!
//! *Invariant:* equal plans have no difference, and every difference names the process and the
//! value before and after.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::engine::EnginePlan;
use super::form::{Binding, Plan, WorkerPlan};

/// What would change from `now` to `then`, a line each.
pub fn difference(now: &Plan, then: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let mut cluster = Changes { about: "cluster", lines: &mut lines };
    cluster.value("engine", now.engine.kind(), then.engine.kind());
    cluster.value("machine", named(now), named(then));
    cluster.engine(&now.engine, &then.engine);
    cluster.value("verify", now.requirements.verify, then.requirements.verify);
    if let (Some(now), Some(then)) = (&now.scheduler, &then.scheduler) {
        let mut scheduler = Changes { about: "scheduler", lines: &mut lines };
        scheduler.binding(&now.binding, &then.binding);
        scheduler.environment(&now.env, &then.env);
    }
    let worker = |plan: &Plan, name: &str| -> Option<WorkerPlan> {
        plan.workers.iter().find(|worker| worker.name == name).cloned()
    };
    let names: BTreeSet<&String> =
        now.workers.iter().chain(&then.workers).map(|worker| &worker.name).collect();
    for name in names {
        match (worker(now, name), worker(then, name)) {
            (Some(now), Some(then)) => {
                Changes { about: name, lines: &mut lines }.worker(&now, &then);
            }
            (Some(_), None) => lines.push(format!("{name}: would go")),
            (None, _) => lines.push(format!("{name}: would be new")),
        }
    }
    lines
}

fn named(plan: &Plan) -> String {
    let name = plan.machine.name.as_deref().unwrap_or("unnamed");
    if plan.machine.simulated { format!("{name} (simulated)") } else { name.to_owned() }
}

/// Differences of one process.
struct Changes<'a> {
    about: &'a str,
    lines: &'a mut Vec<String>,
}

impl Changes<'_> {
    fn value(&mut self, what: &str, now: impl ToString, then: impl ToString) {
        let (now, then) = (now.to_string(), then.to_string());
        if now != then {
            self.lines.push(format!("{}: {what} {now} → {then}", self.about));
        }
    }

    /// Differences of the engine's settings, key by key.
    fn engine(&mut self, now: &EnginePlan, then: &EnginePlan) {
        if now.kind() != then.kind() {
            return;
        }
        let keys = |plan: &EnginePlan| {
            let form = match plan {
                EnginePlan::Native(native) => serde_json::to_value(native),
                EnginePlan::Dask(dask) => serde_json::to_value(dask),
                EnginePlan::Command(command) => serde_json::to_value(command),
            };
            let form = form.unwrap_or_else(|error| panic!("a plan has a JSON form: {error}"));
            form.as_object().cloned().unwrap_or_default()
        };
        let (now, then) = (keys(now), keys(then));
        let names: BTreeSet<&String> = now.keys().chain(then.keys()).collect();
        for name in names {
            self.value(name, written(now.get(name)), written(then.get(name)));
        }
    }

    fn binding(&mut self, now: &Binding, then: &Binding) {
        self.value("CPUs", shown(now.cpus.as_ref()), shown(then.cpus.as_ref()));
        self.value("memory nodes", shown(now.mems.as_ref()), shown(then.mems.as_ref()));
    }

    fn environment(&mut self, now: &BTreeMap<String, String>, then: &BTreeMap<String, String>) {
        let names: BTreeSet<&String> = now.keys().chain(then.keys()).collect();
        for name in names {
            self.value(name, shown(now.get(name)), shown(then.get(name)));
        }
    }

    fn worker(&mut self, now: &WorkerPlan, then: &WorkerPlan) {
        let gpu = |worker: &WorkerPlan| {
            let gpu = worker.gpu.as_ref();
            shown(gpu.map(|gpu| gpu.uuid.as_ref().map_or(gpu.index.to_string(), |u| u.to_string())))
        };
        self.value("GPU", gpu(now), gpu(then));
        self.binding(&now.binding, &then.binding);
        self.value("threads", now.threads, then.threads);
        let (before, after) = (now.memory_limit_bytes, then.memory_limit_bytes);
        self.value("memory limit", shown(before), shown(after));
        let (before, after) = (now.device_memory_limit_bytes, then.device_memory_limit_bytes);
        self.value("device memory limit", shown(before), shown(after));
        self.environment(&now.env, &then.env);
    }
}

/// A JSON value as text, strings without quotes.
fn written(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "unset".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "unset".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Plan {
        let machine = crate::topology::builtin("dgx-1-v100").map(crate::topology::parse);
        let machine = machine.expect("built in").expect("right");
        let spec = crate::spec::parse(&format!("version: 1\n{text}"), "test").expect("right");
        let request = crate::spec::Request::of(spec).expect("right");
        crate::plan::plan(&machine, &request, &Default::default()).expect("a plan")
    }

    #[test]
    fn equal_plans_have_no_difference() {
        for text in ["", "engine: dask", "engine: command"] {
            assert_eq!(difference(&planned(text), &planned(text)), Vec::<String>::new());
        }
    }

    #[test]
    fn each_difference_names_the_process_and_both_values() {
        let between = |now: &str, then: &str| difference(&planned(now), &planned(then));
        for (now, then, line) in [
            ("gpus: \"0\"", "engine: command\ngpus: \"0\"", "cluster: engine native → command"),
            (
                "native: {placement: round-robin}",
                "native: {disk_limit: 1GB}",
                "cluster: placement round-robin → estimated-finish",
            ),
            ("", "native: {disk_limit: 1GB}", "cluster: disk_limit_bytes unset → 1000000000"),
            (
                "engine: dask",
                "engine: dask\ntls: {ca_file: a, cert: b, key: c}",
                "cluster: tls unset \
              → {\"ca_file\":\"a\",\"cert\":\"b\",\"key\":\"c\"}",
            ),
            ("", "verify: true", "cluster: verify false → true"),
            ("", "threads: 3", "gpu2: threads 1 → 3"),
            ("", "workers: 2", "gpu2: would go"),
            ("workers: 2", "cpu_workers: 1", "cpu0: would be new"),
            ("", "cpus: none", "gpu0: CPUs 0-19,40-59 → unset"),
            ("", "worker: {env: {A: b}}", "gpu0: A unset → b"),
        ] {
            let lines = between(now, then);
            assert!(lines.iter().any(|other| other == line), "{line:?} is not in {lines:#?}");
        }
    }
}
