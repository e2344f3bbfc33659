//! Every key of a spec has an effect: the plan with it is another one than the plan without it.

#[allow(dead_code, reason = "each test file uses a part")]
mod compact;

use std::collections::BTreeSet;

use compact::{caller, machine};
use cuda_cluster::plan::{Plan, plan};
use cuda_cluster::spec::{self, Request};
use cuda_cluster::topology::Topology;
use serde_json::Value;

/// Each key that changes a plan: what the spec has besides it, and a value that is not the default.
///
/// Values are YAML. A key that the spec has already is set to the other value.
const PLANNED: &[(&str, &str, &str)] = &[
    ("name", "", "other"),
    ("engine", "", "dask"),
    ("simulate", "", "true"),
    ("strict", "ucx: {library: system}", "true"),
    ("verify", "", "true"),
    ("gpus", "", "0-3"),
    ("workers", "", "2"),
    ("workers_per_gpu", "", "2"),
    ("cpu_workers", "", "2"),
    ("threads", "", "3"),
    ("busy_gpus", "", "skip"),
    ("display_gpus", "", "skip"),
    ("cpus", "", "split"),
    ("scheduler_cores", "cpus: split", "2"),
    ("memory.policy", "", "bind"),
    ("memory.limit", "", "1GB"),
    ("device.memory_limit", "", "1GB"),
    ("rmm.pool_size", "", "1GB"),
    ("rmm.maximum_pool_size", "rmm: {pool_size: 1GB}", "2GB"),
    ("rmm.managed", "engine: dask", "true"),
    ("rmm.async", "engine: dask", "true"),
    ("rmm.release_threshold", "{engine: dask, rmm: {async: true}}", "1GB"),
    ("rmm.log_directory", "{engine: dask, rmm: {pool_size: 1GB}}", "/tmp/rmm"),
    ("rmm.track_allocations", "{engine: dask, rmm: {pool_size: 1GB}}", "true"),
    ("rmm.set_allocator_for", "{engine: dask, rmm: {pool_size: 1GB}}", "[cupy]"),
    ("ucx.nvlink", "", "true"),
    ("ucx.infiniband", "", "true"),
    ("ucx.tcp", "", "true"),
    ("ucx.rdmacm", "", "true"),
    ("ucx.net_devices", "", "pin"),
    ("ucx.exclude_nics", "ucx: {infiniband: true}", "[mlx5_0]"),
    ("ucx.control_device", "ucx: {infiniband: true}", "eth0"),
    ("ucx.compat", "", "dask"),
    ("ucx.preset", "", "none"),
    ("ucx.version", "", "1.16"),
    ("ucx.library", "", "/opt/ucx/lib/libucp.so.0"),
    ("ucx.env", "", "{UCX_LOG_LEVEL: info}"),
    ("scheduler.host", "engine: dask", "10.0.0.5"),
    ("scheduler.interface", "engine: dask", "eth0"),
    ("scheduler.port", "engine: dask", "9000"),
    ("scheduler.dashboard", "engine: dask", "false"),
    ("scheduler.dashboard_address", "engine: dask", "\":9001\""),
    ("scheduler.file", "engine: dask", "/tmp/scheduler.json"),
    ("worker.ports", "engine: dask", "9000:9100"),
    ("worker.listen_address", "{engine: dask, workers: 1}", "tcp://10.0.0.5:9000"),
    ("worker.contact_address", "{engine: dask, workers: 1}", "tcp://10.0.0.5:9000"),
    ("worker.local_directory", "", "/scratch"),
    ("worker.pid_file", "", "/tmp/pid"),
    ("worker.resources", "", "{MEM: 2}"),
    ("worker.env", "", "{A: b}"),
    ("supervision.restart", "", "never"),
    ("supervision.limit", "", "2"),
    ("supervision.window", "", "5s"),
    ("supervision.backoff", "", "5s"),
    ("supervision.backoff_max", "", "5s"),
    ("supervision.healthy_after", "", "5s"),
    ("supervision.ready_within", "", "5s"),
    ("supervision.grace", "", "50s"),
    ("supervision.scheduler_death", "", "end-cluster"),
    ("supervision.answer_within", "", "5s"),
    ("supervision.unresponsive", "", "restart"),
    ("supervision.gpu_free_within", "", "5s"),
    ("ulimits.core", "", "0"),
    ("ulimits.memlock", "", "unlimited"),
    ("ulimits.nofile", "", "4096"),
    ("ulimits.nproc", "", "4096"),
    ("ulimits.stack", "", "unlimited"),
    ("logs.rotate_at", "", "1MB"),
    ("logs.keep", "", "9"),
    ("tls.ca_file", "{engine: dask, tls: {ca_file: a, cert: b, key: c}}", "other"),
    ("tls.cert", "{engine: dask, tls: {ca_file: a, cert: b, key: c}}", "other"),
    ("tls.key", "{engine: dask, tls: {ca_file: a, cert: b, key: c}}", "other"),
    ("dask.protocol", "engine: dask", "ucxx"),
    ("dask.python", "engine: dask", "/usr/bin/python3"),
    ("dask.start_method", "engine: dask", "spawn"),
    ("dask.join", "engine: dask", "tcp://10.0.0.1:8786"),
    ("dask.pre_import", "engine: dask", "[numpy]"),
    ("dask.preload", "engine: dask", "[mine]"),
    ("dask.death_timeout", "engine: dask", "5s"),
    ("dask.lifetime", "engine: dask", "1h"),
    ("dask.adapt_minimum", "engine: dask", "1"),
    ("dask.start_workers", "engine: dask", "1"),
    ("dask.dashboard_prefix", "engine: dask", "/proxy"),
    ("dask.worker_class", "engine: dask", "mine.Worker"),
    ("dask.worker_names", "engine: dask", "gpu"),
    ("dask.worker_name", "{engine: dask, dask: {join: \"tcp://10.0.0.1:8786\"}}", "mine"),
    ("dask.enable_cudf_spill", "engine: dask", "true"),
    ("dask.cudf_spill_stats", "{engine: dask, dask: {enable_cudf_spill: true}}", "2"),
    ("dask.config", "engine: dask", "{distributed.worker.memory.target: \"0.6\"}"),
    ("command.argv", "engine: command", "[echo]"),
    ("command.visible_devices", "engine: command", "own"),
    ("native.program", "", "/opt/mine"),
    ("native.placement", "", "round-robin"),
    ("native.record_events", "", "events"),
    ("native.disk_limit", "", "1GB"),
    ("overrides[0].match.worker", "overrides: [{match: {worker: gpu0}, threads: 3}]", "gpu1"),
    ("overrides[0].match.gpu", "overrides: [{match: {worker: \"*\"}, threads: 3}]", "1"),
    ("overrides[0].match.numa", "overrides: [{match: {worker: \"*\"}, threads: 3}]", "1"),
    ("overrides[0].threads", "overrides: [{match: {worker: gpu0}}]", "3"),
    ("overrides[0].cpus", "overrides: [{match: {worker: gpu0}}]", "none"),
    ("overrides[0].net_devices", "overrides: [{match: {worker: gpu0}}]", "[mlx5_0]"),
    ("overrides[0].memory_limit", "overrides: [{match: {worker: gpu0}}]", "1GB"),
    ("overrides[0].device_memory_limit", "overrides: [{match: {worker: gpu0}}]", "1GB"),
    ("overrides[0].rmm_pool_size", "overrides: [{match: {worker: gpu0}}]", "1GB"),
    ("overrides[0].env", "overrides: [{match: {worker: gpu0}}]", "{A: b}"),
];

