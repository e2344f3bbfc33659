//! Reads a spec's text, and says precisely what is wrong with it.
//!
//! Does not read files; the caller gives the text and the name to show for it.
//!
//! *Invariant:* what is returned has passed every check of `contradictions`.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use super::error::nearest;
use super::{ClusterSpec, Problem, SpecError, VERSION, contradictions};

/// Reads a spec. `origin` is what errors call the text: a file name.
///
/// # Errors
/// If the text is no YAML, has unknown keys or wrong values, has another version, or contradicts
/// itself.
pub fn parse(text: &str, origin: &str) -> Result<ClusterSpec, SpecError> {
    let spec: Option<ClusterSpec> =
        serde_yaml::from_str(text).map_err(|error| explain(&error, text, origin))?;
    let spec = spec.unwrap_or_default();
    let fail = |key: &str, problem| {
        let place = place_of(text, key);
        let problem = Box::new(problem);
        Err(SpecError { origin: origin.to_owned(), place, key: key.to_owned(), problem })
    };
    match spec.version {
        Some(VERSION) => {}
        Some(found) => return fail("version", Problem::Version { found, readable: VERSION }),
        None => return fail("", Problem::NoVersion),
    }
    match contradictions::check(&spec) {
        Ok(()) => Ok(spec),
        Err(found) => fail(&found.key, found.problem),
    }
}

/// The JSON Schema of a spec, for editors.
pub fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(ClusterSpec);
    schema.insert("title".to_owned(), "cuda-cluster spec".into());
    schema.insert("required".to_owned(), serde_json::json!(["version"]));
    schema.into()
}

/// Reads a section; an empty one (`ucx:` with every line below commented out) is the default.
pub(super) fn section<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Turns the YAML reader's error into ours.
fn explain(error: &serde_yaml::Error, text: &str, origin: &str) -> SpecError {
    let place = error.location().map(|place| (place.line(), place.column()));
    let whole = error.to_string();
    let message = match place {
        Some((line, column)) => {
            whole.replace(&format!(" at line {line} column {column}"), "").trim().to_owned()
        }
        None => whole,
    };
    // The reader puts the key path before its message: `ucx.nvlink: invalid type: …`.
    let (key, message) = match message.split_once(": ") {
        Some((path, rest)) if !path.contains(char::is_whitespace) => (path, rest),
        _ => ("", message.as_str()),
    };
    let (key, problem) = classify(key, message);
    let place = place_of(text, &key).filter(|_| !key.is_empty()).or(place);
    SpecError { origin: origin.to_owned(), place, key, problem: Box::new(problem) }
}

/// Recognises serde's sentences about unknown names.
fn classify(key: &str, message: &str) -> (String, Problem) {
    let quoted = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    if let Some(rest) = message.strip_prefix("unknown field ") {
        let names: Vec<String> = quoted(rest);
        if let Some((name, expected)) = names.split_first() {
            let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let nearest = nearest(name, expected.iter().map(String::as_str));
            return (path, Problem::UnknownKey { expected: expected.to_vec(), nearest });
        }
    }
    if let Some(rest) = message.strip_prefix("unknown variant ") {
        let names: Vec<String> = quoted(rest);
        if let Some((word, expected)) = names.split_first() {
            let nearest = nearest(word, expected.iter().map(String::as_str));
            let word = word.clone();
            let expected = expected.to_vec();
            return (key.to_owned(), Problem::UnknownWord { word, expected, nearest });
        }
    }
    let problem =
        match message.strip_prefix("invalid type: ").and_then(|m| m.split_once(", expected ")) {
            Some((found, expected)) => {
                Problem::Value { message: format!("{found} is not {}", people_say(expected)) }
            }
            None => Problem::Value { message: message.to_owned() },
        };
    (key.to_owned(), problem)
}

/// Rust's names of types in words.
fn people_say(expected: &str) -> String {
    match expected {
        "u8" | "u16" | "u32" | "u64" => "a whole number".to_owned(),
        "f64" => "a number".to_owned(),
        "a string" => "a text".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a map" => "a mapping of names to values".to_owned(),
        "a sequence" => "a list".to_owned(),
        other if other.starts_with("struct ") => "a section with keys of its own".to_owned(),
        other => other.to_owned(),
    }
}

/// Line and column of a key, from 1; the deepest part of the path that the text has.
///
/// `serde_yaml` keeps no places, but tells where an error occurred: so one is raised at the key.
fn place_of(text: &str, path: &str) -> Option<(usize, usize)> {
    let steps: Vec<String> =
        path.replace('[', ".").replace(']', "").split('.').map(str::to_owned).collect();
    (1..=steps.len()).rev().find_map(|depth| {
        let finder = Finder { path: &steps[..depth] };
        let error = finder.deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
        let place = error.location()?;
        error.to_string().contains(FOUND).then(|| (place.line(), place.column()))
    })
}

/// The message of the error that is raised at the place that is looked for.
const FOUND: &str = "the place that was looked for";

/// Walks down a path and fails where it ends.
#[derive(Clone, Copy)]
struct Finder<'a> {
    path: &'a [String],
}

/// Reads a key, and fails at the one that is looked for.
struct Key<'a> {
    wanted: Option<&'a str>,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<String, E> {
        if self.wanted == Some(key) { Err(E::custom(FOUND)) } else { Ok(key.to_owned()) }
    }
}

impl<'de> DeserializeSeed<'de> for Finder<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Finder<'_> {
    fn scalar<E: de::Error>(self) -> Result<(), E> {
        if self.path.is_empty() { Err(E::custom(FOUND)) } else { Ok(()) }
    }
}

impl<'de> Visitor<'de> for Finder<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.path.split_first() else { return self.scalar() };
        let wanted = rest.is_empty().then_some(first.as_str());
        while let Some(key) = map.next_key_seed(Key { wanted })? {
            if key == *first {
                map.next_value_seed(Finder { path: rest })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.path.split_first() else { return self.scalar() };
        let wanted: Option<usize> = first.parse().ok();
        for at in 0usize.. {
            let path = if wanted == Some(at) { rest } else { self.path };
            let more = if wanted == Some(at) {
                seq.next_element_seed(Finder { path })?.is_some()
            } else {
                seq.next_element::<IgnoredAny>()?.is_some()
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.scalar()
    }
}
