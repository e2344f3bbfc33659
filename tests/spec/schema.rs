//! The schema and the reader agree, key by key.

use crate::keys::{PLANNED, with};
use cuda_cluster::spec;
use jsonschema::Validator;
use serde_json::{Value, json};

/// Values of many kinds, as YAML writes them.
const VALUES: &[&str] = &[
    "0",
    "1",
    "2",
    "63",
    "-1",
    "1.5",
    "0.5",
    "99999999",
    "true",
    "false",
    "~",
    "''",
    "'x y'",
    "word",
    "-word",
    "auto",
    "none",
    "default",
    "unlimited",
    "all",
    "native",
    "dask",
    "tcp",
    "fork",
    "cupy",
    "local",
    "split",
    "5GB",
    "5 GiB",
    "5000MiB",
    "1_000",
    "0.8",
    "'0.8'",
    "'1.0'",
    "'1.5'",
    "5XB",
    "GB",
    "-5GB",
    ".5GB",
    "30s",
    "250ms",
    "1m30s",
    "30s1m30x",
    "1h",
    "soon",
    "8786",
    "'1024:4096'",
    "'4096:1024'",
    "'1024:unlimited'",
    "{soft: 1, hard: 4KiB}",
    "{soft: 1}",
    "'8786:8800'",
    "'8786:'",
    "99999",
    "'99999'",
    "1.18",
    "'1.18'",
    "'1.18.0'",
    "v1",
    "'0-3'",
    "'0-3,6'",
    "GPU-8a1c",
    "'0000:07:00.0'",
    "'07:00.0'",
    "'0:1'",
    "'0:1:2:3'",
    "'mlx5_0:1'",
    "'mlx5_0:1,mlx5_1:1'",
    "'mlx5_{gpu}:1'",
    "[0, 1]",
    "['0-1']",
    "[]",
    "['mlx5_0:1']",
    "['x y']",
    "[cupy]",
    "[word]",
    "[1, true]",
    "[[1]]",
    "{}",
    "{A: b}",
    "{A: 1}",
    "{A: true}",
    "{A: [1]}",
    "{'1x': 1}",
    "{UCX_LOG_LEVEL: info}",
    "{count: 2}",
    "{count: 0}",
    "{a: ~}",
    "10.0.0.1",
    "'[::1]:80'",
    "'tcp://10.0.0.1:8786'",
    "/tmp/file",
    "'${NAME:-1}'",
    "'a${NAME:-b}c'",
];

/// Reasons of the reader that no schema can give: they are about other keys, or about how much a text
/// means.
const BEYOND: &[&str] = &[
    "too few for a worker",
    "begins larger than",
    "there is nothing to run",
    "\"0:1\" is not a port",
    "\"4096:1024\" is not a port",
    "\"4096:1024\" is not a limit: 'unlimited'",
    "no process can promise",
    "TLS needs all three",
    "no condition is given",
    "says no protocol",
    "is nothing unusual",
];

fn parsed(spec: &Value) -> Result<(), String> {
    let text = serde_yaml::to_string(spec).expect("YAML");
    spec::parse(&text, "test").map(drop).map_err(|error| error.to_string())
}

#[test]
fn one_key_at_a_time_the_schema_accepts_what_the_reader_accepts() {
    let schema: Validator = jsonschema::validator_for(&spec::schema()).expect("a schema");
    let (mut wrong, mut seen) = (Vec::new(), [0, 0]);
    for (key, base, _) in PLANNED {
        let base: Value = serde_yaml::from_str(base).expect("YAML");
        let mut base = if base.is_null() { json!({}) } else { base };
        base["version"] = spec::VERSION.into();
        assert_eq!(parsed(&base), Ok(()), "{key}");
        for text in VALUES {
            // What a variable would become is not known yet.
            let value: Value = serde_yaml::from_str(text).expect(text);
            let spec = with(&base, key, value.clone());
            let (read, fits) = (parsed(&spec), schema.is_valid(&spec));
            let has_variable = text.contains("${");
            let beyond = |why: &String| BEYOND.iter().any(|known| why.contains(known));
            let several =
                |why: &String| ["not a list", "not a mapping"].iter().any(|it| why.contains(it));
            let agree = match &read {
                Err(why) if why.contains("the variable") => continue,
                Err(why) if beyond(why) => fits,
                Err(why) if has_variable => fits != several(why),
                read => read.is_ok() == fits,
            };
            seen[usize::from(fits)] += 1;
            if !agree {
                wrong.push(format!("{key}: {text}: schema {fits}, {read:?}"));
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 1000), "{seen:?}");
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
