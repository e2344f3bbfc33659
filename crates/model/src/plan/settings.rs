//! What a plan settles besides places: the engine's settings, limits and supervision, as words.
//!
//! Does not explain; `why` has the reasons of what was weighed.
//!
//! *Invariant:* whatever is not as usual is named, so that nothing of a plan is only in its JSON.

use std::collections::BTreeMap;

use serde_json::Value;

use super::engine::{CommandPlan, EnginePlan, NativePlan};
use super::form::{Plan, Supervision};
use super::options;
use super::variables::TLS;
use crate::spec::{Bootstrap, EngineKind, MemoryPolicy, UcxPreset};
use crate::units::HumanBytes;

/// Where the scheduler listens, which is shown elsewhere.
const LISTENS: [&str; 4] = ["host", "interface", "scheduler_ports", "scheduler_ports_required"];

/// What only a scheduler of the cluster's own has.
const OF_A_SCHEDULER: [&str; 5] = [
    "scheduler_ports",
    "scheduler_ports_required",
    "scheduler_file",
    "dashboard_address",
    "scheduler_death",
];

/// What only dashboards have.
const OF_DASHBOARDS: [&str; 2] = ["dashboard_address", "dashboard_prefix"];

/// As long as a machine.
const TABLES: [&str; 6] =
    ["gb_per_s", "simulated_links", "names", "hosts", "there", "resources_by_kind"];

/// Each setting and its value: those that are not as usual, or all.
pub fn settings(plan: &Plan, all: bool) -> Vec<(String, String)> {
    let kind = plan.engine.kind();
    let mut hidden = TABLES.to_vec();
    hidden.extend(if plan.scheduler.is_some() { &LISTENS[..] } else { &OF_A_SCHEDULER });
    if matches!(&plan.engine, EnginePlan::Dask(dask) if !dask.dashboard) {
        hidden.extend(OF_DASHBOARDS);
    }
    let mut rows = Rows { all, hidden, rows: Vec::new() };
    if let EnginePlan::Dask(dask) = &plan.engine {
        rows.rows.push(("protocol".to_owned(), dask.protocol.clone()));
        let hosts: Vec<&str> = dask.hosts.iter().map(|one| one.host.as_str()).collect();
        if !hosts.is_empty() {
            rows.rows.push(("hosts over ssh".to_owned(), hosts.join(", ")));
        }
    }
    rows.of(inner(&plan.engine), &inner(&usual(kind)));
    let threads = |worker: &super::WorkerPlan| Some(worker.threads.to_string());
    rows.of_workers(plan, "threads", threads, Some("1"));
    if let EnginePlan::Dask(dask) = &plan.engine {
        let kind =
            |worker: &super::WorkerPlan| words(&value(dask.resources_by_kind.get(&worker.name)?));
        rows.of_workers(plan, "resources", kind, None);
    }
    let policy = |worker: &super::WorkerPlan| {
        let policy = worker.binding.memory_policy;
        (policy != MemoryPolicy::None).then(|| policy.to_string())
    };
    rows.of_workers(plan, "memory policy", policy, Some("preferred"));
    rows.of_workers(plan, "rmm", |worker| words(&value(worker.rmm.as_ref()?)), None);
    rows.of_ucx(plan);
    rows.of(value(&plan.requirements), &value(&super::Requirements::default()));
    rows.of(value(&plan.supervision), &value(&Supervision::default()));
    rows.rows
}

/// The settings of an engine that was asked for nothing.
fn usual(kind: EngineKind) -> EnginePlan {
    match kind {
        EngineKind::Native => EnginePlan::Native(NativePlan::default()),
        EngineKind::Dask => EnginePlan::Dask(Box::new(options::dask(&Default::default()))),
        EngineKind::Command => EnginePlan::Command(CommandPlan {
            bootstrap: Bootstrap::USUAL.to_vec(),
            ..CommandPlan::default()
        }),
    }
}

fn value(part: &impl serde::Serialize) -> Value {
    serde_json::to_value(part).unwrap_or_default()
}

fn inner(engine: &EnginePlan) -> Value {
    let keys = value(engine);
    keys.as_object().and_then(|keys| keys.values().next().cloned()).unwrap_or_default()
}

