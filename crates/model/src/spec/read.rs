//! Reads a spec's text, with precise errors.
//!
//! Does not read files; the caller gives the text and the name to show for it.
//!
//! *Invariant:* a spec that is returned has passed every check of `contradictions`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};

use super::{ClusterSpec, Problem, SpecError, VERSION, contradictions, substitution};
use crate::text::{self, Document};

/// Largest spec, in bytes.
pub const SIZE_LIMIT: usize = 1 << 20;

/// Reads a spec of at most [`SIZE_LIMIT`] bytes, which names no variables of an environment. Errors
/// call the text `origin`, which is a file's name.
///
/// # Errors
/// If the text is not YAML, has unknown keys or wrong values, has another version, contradicts
/// itself, or has a `${NAME}` without a default.
pub fn parse(text: &str, origin: &str) -> Result<ClusterSpec, SpecError> {
    parse_with(text, origin, &|_| None)
}

/// Reads a spec as [`parse`] does, with the variables that it names (`${NAME}`).
///
/// # Errors
/// As [`parse`], and if a variable that has no default is not set, or is not UTF-8.
pub fn parse_with(
    text: &str,
    origin: &str,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> Result<ClusterSpec, SpecError> {
    let text = text::without_mark(text);
    let told = |error: text::ReadError| SpecError {
        place: error.place.map(|place| place.key),
        ..SpecError::new(origin, error.key, Box::new(error.problem.into()))
    };
    if text.len() > SIZE_LIMIT {
        let problem = text::Problem::TooLong { bytes: text.len(), limit: SIZE_LIMIT };
        return Err(SpecError::new(origin, String::new(), Box::new(problem.into())));
    }
    let mut document = Document::parse(text).map_err(told)?;
    substitution::apply(&mut document, text, origin, variable)?;
    document.retain(|key| !is_ignored(key));
    let spec: Option<ClusterSpec> = document.read().map_err(|(first, others)| SpecError {
        others: others.into_iter().map(told).collect(),
        ..told(first)
    })?;
    let spec = spec.unwrap_or_default();
    let fail = |key: &str, problem| {
        let place = text::find(text, key, 1).map(|place| place.key);
        Err(SpecError { place, ..SpecError::new(origin, key.to_owned(), Box::new(problem)) })
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

/// Reads values of keys that a program has set, as nested objects. Whether they contradict each
/// other shows when all are merged ([`Request::merge_as`](super::Request::merge_as)).
///
/// # Errors
/// If a key is unknown, or a value wrong, or there is another version.
pub fn from_keys(keys: &serde_json::Value, origin: &str) -> Result<ClusterSpec, SpecError> {
    let told = |error: text::ReadError| {
        // The text that has a place is none that the program has written.
        SpecError::new(origin, error.key, Box::new(error.problem.into()))
    };
    let text = keys.to_string();
    let document = Document::parse(&text).map_err(told)?;
    let spec: Option<ClusterSpec> = document.read().map_err(|(first, others)| SpecError {
        others: others.into_iter().map(told).collect(),
        ..told(first)
    })?;
    let spec = spec.unwrap_or_default();
    match spec.version {
        Some(found) if found != VERSION => {
            let problem = Problem::Version { found, readable: VERSION };
            Err(SpecError::new(origin, "version".to_owned(), Box::new(problem)))
        }
        _ => Ok(spec),
    }
}

/// Whether a key of the whole is not for us: editors read `$schema`, and `x-` begins what people
/// keep for themselves, like anchors.
fn is_ignored(key: &str) -> bool {
    key == "$schema" || key.starts_with("x-")
}

/// Reads a section; an empty one (`ucx:` with every line below commented out) is the default.
pub(super) fn section<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a mapping of names to texts. Numbers become texts; no name may occur twice.
pub(super) fn variables<'de, D>(
    deserializer: D,
) -> Result<Option<BTreeMap<String, String>>, D::Error>
where
    D: Deserializer<'de>,
{
    struct Variables;
    impl<'de> Visitor<'de> for Variables {
        type Value = Option<BTreeMap<String, String>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a mapping of names to texts")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut variables = BTreeMap::new();
            while let Some(name) = map.next_key::<String>()? {
                if variables.contains_key(&name) {
                    return Err(de::Error::custom(text::given_twice(&name)));
                }
                let Scalar(value) = map.next_value()?;
                variables.insert(name, value);
            }
            Ok(Some(variables))
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }
    }
    deserializer.deserialize_any(Variables)
}

/// A text, or a number or a boolean as a text.
pub(super) struct Scalar(String);

impl schemars::JsonSchema for Scalar {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Scalar".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["string", "number", "boolean", "null"] })
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a number, or true or false")
            }

            fn visit_bool<E: de::Error>(self, is: bool) -> Result<Scalar, E> {
                Ok(Scalar(is.to_string()))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_u128<E: de::Error>(self, number: u128) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_i128<E: de::Error>(self, number: i128) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }
        }
        deserializer.deserialize_any(Text)
    }
}