/// Each key that acts before there is a plan, and the test that sees it act: file and name.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("version", "tests/spec.rs", "a_version_of_tomorrow"),
    ("topology", "tests/plan.rs", "a_spec_names_its_machine"),
];

/// Reads a spec of this version, written as YAML without it.
fn read(spec: &Value) -> spec::ClusterSpec {
    let mut spec = spec.clone();
    spec["version"] = spec::VERSION.into();
    let text = serde_yaml::to_string(&spec).expect("YAML");
    spec::parse(&text, "test").unwrap_or_else(|error| panic!("{error} in\n{text}"))
}

/// A spec with the value at a key.
fn with(base: &Value, key: &str, value: Value) -> Value {
    let mut spec = base.clone();
    let mut place = &mut spec;
    for step in key.split('.') {
        let (name, at) = match step.strip_suffix("[0]") {
            Some(name) => (name, Some(0)),
            None => (step, None),
        };
        place = &mut place[name];
        if let Some(at) = at {
            place = &mut place[at];
        }
    }
    *place = value;
    spec
}

/// A machine on which every key can make a difference.
fn of_all_kinds(key: &str) -> Topology {
    let mut machine = machine("dgx-h100");
    match key {
        "busy_gpus" => machine.gpus[6].processes = vec![4711],
        "display_gpus" => machine.gpus[7].display = Some(true),
        _ => {}
    }
    machine
}

/// What a plan makes processes do; not what it says about itself.
fn effect(key: &str, spec: &Value) -> Value {
    let request = Request::of(read(spec)).unwrap_or_else(|error| panic!("{key}: {error}"));
    let plan = plan(&of_all_kinds(key), &request, &caller());
    shown(plan.unwrap_or_else(|error| panic!("{key}: {error}")))
}

