//! What every text of a spec must be, whatever its key: something, and without NUL bytes, which no
//! path, argument or variable can have. [`each`] visits the texts of a plan as well.
//!
//! *Invariant:* a key that is new is checked, too: the keys are those of the value's own text form.

use serde_json::Value;

use super::ClusterSpec;
use super::error::{Found, refuse};

/// Checks all texts.
pub(super) fn check(spec: &ClusterSpec) -> Result<(), Found> {
    let value = serde_json::to_value(spec)
        .unwrap_or_else(|error| panic!("a spec has a JSON form: {error}"));
    each("", &value, &one)
}

/// Visits every text of a value with its key, and also the name of each key.
pub fn each<E>(
    key: &str,
    value: &Value,
    visit: &impl Fn(&str, &str) -> Result<(), E>,
) -> Result<(), E> {
    match value {
        Value::String(text) => visit(key, text),
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(at, item)| each(&format!("{key}[{at}]"), item, visit))
        }
        Value::Object(entries) => entries.iter().try_for_each(|(name, value)| {
            let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            visit(if name.is_empty() { key } else { &path }, name)?;
            each(&path, value, visit)
        }),
        _ => Ok(()),
    }
}

fn one(key: &str, text: &str) -> Result<(), Found> {
    if text.contains('\0') {
        return refuse(key, format!("{text:?} has a NUL byte in it"), "leave it out");
    }
    if text.is_empty() && !may_be_empty(key) {
        return refuse(key, "it is empty", "give a value, or leave it out");
    }
    Ok(())
}

/// Values that a program is given as they are.
fn may_be_empty(key: &str) -> bool {
    key.contains("argv[") || key.starts_with("dask.config.") || key.contains(".env.")
}
