//! Reading a plan's text: JSON or YAML, of this version and no other.
//!
//! *Invariant:* a text is either read completely or refused with the key that is wrong.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::PlanTextError;
use super::form::{Plan, VERSION};
use crate::text::{self, Form, ReadError};

/// Largest plan in bytes; a plan of a thousand workers has 10 MiB.
pub const TEXT_LIMIT: usize = 64 << 20;

impl Plan {
    /// Reads a plan, as JSON or YAML.
    ///
    /// # Errors
    /// If it is of another version, has a key that no plan has, a value that does not fit, or lacks
    /// what every plan has ([`Plan::check`]).
    pub fn parse(text: &str) -> Result<Self, PlanTextError> {
        let plan: Self = read(text).map_err(|error| match read::<Versioned>(text) {
            Ok(Versioned { version }) if version != Some(VERSION.into()) => {
                PlanTextError::Version { found: version, readable: VERSION }
            }
            _ => PlanTextError::Text(error),
        })?;
        plan.check()?;
        Ok(plan)
    }
}

/// Any version of a plan.
#[derive(Deserialize)]
struct Versioned {
    version: Option<u64>,
}

fn read<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    // JSON is YAML too, but the JSON reader is faster.
    let form = if text.trim_start().starts_with('{') { Form::Json } else { Form::Yaml };
    text::read(text, form, TEXT_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RESERVED;
    use serde_json::{Value, json};

    fn written() -> Value {
        let spec = crate::spec::parse("version: 1\ncpu_workers: 1\n", "test").expect("right");
        let request = crate::spec::Request::of(spec).expect("right");
        let machine = crate::topology::parse(crate::topology::builtin("dgx-1-v100").expect("one"));
        let machine = machine.expect("a machine");
        let plan = crate::plan::plan(&machine, &request, &Default::default()).expect("a plan");
        json!(plan)
    }

    /// The key that is reported for a plan in which one value was replaced.
    fn refused(place: &str, key: &str, value: Value) -> String {
        let mut plan = written();
        plan.pointer_mut(place).expect(place)[key] = value;
        let yaml = serde_yaml::to_string(&plan).expect("YAML");
        let [json, yaml] = [plan.to_string(), yaml].map(|text| match Plan::parse(&text) {
            Err(PlanTextError::Text(error)) => error,
            other => panic!("{place} {key}: {other:?}"),
        });
        assert_eq!((&json.key, &json.problem), (&yaml.key, &yaml.problem));
        json.key
    }

    #[test]
    fn what_no_plan_has_is_refused_with_its_key() {
        for (place, key, value, told) in [
            ("", "engine_options", json!({}), "engine_options"),
            ("/workers/0", "thread", json!(1), "workers[0].thread"),
            ("/workers/0", "threads", json!("many"), "workers[0].threads"),
            // The value tells which key of a binding it is.
            ("/workers/0", "cpus", json!("many"), "workers[0]"),
            ("/workers/8/why/0", "becaus", json!(""), "workers[8].why[0].becaus"),
            ("/engine", "dask", json!({}), "engine.dask"),
            ("/engine/native", "placement", json!("best"), "engine.native.placement"),
            ("/engine/native", "plaecment", json!("best"), "engine.native.plaecment"),
            ("/requirements", "infiniband", json!(true), "requirements.infiniband"),
            ("/supervision", "grace", json!("soon"), "supervision.grace"),
        ] {
            assert_eq!(refused(place, key, value), told, "{place} {key}");
        }
    }

    #[test]
    fn what_every_plan_has_is_in_a_plan_that_was_edited() {
        let edited = |edit: &dyn Fn(&mut Value)| {
            let mut plan = written();
            edit(&mut plan);
            match Plan::parse(&plan.to_string()) {
                Err(PlanTextError::Unsound(unsound)) => unsound.to_string(),
                other => panic!("{other:?}"),
            }
        };
        for name in ["../../y", "", ".hidden", "a/b", "gpu 0", "gpu0"].iter().chain(&RESERVED) {
            let said = edited(&|plan| plan["workers"][1]["name"] = json!(name));
            assert!(said.starts_with("workers[1].name: "), "{name}: {said}");
        }
        let long = edited(&|plan| plan["workers"][0]["name"] = json!("g".repeat(65)));
        assert!(long.starts_with("workers[0].name: "), "{long}");
        let said = edited(&|plan| plan["workers"] = json!([]));
        assert_eq!(said, "workers: a plan has at least one");
        let said = edited(&|plan| plan["workers"][1]["rank"] = json!(4));
        assert_eq!(said, "workers[1].rank: 4 is not the worker's place, 1");
        let said = edited(&|plan| plan["workers"][1]["threads"] = json!(0));
        assert!(said.starts_with("workers[1].threads: 0 is not meant; from 1 to "), "{said}");
        let said = edited(&|plan| plan["supervision"]["log_keep"] = json!(4_000_000_000_u32));
        assert!(said.starts_with("supervision.log_keep: more than 1000 are not meant"), "{said}");
        let said = edited(&|plan| plan["scheduler"] = Value::Null);
        assert_eq!(said, "scheduler: the native engine needs one");
        let said = edited(&|plan| plan["workers"][1]["env"]["A"] = json!("b\0c"));
        assert_eq!(said, r#"workers[1].env.A: "b\0c" has a NUL byte in it"#);
        let said = edited(&|plan| plan["scheduler"]["env"]["A\0"] = json!("b"));
        assert_eq!(said, r#"scheduler.env.A\0: "A\0" has a NUL byte in it"#);
        let said = edited(&|plan| plan["engine"] = json!({"command": {"argv": ["a", "b\0"]}}));
        assert_eq!(said, r#"engine.command.argv[1]: "b\0" has a NUL byte in it"#);
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
        assert!(matches!(error, PlanTextError::Text(_)), "{error}");
    }
}