struct Rows {
    all: bool,
    /// Keys that are shown elsewhere, or have no meaning for this plan.
    hidden: Vec<&'static str>,
    rows: Vec<(String, String)>,
}

impl Rows {
    fn of(&mut self, part: Value, usual: &Value) {
        let Value::Object(keys) = part else { return };
        for (key, value) in keys {
            let shown = self.rows.iter().any(|(name, _)| *name == key);
            if shown || self.hidden.contains(&key.as_str()) || !self.all && usual[&key] == value {
                continue;
            }
            self.rows.extend(row(&key, &value));
        }
    }

    /// What UCX was asked for, and what became of NVLink where it was not required.
    fn of_ucx(&mut self, plan: &Plan) {
        // The row says more than the requirement alone.
        self.hidden.push("nvlink");
        let Some(ucx) = &plan.ucx else { return };
        let asked = |key: &str| plan.origins.contains_key(key);
        if plan.requirements.nvlink || asked("ucx.nvlink") || self.all {
            self.rows.push(("nvlink".to_owned(), nvlink(plan).to_owned()));
        }
        if let Some(version) = ucx.version.filter(|_| asked("ucx.version") || self.all) {
            self.rows.push(("ucx version".to_owned(), version.to_string()));
        }
        if ucx.preset != UcxPreset::default() || self.all {
            self.rows.push(("ucx preset".to_owned(), ucx.preset.to_string()));
        }
    }

    /// A value that each worker has: one row if all have the same, else one for each.
    fn of_workers(
        &mut self,
        plan: &Plan,
        name: &str,
        value: impl Fn(&super::WorkerPlan) -> Option<String>,
        usual: Option<&str>,
    ) {
        let mut values: BTreeMap<Option<String>, Vec<&str>> = BTreeMap::new();
        for worker in &plan.workers {
            values.entry(value(worker)).or_default().push(&worker.name);
        }
        let one = values.len() == 1;
        for (value, workers) in values {
            let is_usual = one && value.as_deref() == usual && !self.all;
            if let Some(value) = value.filter(|_| !is_usual) {
                let of = if one { String::new() } else { format!(" ({})", workers.join(", ")) };
                self.rows.push((name.to_owned(), value + &of));
            }
        }
    }
}

/// Whether NVLink is required, and otherwise whether UCX may use it.
fn nvlink(plan: &Plan) -> &'static str {
    let list = plan.workers.iter().find_map(|worker| worker.env.get(TLS));
    let listed = list.filter(|list| *list != "all").map(|list| match list.strip_prefix('^') {
        Some(others) => !others.split(',').any(|lane| lane == "cuda_ipc"),
        None => list.split(',').any(|lane| lane == "cuda_ipc"),
    });
    match (plan.requirements.nvlink, plan.origins.contains_key("ucx.nvlink")) {
        (true, _) => "required",
        (false, true) => "excluded",
        (false, false) if listed == Some(false) => "not asked for: 'cuda_ipc' is left out",
        (false, false) => "used where it is there, not required",
    }
}

/// A key and its value in words; none for a value that is not there.
fn row(key: &str, value: &Value) -> Option<(String, String)> {
    let (name, words) = match (key.strip_suffix("_bytes"), value.as_u64()) {
        (Some(name), Some(bytes)) => (name, HumanBytes(bytes).to_string()),
        _ if key == "kill_percent" => {
            let of = |percent| format!("at {percent} % of its memory limit");
            ("killed", value.as_f64().map_or("never for its memory".to_owned(), of))
        }
        // A limit that is none.
        _ if key == "ulimits" => (key, words(&limits(value))?),
        _ if key == "programs" => (key, programs(value)?),
        _ => (key, words(value)?),
    };
    Some((name.replace('_', " "), words))
}

