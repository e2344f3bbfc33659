//! How two plans of one cluster differ, for somebody who asks for a cluster that already runs.
//!
//! *Invariant:* equal plans have no difference, and every difference names the process and the
//! value before and after.

use std::collections::{BTreeMap, BTreeSet};

use super::{Binding, Plan, WorkerPlan};

/// What would change from `now` to `then`, a line each.
pub fn difference(now: &Plan, then: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let mut cluster = Changes { about: "cluster", lines: &mut lines };
    cluster.value("engine", now.engine, then.engine);
    cluster.value("machine", named(now), named(then));
    if now.engine_options != then.engine_options {
        cluster.value("engine options", &now.engine_options, &then.engine_options);
    }
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

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "unset".to_owned(), |value| value.to_string())
}
