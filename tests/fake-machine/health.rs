//! `health.json`: how the GPUs of a made-up machine are.
//!
//! *Invariant:* what is written is healthy until a test changes it.

use std::io;
use std::path::Path;

use cuda_cluster::topology::Topology;
use serde_json::{Map, Value, json};

const FILE: &str = "health.json";

/// Writes that all is well. From Ampere on, GPUs remap rows of memory; older ones retire pages.
pub(crate) fn write(machine: &Topology, root: &Path) -> io::Result<()> {
    let gpus = machine.gpus.iter().map(|gpu| {
        let mut health = json!({
            "ecc": true,
            "ecc_uncorrected": 0,
            "recovery_action": 0,
            "clocks_event_reasons": 1,
            "power_limit_mw": 700_000,
            "default_power_limit_mw": 700_000,
            "persistence": true,
        });
        let remaps = gpu.compute_capability.is_none_or(|capability| capability.major >= 8);
        if remaps {
            let rows = json!({
                "correctable": 0, "uncorrectable": 0, "pending": false, "failure": false,
            });
            health["remapped_rows"] = rows;
        } else {
            health["retired_pending"] = json!(false);
        }
        (gpu.index.to_string(), health)
    });
    let health = json!({ "confidential": false, "gpus": gpus.collect::<Map<_, _>>() });
    std::fs::write(root.join(FILE), serde_json::to_string(&health)?)
}

/// Changes what is told of one GPU, or of the machine.
pub(crate) fn merge(root: &Path, gpu: Option<u32>, facts: Value) -> io::Result<()> {
    let facts = match gpu {
        Some(gpu) => json!({ "gpus": { (gpu.to_string()): facts } }),
        None => facts,
    };
    let path = root.join(FILE);
    let mut health = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    patch(&mut health, facts);
    std::fs::write(path, serde_json::to_string(&health)?)
}

/// A JSON merge patch (RFC 7396).
fn patch(value: &mut Value, change: Value) {
    let Value::Object(change) = change else {
        *value = change;
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (key, change) in change {
        if change.is_null() {
            value.as_object_mut().expect("it is one now").remove(&key);
        } else {
            patch(&mut value[key], change);
        }
    }
}