/// Several programs of a job, with the ranks of each.
fn programs(value: &Value) -> Option<String> {
    let one = |program: &Value| {
        let (name, ranks) = (words(&program["name"])?, words(&program["workers"])?);
        let argv = program["argv"].as_array().into_iter().flatten().filter_map(words);
        let argv: Vec<String> = argv.collect();
        let number = if ranks == "1" { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        let command = if argv.is_empty() { String::new() } else { format!(": {}", argv.join(" ")) };
        Some(format!("{name} ({number}){command}"))
    };
    let all: Vec<String> = value.as_array()?.iter().filter_map(one).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

fn limits(value: &Value) -> Value {
    let limits = value.as_object().into_iter().flatten();
    let one = |limit: &Value| limit.as_u64().map_or("unlimited".to_owned(), |it| it.to_string());
    let most = |limit: &Value| match limit.as_object() {
        None => one(limit),
        Some(both) => format!("{}:{}", one(&both["soft"]), one(&both["hard"])),
    };
    limits.map(|(name, limit)| (name.clone(), Value::from(most(limit)))).collect()
}

/// A value in words; none for one that is not there.
fn words(value: &Value) -> Option<String> {
    let words = match value {
        Value::Null => return None,
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().filter_map(words).collect::<Vec<_>>().join(", "),
        Value::Object(keys) => {
            let keys = keys.iter().filter(|(_, value)| **value != Value::Bool(false));
            let rows = keys.filter_map(|(key, value)| row(key, value));
            rows.map(|(key, value)| format!("{key} {value}")).collect::<Vec<_>>().join(", ")
        }
    };
    (!words.is_empty()).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Plan {
        let spec = crate::spec::parse(&format!("version: 1\n{text}"), "test").expect(text);
        let request = crate::spec::Request::of(spec).expect(text);
        let machine = crate::topology::parse(crate::topology::builtin("dgx-1-v100").expect("one"));
        let machine = machine.expect("a machine");
        crate::plan::plan(&machine, &request, &Default::default()).expect(text)
    }

    fn shown(text: &str) -> Vec<String> {
        let rows = settings(&planned(text), false).into_iter();
        rows.map(|(name, value)| format!("{name}: {value}")).collect()
    }

    #[test]
    fn what_is_not_as_usual_is_named() {
        assert_eq!(shown(""), [""; 0]);
        assert_eq!(shown("engine: dask"), ["protocol: tcp"]);
        let dask = "engine: dask\nthreads: 2\nrmm: {pool_size: 8GiB, async: true}\n\
                    dask: {adapt_minimum: 2, config: {a.b: \"1\"}}\n\
                    worker: {local_directory: /scratch}\nulimits: {memlock: unlimited, core: 0, nofile: '1024:4KiB'}\n\
                    tls: {ca_file: a, cert: b, key: c}\nsupervision: {grace: 1m}\n\
                    scheduler: {host: 10.0.0.1}\n";
        assert_eq!(
            shown(dask),
            [
                "protocol: tls",
                "adapt minimum: 2",
                "config: a.b 1",
                "dashboard address: 10.0.0.1:8787",
                "local directory: /scratch",
                "tls: ca file a, cert b, key c",
                "threads: 2",
                "rmm: asynchronous yes, pool 8.0 GiB",
                "grace: 1m",
                "ulimits: core 0, memlock unlimited, nofile 1024:4096",
            ]
        );
        assert_eq!(
            shown("engine: dask\ngpus: [0, 3]\ncpu_workers: 1\nthreads: 2"),
            [
                "protocol: tcp",
                "threads: 2",
                "resources: CPU 2 (cpu0)",
                "resources: GPU 2 (gpu0, gpu3)",
                "memory policy: preferred (gpu0, gpu3)",
            ]
        );
        let one =
            "rmm: {pool_size: 1GiB}\noverrides: [{match: {worker: gpu7}, rmm_pool_size: 2GiB}]";
        assert_eq!(
            shown(one),
            [
                "rmm: pool 1.0 GiB (gpu0, gpu1, gpu2, gpu3, gpu4, gpu5, gpu6)",
                "rmm: pool 2.0 GiB (gpu7)"
            ]
        );
    }

    #[test]
    fn several_programs_are_named_with_their_ranks_and_commands() {
        let text = "engine: command\ncommand: {programs: [{name: trainer, workers: 4, \
                    argv: [python, train.py]}, {name: watch, workers: 1}]}";
        let said = "programs: trainer (4 ranks): python train.py; watch (1 rank)";
        assert_eq!(shown(text), [said]);
    }

    #[test]
    fn what_became_of_nvlink_is_told_apart() {
        let nvlink = |text: &str| {
            let rows = settings(&planned(text), true);
            rows.into_iter().find(|(name, _)| name == "nvlink").map(|(_, value)| value)
        };
        for (text, said) in [
            ("", Some("used where it is there, not required")),
            ("engine: dask\nucx: {library: system}", Some("used where it is there, not required")),
            ("ucx: {infiniband: true}", Some("not asked for: 'cuda_ipc' is left out")),
            ("ucx: {nvlink: true}", Some("required")),
            ("ucx: {nvlink: false}", Some("excluded")),
            ("engine: dask", None),
        ] {
            assert_eq!(nvlink(text).as_deref(), said, "{text}");
        }
    }

    #[test]
    fn what_ucx_was_asked_for_is_named() {
        let asked = "ucx: {version: 1.16, preset: none}";
        assert_eq!(shown(asked), ["ucx version: 1.16", "ucx preset: none"]);
        let plan = value(&planned(asked));
        assert_eq!(plan["ucx"], serde_json::json!({"version": "1.16", "preset": "none"}));
    }

    #[test]
    fn what_nothing_uses_is_not_named() {
        let names = |text: &str| -> Vec<String> {
            settings(&planned(text), true).into_iter().map(|(name, _)| name).collect()
        };
        let own = names("engine: dask");
        let joined = names("engine: dask\ndask: {join: 'tcp://10.0.0.1:8786'}");
        let of_a_scheduler = ["dashboard address", "scheduler death"];
        for name in of_a_scheduler {
            assert!(own.iter().any(|known| known == name), "{name}: {own:?}");
            assert!(joined.iter().all(|known| known != name), "{name}: {joined:?}");
        }
        assert!(joined.iter().all(|name| !name.starts_with("scheduler")), "{joined:?}");
        let without = names("engine: dask\nscheduler: {dashboard: false}");
        assert!(without.iter().all(|name| !name.starts_with("dashboard ")), "{without:?}");
        let command = names("engine: command\nrmm: {pool_size: 1GB}\nthreads: 2");
        assert!(command.iter().all(|name| name != "rmm"), "{command:?}");
    }

    #[test]
    fn when_workers_are_killed_for_their_memory_is_what_dask_is_configured_with() {
        let made = |text: &str, exported: &[&str]| {
            let text = format!("version: 1\ncpu_workers: 1\ngpus: none\n{text}");
            let spec = crate::spec::parse(&text, "test").expect("a spec");
            let request = crate::spec::Request::of(spec).expect("a request");
            let mut caller = crate::plan::CallerEnvironment::default();
            let name = crate::plan::TERMINATE_VARIABLE.to_owned();
            caller
                .variables
                .extend(exported.iter().map(|value| (name.clone(), (*value).to_owned())));
            let plan = crate::plan::plan(&Default::default(), &request, &caller)?;
            let rows = settings(&plan, true);
            let row = rows.into_iter().find(|(name, _)| name == "killed");
            Ok::<_, crate::plan::PlanError>(row.expect("a row").1)
        };
        let asked = |share: &str| {
            let config = format!("config: {{distributed.worker.memory.terminate: '{share}'}}");
            format!("engine: dask\ndask: {{{config}}}")
        };
        let usual = "at 95 % of its memory limit";
        let never = "never for its memory";
        for (text, exported, shown) in [
            ("engine: dask", &[][..], usual),
            (&asked("0.55"), &[], "at 55 % of its memory limit"),
            (&asked("False"), &[], never),
            ("engine: dask", &["false"], never),
            (&asked("0.95"), &["false"], usual),
            ("engine: native", &["false"], usual),
        ] {
            assert_eq!(made(text, exported).expect(text), shown, "{text} {exported:?}");
        }
        let error = made(&asked("often"), &[]).expect_err("no share").to_string();
        assert!(error.contains("distributed.worker.memory.terminate"), "{error}");
        let error = made("engine: dask", &["often"]).expect_err("no share").to_string();
        assert!(error.contains(crate::plan::TERMINATE_VARIABLE), "{error}");
    }

    #[test]
    fn all_of_them_are_named_when_asked_for() {
        let rows = settings(&planned("engine: dask"), true);
        for name in ["restart", "ready within", "worker class", "fork", "threads", "dashboard"] {
            assert!(rows.iter().any(|(known, _)| known == name), "{name}: {rows:?}");
        }
    }
}