/// A plan without what it says about itself.
fn shown(plan: Plan) -> Value {
    let mut plan = serde_json::to_value(plan).expect("JSON");
    let plan_keys = plan.as_object_mut().expect("an object");
    plan_keys.remove("origins");
    plan_keys.remove("notes");
    without_reasons(&mut plan);
    plan
}

fn without_reasons(value: &mut Value) {
    match value {
        Value::Object(keys) => {
            keys.remove("why");
            keys.values_mut().for_each(without_reasons);
        }
        Value::Array(items) => items.iter_mut().for_each(without_reasons),
        _ => {}
    }
}

#[test]
fn every_key_changes_what_is_planned() {
    for (key, base, value) in PLANNED {
        let base: Value = serde_yaml::from_str(base).expect("YAML");
        let base = if base.is_null() { serde_json::json!({}) } else { base };
        let value: Value = serde_yaml::from_str(value).expect("YAML");
        assert_ne!(effect(key, &base), effect(key, &with(&base, key, value)), "{key}: no effect");
    }
}

/// The keys of a schema that have values and no keys of their own, by path.
fn leaves(root: &Value, schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.trim_start_matches("#/$defs/");
        return leaves(root, &root["$defs"][name], path, found);
    }
    let ways = schema["anyOf"].as_array().into_iter().flatten();
    let way = ways.clone().find(|way| way["type"] != "null");
    if let Some(only) = way.filter(|_| ways.count() == 2) {
        return leaves(root, only, path, found);
    }
    let keys = schema["properties"].as_object().filter(|_| !is_one_value(schema));
    match (keys, schema.get("items")) {
        (Some(keys), _) => {
            for (key, schema) in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(root, schema, &path, found);
            }
        }
        (None, Some(items)) if items.get("$ref").is_some() => {
            let mut below = BTreeSet::new();
            leaves(root, items, &format!("{path}[0]"), &mut below);
            // A list of plain values is one value.
            if below.len() == 1 {
                below = BTreeSet::from([path.to_owned()]);
            }
            found.extend(below);
        }
        _ => drop(found.insert(path.to_owned())),
    }
}

/// Forms of one value that have keys, like `gpus: {count: 2}`.
fn is_one_value(schema: &Value) -> bool {
    schema.get("anyOf").is_some() || schema.get("oneOf").is_some()
}

#[test]
fn no_key_of_the_schema_is_left_out() {
    let schema = spec::schema();
    let mut known = BTreeSet::new();
    leaves(&schema, &schema, "", &mut known);
    let planned = PLANNED.iter().map(|(key, ..)| *key);
    let elsewhere = ELSEWHERE.iter().map(|(key, ..)| *key);
    let named: Vec<String> = planned.chain(elsewhere).map(str::to_owned).collect();
    let once: BTreeSet<String> = named.iter().cloned().collect();
    assert_eq!(once.len(), named.len(), "a key is named twice");
    assert_eq!(once, known, "this file and the schema differ");
    for (key, file, test) in ELSEWHERE {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let text = std::fs::read_to_string(path).expect("a file of tests");
        assert!(text.contains(test), "{key}: there is no {test} in {file}");
    }
}

/// Whether a note is about a key, or about the section that it is in.
fn is_noted(plan: &Plan, key: &str) -> bool {
    let inside = |part: &str| {
        key.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    plan.notes.iter().any(|note| inside(&note.about))
}

#[test]
fn under_every_engine_a_key_has_an_effect_or_is_noted_or_refused() {
    let mut silent = Vec::new();
    for engine in ["native", "dask", "command"] {
        for (key, base, value) in PLANNED.iter().filter(|(key, ..)| *key != "engine") {
            let base: Value = serde_yaml::from_str(base).expect("YAML");
            let mut base = if base.is_null() { serde_json::json!({}) } else { base };
            base["engine"] = engine.into();
            let value: Value = serde_yaml::from_str(value).expect("YAML");
            let planned = |spec: &Value| {
                let mut spec = spec.clone();
                spec["version"] = spec::VERSION.into();
                let text = serde_yaml::to_string(&spec).expect("YAML");
                let request = Request::of(spec::parse(&text, "test").ok()?).ok()?;
                plan(&of_all_kinds(key), &request, &caller()).ok()
            };
            let with = with(&base, key, value);
            let (Some(without), Some(plan)) = (planned(&base), planned(&with)) else { continue };
            let differs = shown(without) != shown(plan.clone());
            // The others have no dashboard to leave out.
            let is_so = *key == "scheduler.dashboard" && engine != "dask";
            if !differs && !is_so && !is_noted(&plan, key) {
                silent.push(format!("{engine}: {key}"));
            }
        }
    }
    assert_eq!(silent, [""; 0]);
}
