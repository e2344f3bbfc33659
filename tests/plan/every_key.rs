//! Every key of a spec has an effect: the plan with it is another one than the plan without it.

use std::collections::BTreeSet;

use crate::compact::{caller, machine};
use crate::keys::{PLANNED, with};
use cuda_cluster::plan::{Plan, plan};
use cuda_cluster::spec::{self, Request};
use cuda_cluster::topology::Topology;
use serde_json::Value;

/// Each key that acts before there is a plan, and the test that sees it act: file and name.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("version", "tests/spec/mistakes.rs", "a_version_of_tomorrow"),
    ("topology", "tests/plan/commands.rs", "a_spec_names_its_machine"),
];

/// Reads a spec of this version, written as YAML without it.
fn read(spec: &Value) -> spec::ClusterSpec {
    let mut spec = spec.clone();
    spec["version"] = spec::VERSION.into();
    let text = serde_yaml::to_string(&spec).expect("YAML");
    spec::parse(&text, "test").unwrap_or_else(|error| panic!("{error} in\n{text}"))
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

#[cfg(feature = "launch")]
#[test]
fn a_program_can_set_every_key_and_it_means_what_it_means_in_a_file() {
    use cuda_cluster::cluster::Cluster;

    for (key, base, value) in PLANNED {
        let base: Value = serde_yaml::from_str(base).expect("YAML");
        let base = if base.is_null() { serde_json::json!({}) } else { base };
        let value: Value = serde_yaml::from_str(value).expect("YAML");
        let whole = with(&base, key, value.clone());
        // A list is one value.
        let (set, value) = match key.split_once('[') {
            Some((list, _)) => {
                let place = format!("/{}", list.replace('.', "/"));
                (list, whole.pointer(&place).expect("a list").clone())
            }
            None => (*key, value),
        };
        let built = Cluster::builder().spec(read(&base)).set(set, value).request();
        let built = built.unwrap_or_else(|error| panic!("{key}: {error}"));
        assert_eq!(Request::of(read(&whole)).expect("a request"), built, "{key}");
    }
}

#[test]
fn the_schemas_defaults_are_what_is_planned_without_the_key() {
    let schema = spec::schema();
    let mut checked = 0;
    for (key, base, _) in PLANNED {
        let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
        let section = match section {
            "" => &schema,
            section => {
                let told = &schema["properties"][section]["anyOf"][0]["$ref"];
                let told = told.as_str().unwrap_or_default().trim_start_matches("#/$defs/");
                &schema["$defs"][told]
            }
        };
        let Some(usual) = section["properties"][name].get("default") else { continue };
        let base: Value = serde_yaml::from_str(base).expect("YAML");
        let base = if base.is_null() { serde_json::json!({}) } else { base };
        let without = match base.pointer(&format!("/{}", key.replace('.', "/"))) {
            Some(_) => continue,
            None => effect(key, &base),
        };
        assert_eq!(without, effect(key, &with(&base, key, usual.clone())), "{key}: {usual}");
        checked += 1;
    }
    assert!(checked >= 30, "{checked}");
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
