//! Reading a plan's text: JSON or YAML, of this version and no other.
//!
//! *Invariant:* a text is refused with the key that is wrong, and never half understood.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::PlanTextError;
use super::form::{Plan, VERSION};

impl Plan {
    /// Reads a plan, as JSON or YAML.
    ///
    /// # Errors
    /// If it is of another version, has a key that no plan has, or a value that does not fit.
    pub fn parse(text: &str) -> Result<Self, PlanTextError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        read(text).map_err(|error| match read::<Versioned>(text) {
            Ok(Versioned { version }) if version != Some(VERSION.into()) => {
                PlanTextError::Version { found: version, readable: VERSION }
            }
            _ => error,
        })
    }
}

/// Any version of a plan.
#[derive(Deserialize)]
struct Versioned {
    version: Option<u64>,
}

fn read<T: DeserializeOwned>(text: &str) -> Result<T, PlanTextError> {
    // JSON is YAML too, and is read faster as what it is.
    if text.trim_start().starts_with('{')
        && let Ok(plan) = serde_json::from_str(text)
    {
        return Ok(plan);
    }
    serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
        let message = error.inner().to_string();
        let path = error.path().to_string();
        let path = if path == "." { "" } else { path.as_str() };
        // The path does not end in a key that the form does not have.
        let unknown =
            message.split_once("unknown field `").and_then(|(_, rest)| rest.split_once('`'));
        let key = match unknown {
            Some((name, _)) if path.is_empty() => name.to_owned(),
            Some((name, _)) if !path.ends_with(&format!(".{name}")) && path != name => {
                format!("{path}.{name}")
            }
            _ => path.to_owned(),
        };
        PlanTextError::Key { key, message }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn written() -> Value {
        let spec = crate::spec::parse("version: 1\ncpu_workers: 1\n", "test").expect("right");
        let request = crate::spec::Request::of(spec).expect("right");
        let machine = crate::topology::parse(crate::topology::builtin("dgx-1-v100").expect("one"));
        let machine = machine.expect("a machine");
        let plan = crate::plan::plan(&machine, &request, &Default::default()).expect("a plan");
        json!(plan)
    }

    /// The refusal of a plan in which the value at a place is another.
    fn refused(place: &str, key: &str, value: Value) -> String {
        let mut plan = written();
        plan.pointer_mut(place).expect(place)[key] = value;
        let as_json = Plan::parse(&plan.to_string()).expect_err("JSON").to_string();
        let yaml = serde_yaml::to_string(&plan).expect("YAML");
        assert_eq!(
            Plan::parse(&yaml).expect_err("YAML").to_string().split(" at line").next(),
            as_json.split(" at line").next()
        );
        as_json
    }

    #[test]
    fn what_no_plan_has_is_refused_with_its_key() {
        for (place, key, value, told) in [
            ("", "engine_options", json!({}), "'engine_options': "),
            ("/workers/0", "thread", json!(1), "'workers[0].thread': "),
            ("/workers/0", "threads", json!("many"), "'workers[0].threads': "),
            ("/workers/0", "cpus", json!("many"), "'workers[0]"),
            ("/workers/8/why/0", "becaus", json!(""), "'workers[8].why[0].becaus': "),
            ("/engine", "dask", json!({}), "'engine"),
            ("/engine/native", "placement", json!("best"), "'engine.native.placement': "),
            ("/engine/native", "plaecment", json!("best"), "'engine.native.plaecment': "),
            ("/requirements", "infiniband", json!(true), "'requirements.infiniband': "),
            ("/supervision", "grace", json!("soon"), "'supervision.grace': "),
        ] {
            let error = refused(place, key, value);
            assert!(error.starts_with(told), "{place} {key}: {error}");
        }
    }

    #[test]
    fn another_version_is_named_whatever_else_is_in_the_text() {
        for text in ["{\"version\": 1, \"engine\": \"native\"}", "engine: dask\nversion: 3\n"] {
            let error = Plan::parse(text).expect_err("another version");
            assert!(matches!(error, PlanTextError::Version { found: Some(_), .. }), "{error}");
        }
        let error = Plan::parse("workers: []").expect_err("no version");
        assert_eq!(error, PlanTextError::Version { found: None, readable: VERSION });
        let error = Plan::parse("gpus: [").expect_err("no YAML");
        assert!(matches!(error, PlanTextError::Key { .. }), "{error}");
    }
}
