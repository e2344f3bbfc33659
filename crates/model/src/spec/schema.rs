//! The JSON Schema of a spec, from which editors complete, and with which they check.
//!
//! An editor sees a spec before its variables are put in, so a value may also be a text with one.
//!
//! *Invariant:* one key at a time, it accepts what the reader accepts and refuses what the reader
//! refuses (`tests/spec/schema.rs`). What contradicts another key is the reader's alone.

use serde_json::{Map, Value, json};

use super::contradictions::{ALLOCATORS, MOST_LOGS, MOST_THREADS, START_METHODS};
use super::network::PROTOCOLS;
use super::{ClusterSpec, VERSION};

/// The name of this version's schema.
const ID: &str = "urn:cuda-cluster:spec:1";

/// Digits with a suffix.
const BYTES: &str = r"(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)\s*(?:[bB]|[kKmMgGtT](?:[iI]?[bB])?)";
/// Digits.
const WHOLE: &str = "[0-9][0-9_]*";
/// More than 0 and at most 1.
const FRACTION: &str = r"0?\.[0-9_]*[1-9][0-9_]*|1\.0*";
const PORT: &str =
    "6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4}";
const GPU: &str = concat!(
    "(?:[0-9]{1,3}|10[01][0-9]|102[0-3])(?::(?:[0-9]{1,3}|10[01][0-9]|102[0-3]))?",
    "|(?:GPU|MIG)-[0-9A-Za-z/-]{1,92}",
    r"|(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\.[0-7]",
);
const RANGE: &str = "[0-9]{1,4}-[0-9]{1,4}";
const NIC: &str = "[A-Za-z0-9_.:@-]{1,64}";

/// The schema.
pub fn schema() -> Value {
    let mut schema: Value = schemars::schema_for!(ClusterSpec).into();
    schema["title"] = "cuda-cluster spec".into();
    schema["$id"] = ID.into();
    schema["required"] = json!(["version"]);
    schema["patternProperties"] = json!({"^(x-.*|\\$schema)$": {}});
    schema["properties"]["version"] = json!({
        "description": schema["properties"]["version"]["description"],
        "enum": [VERSION],
    });
    for (name, more) in forms() {
        let form = &mut schema["$defs"][name];
        let description = form["description"].take();
        *form = more;
        if description.is_string() {
            form["description"] = description;
        }
    }
    for (section, key, more) in more() {
        let place = match section {
            "" => &mut schema["properties"][key],
            section => &mut schema["$defs"][section]["properties"][key],
        };
        for (keyword, value) in more.as_object().into_iter().flatten() {
            place[keyword] = value.clone();
        }
    }
    each_property(&mut schema, finish);
    schema["$defs"]["Variable"] =
        json!({"type": "string", "pattern": "\\$\\{", "description": "a text with a variable"});
    schema
}

/// A text of one of these forms, or with a variable.
fn text(forms: &[&str]) -> Value {
    let forms = forms.join("|");
    json!({"type": "string", "pattern": format!("^\\s*(?:{forms})\\s*$|\\$\\{{")})
}

/// How values are written.
fn forms() -> Vec<(&'static str, Value)> {
    let whole = json!({"type": "integer", "minimum": 0});
    let fraction = json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1});
    let size = [BYTES, WHOLE, FRACTION];
    let number = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)\s*";
    let unit = r"(?:ms|s|m|min|h|d)\s*";
    let span = format!("(?:{number}{unit})*{number}(?:{unit})?");
    let list = |one: &str| format!("(?:{one})(?:\\s*,\\s*(?:{one}))*");
    let most = format!("\\s*(?:unlimited|{BYTES}|{WHOLE})\\s*");
    let one = json!({"anyOf": [whole, text(&[&most])]});
    let gpu = format!("{GPU}|{RANGE}");
    let gpus = json!({"type": "integer", "minimum": 0, "maximum": 1023});
    let named = json!({"anyOf": [gpus, text(&[GPU])]});
    let several = json!({"anyOf": [gpus, text(&[&gpu])]});
    let choose = json!({"$ref": "#/$defs/ChooseGpus"});
    let every = json!({"anyOf": [
        gpus,
        text(&["all", "none", &list(&gpu)]),
        {"type": "array", "items": several},
        choose,
    ]});
    let nics = json!({"anyOf": [
        {"type": "string", "pattern": format!("^\\s*{}\\s*$|\\{{", list(NIC))},
        {"type": "array", "minItems": 1, "items": {
            "anyOf": [text(&[NIC]), {"type": ["number", "boolean"]}],
        }},
    ]});
    let with_examples = |mut form: Value, examples: Value| {
        form["examples"] = examples;
        form
    };
    vec![
        (
            "ClusterName",
            json!({"anyOf": [
                text(&["[A-Za-z0-9][A-Za-z0-9._-]{0,39}"]),
                {"type": "number", "minimum": 0},
                {"type": "boolean"},
            ]}),
        ),
        (
            "Size",
            with_examples(
                json!({"anyOf": [whole, fraction, text(&size)]}),
                json!(["5GB", "5000MiB", 0.8]),
            ),
        ),
        (
            "Limit",
            with_examples(
                json!({"anyOf": [whole, fraction, text(&["auto", "default", "none", &size.join("|")])]}),
                json!(["auto", "none", "5GB", 0.8]),
            ),
        ),
        (
            "Ulimit",
            with_examples(
                json!({"anyOf": [whole, text(&[&most, &format!("(?:{most}):(?:{most})")]), {
                    "type": "object",
                    "properties": {"soft": one, "hard": one},
                    "required": ["soft", "hard"],
                    "additionalProperties": false,
                }]}),
                json!(["unlimited", 4096, "64MiB", "1024:4096"]),
            ),
        ),
        (
            "Span",
            with_examples(
                json!({"anyOf": [
                    {"type": "number", "minimum": 0, "maximum": 320_000_000}, text(&[&span]),
                ]}),
                json!(["250ms", "30s", "1m30s"]),
            ),
        ),
        (
            "PortRange",
            with_examples(
                json!({"anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 65535},
                    text(&[&format!("(?:{PORT})(?::(?:{PORT}))?")]),
                ]}),
                json!([8786, "8786:8800"]),
            ),
        ),
        (
            "UcxVersion",
            with_examples(
                json!({"anyOf": [{"type": "number", "not": {"type": "integer"}}, text(&["[0-9]+\\.[0-9]+(?:\\..*)?"])]}),
                json!(["1.18"]),
            ),
        ),
        ("GpuName", with_examples(named, json!([0, "0000:07:00.0"]))),
        ("GpuSelection", with_examples(every, json!(["all", "0-3,6"]))),
        (
            "Bytes",
            with_examples(
                json!({"anyOf": [whole, text(&[BYTES, WHOLE])]}),
                json!(["5GB", "64MiB"]),
            ),
        ),
        ("NetDevices", with_examples(nics, json!(["auto", "mlx5_0:1"]))),
    ]
}

/// What the types do not say: keys of sections, and keywords.
fn more() -> Vec<(&'static str, &'static str, Value)> {
    let names = |pattern: &str| json!({"propertyNames": {"pattern": pattern}});
    let least = |least: u32| json!({"minimum": least});
    // Numbers with points are an address of four, or none.
    let part = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    // A number above the largest port, 65535.
    let beyond =
        "0*(?:6553[6-9]|655[4-9][0-9]|65[6-9][0-9]{2}|6[6-9][0-9]{3}|[7-9][0-9]{4}|[1-9][0-9]{5,})";
    let address = json!({
        "type": ["string", "integer", "boolean", "null"],
        "minimum": 0,
        "pattern": format!(
            "^(?!-)(?!.*:{beyond}$)(?!(?:.*://)?[0-9]*\\.[0-9.]*(?::[^:]*)?$)\\S+$\
             |^(?!.*:{beyond}$)(?:.*://)?{part}(?:\\.{part}){{3}}(?::[^:]*)?$|\\$\\{{"
        ),
    });
    let scalars = json!({"type": ["string", "number", "boolean", "null"]});
    let name = "^[A-Za-z_][A-Za-z0-9_]*$";
    let threads = json!({"minimum": 1, "maximum": MOST_THREADS});
    let mut more = vec![
        ("", "workers", least(1)),
        ("", "workers_per_gpu", json!({"minimum": 1, "maximum": 64})),
        ("", "cpu_workers", json!({"maximum": 1024})),
        ("", "threads", threads.clone()),
        ("LogSpec", "keep", json!({"maximum": MOST_LOGS})),
        ("ChooseGpus", "count", least(1)),
        ("OverrideSpec", "threads", threads),
        ("OverrideSpec", "cpus", json!({"anyOf": [{"enum": ["local", "none"]}, {"type": "null"}]})),
        (
            "DaskSpec",
            "config",
            json!({"additionalProperties": {"type": ["string", "number", "boolean"]}}),
        ),
        ("OverrideSpec", "env", names(name)),
        ("OverrideSpec", "env", json!({"additionalProperties": scalars})),
        ("UcxSpec", "env", names("^UCX(PY)?_[A-Za-z0-9_]*$")),
        ("WorkerSpec", "env", names("^(?!UCX_)[A-Za-z_][A-Za-z0-9_]*$")),
        ("SchedulerSpec", "env", names("^(?!UCX_)[A-Za-z_][A-Za-z0-9_]*$")),
        (
            "CommandSpec",
            "argv",
            // A program may be given empty arguments.
            json!({"minItems": 1, "items": {"type": ["string", "number", "boolean"]}}),
        ),
        (
            "ProgramSpec",
            "argv",
            json!({"minItems": 1, "items": {"type": ["string", "number", "boolean"]}}),
        ),
        (
            "ProgramSpec",
            "name",
            json!({
                "type": ["string", "boolean", "null"],
                "pattern": "^[A-Za-z][A-Za-z0-9_-]{0,31}$|\\$\\{",
            }),
        ),
        ("ProgramSpec", "workers", least(1)),
        ("DaskSpec", "start_workers", least(1)),
        ("DaskSpec", "protocol", words(PROTOCOLS)),
        ("DaskSpec", "start_method", words(START_METHODS)),
        (
            "DaskSpec",
            "join",
            json!({
                "type": ["string", "number", "boolean", "null"], "minimum": 0, "pattern": "^(?!-).",
            }),
        ),
        (
            "DaskSpec",
            "hosts",
            json!({"items": {
                "type": ["string", "number", "boolean"],
                "pattern": "^(?!-)[A-Za-z0-9._@:%+\\[\\]-]+$|\\$\\{",
            }}),
        ),
        (
            "DaskSpec",
            "hosts_program",
            json!({
                "type": ["string", "number", "boolean", "null"], "minimum": 0, "pattern": "^(?!-).",
            }),
        ),
        (
            "DaskSpec",
            "ssh",
            json!({"minItems": 1, "items": {"type": ["string", "number", "boolean"]}}),
        ),
        ("RmmSpec", "set_allocator_for", json!({"items": {"enum": ALLOCATORS}})),
    ];
    for key in ["host", "interface", "dashboard_address"] {
        more.push(("SchedulerSpec", key, address.clone()));
    }
    for key in ["listen_address", "contact_address"] {
        more.push(("WorkerSpec", key, address.clone()));
    }
    more
}

fn words(words: &[&str]) -> Value {
    let words = words.iter().copied().map(Value::from).chain([Value::Null]);
    json!({"enum": words.collect::<Vec<_>>()})
}

fn each_property(schema: &mut Value, finish: fn(&mut Map<String, Value>)) {
    let properties = |schema: &mut Value| {
        let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
        properties
            .into_iter()
            .flatten()
            .filter_map(|(_, one)| one.as_object_mut())
            .for_each(finish);
    };
    properties(schema);
    let sections = schema.get_mut("$defs").and_then(Value::as_object_mut);
    sections.into_iter().flatten().for_each(|(_, section)| properties(section));
}

/// Adds a default that the description names, and that a section may be empty and a scalar a text
/// with a variable.
fn finish(property: &mut Map<String, Value>) {
    if let Some(usual) = property.get("description").and_then(Value::as_str).and_then(usual) {
        property.entry("default").or_insert(usual);
    }
    let kept = ["description", "default", "examples"];
    let (said, rule): (Map<_, _>, Map<_, _>) = std::mem::take(property)
        .into_iter()
        .partition(|(keyword, _)| kept.contains(&keyword.as_str()));
    *property = said;
    let has_parts = |it: &Value| ["array", "object"].iter().any(|kind| it == kind);
    let has_parts = match rule.get("type") {
        Some(Value::Array(types)) => types.iter().any(has_parts),
        kind => kind.is_some_and(has_parts),
    };
    let is_reference = rule.get("$ref").and_then(Value::as_str);
    let variable = json!({"$ref": "#/$defs/Variable"});
    let more = if is_reference.is_some_and(|name| name.ends_with("Spec")) {
        json!({"type": "null"})
    } else if has_parts || is_plain_text(&rule) {
        property.extend(rule);
        unquoted(property);
        return;
    } else {
        variable
    };
    let ways = match rule.get("anyOf") {
        Some(Value::Array(ways)) => ways.iter().cloned().chain([more]).collect(),
        _ => vec![Value::Object(rule), more],
    };
    property.insert("anyOf".to_owned(), ways.into());
}

/// What is written without quotes may be a text, too.
fn unquoted(property: &mut Map<String, Value>) {
    if is_plain_text(property) {
        property.insert("type".to_owned(), json!(["string", "number", "boolean", "null"]));
        property.insert("minLength".to_owned(), 1.into());
    } else if property.get("items") == Some(&json!({"type": "string"})) {
        let items = json!({"type": ["string", "number", "boolean"], "minLength": 1});
        property.insert("items".to_owned(), items);
    }
}

/// Whether any text will do.
fn is_plain_text(rule: &Map<String, Value>) -> bool {
    let text = rule.get("type").is_some_and(|types| *types == json!(["string", "null"]));
    text && !["enum", "pattern"].iter().any(|keyword| rule.contains_key(*keyword))
}

/// The value of "Default: `local`." or "Default: 1." in a description.
fn usual(description: &str) -> Option<Value> {
    let (_, rest) = description.split_once("Default:")?;
    let rest = rest.trim_start();
    let end = rest
        .find(". ")
        .or_else(|| rest.find(".\n"))
        .or_else(|| rest.strip_suffix('.').map(str::len))?;
    let word = &rest[..end];
    match word.strip_prefix('`').and_then(|word| word.strip_suffix('`')) {
        Some(word) if !word.contains(['`', ' ']) => Some(word.into()),
        Some(_) => None,
        None => serde_json::from_str(word).ok().filter(|value: &Value| !value.is_string()),
    }
}
