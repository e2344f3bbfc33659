//! Reads a spec's text, and says precisely what is wrong with it.
//!
//! Does not read files; the caller gives the text and the name to show for it.
//!
//! *Invariant:* what is returned has passed every check of `contradictions`.

use std::cell::Cell;
use std::collections::BTreeMap;
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
    // Editors on Windows begin a file with it and do not show it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let read = serde_yaml::Deserializer::from_str(text);
    let spec: Option<ClusterSpec> =
        serde_path_to_error::deserialize(read).map_err(|error| explain(&error, text, origin))?;
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

/// Reads a mapping of names to texts; numbers become texts, and no name may come twice.
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
                    return Err(de::Error::custom(format!("{TWICE} `{name}`")));
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

/// A text, or a number as a text.
pub(super) struct Scalar(String);

impl schemars::JsonSchema for Scalar {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Scalar".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["string", "number"] })
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a number; put words like true into quotes")
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

/// How serde, and we after it, begin the message about a name that comes twice.
const TWICE: &str = "duplicate field";

/// Turns the YAML reader's error into ours.
fn explain(
    error: &serde_path_to_error::Error<serde_yaml::Error>,
    text: &str,
    origin: &str,
) -> SpecError {
    if let Err(error) = serde_yaml::from_str::<IgnoredAny>(text) {
        return no_yaml(&error, text, origin);
    }
    let place = error.inner().location().map(|place| (place.line(), place.column()));
    let message = without_place(error.inner());
    // The reader puts a key path of its own, less precise, before some messages.
    let message = match message.split_once(": ") {
        Some((path, rest)) if is_path(path) => rest,
        _ => message.as_str(),
    };
    let path = error.path().to_string();
    // `?` stands for a place inside of a text that is no YAML.
    let path = if path == "." || path.contains('?') { "" } else { path.as_str() };
    let (key, problem) = classify(path, message);
    let nth = if matches!(problem, Problem::Twice) { 2 } else { 1 };
    let place = nth_place_of(text, &key, nth).filter(|_| !key.is_empty()).or(place);
    SpecError { origin: origin.to_owned(), place, key, problem: Box::new(problem) }
}

/// The error of a text that is no YAML at all.
fn no_yaml(error: &serde_yaml::Error, text: &str, origin: &str) -> SpecError {
    let place = error.location().map(|place| (place.line(), place.column()));
    let tab = place.and_then(|(line, _)| Some((line, column_of_tab(text, line)?)));
    let problem = match tab {
        Some(_) => Problem::Tab,
        None => Problem::Syntax { message: without_place(error) },
    };
    let problem = Box::new(problem);
    SpecError { origin: origin.to_owned(), place: tab.or(place), key: String::new(), problem }
}

/// Column, from 1, of a tab in a line's indentation.
fn column_of_tab(text: &str, line: usize) -> Option<usize> {
    let line = text.lines().nth(line.checked_sub(1)?)?;
    let indentation = line.len() - line.trim_start().len();
    line[..indentation].find('\t').map(|at| at + 1)
}

/// The YAML reader's message without the place, which stands before it.
fn without_place(error: &serde_yaml::Error) -> String {
    let whole = error.to_string();
    error.location().map_or_else(
        || whole.clone(),
        |place| {
            let place = format!(" at line {} column {}", place.line(), place.column());
            whole.replace(&place, "").trim().to_owned()
        },
    )
}

/// Whether the beginning of a message is a key path rather than words.
fn is_path(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '[' | ']' | '?');
    !text.is_empty() && text.chars().all(plain)
}

/// Recognises serde's sentences about names.
fn classify(path: &str, message: &str) -> (String, Problem) {
    let quoted: Vec<String> = message.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let names = quoted.split_first();
    // The path ends in the key itself where the reader had gone down to it.
    let key_of = |name: &str| match path {
        "" => name.to_owned(),
        path if path == name || path.ends_with(&format!(".{name}")) => path.to_owned(),
        path => format!("{path}.{name}"),
    };
    match names {
        Some((name, expected)) if message.starts_with("unknown field ") => {
            let nearest = nearest(name, expected.iter().map(String::as_str));
            (key_of(name), Problem::UnknownKey { expected: expected.to_vec(), nearest })
        }
        Some((word, expected)) if message.starts_with("unknown variant ") => {
            let nearest = nearest(word, expected.iter().map(String::as_str));
            let (word, expected) = (word.clone(), expected.to_vec());
            (path.to_owned(), Problem::UnknownWord { word, expected, nearest })
        }
        Some((name, _)) if message.starts_with(TWICE) => (key_of(name), Problem::Twice),
        Some((name, _)) if message.starts_with("missing field ") => {
            (path.to_owned(), Problem::Value { message: format!("'{name}' is missing") })
        }
        _ => (path.to_owned(), Problem::Value { message: in_words(message) }),
    }
}

/// serde's sentence about a wrong type, as people would say it.
fn in_words(message: &str) -> String {
    let parts = message.strip_prefix("invalid type: ").or(message.strip_prefix("invalid value: "));
    let Some((found, expected)) = parts.and_then(|rest| rest.split_once(", expected ")) else {
        return message.to_owned();
    };
    let found = match found {
        "sequence" => "a list".to_owned(),
        "map" => "a mapping".to_owned(),
        "unit value" => "an empty value".to_owned(),
        other => {
            let bare = ["string ", "integer ", "boolean ", "floating point "];
            let bare = bare.iter().find_map(|kind| other.strip_prefix(kind)).unwrap_or(other);
            // serde quotes digits that fit into no usual integer, and names the type that has them.
            let bare =
                bare.strip_suffix(" as u128").or(bare.strip_suffix(" as i128")).unwrap_or(bare);
            bare.trim_matches('`').to_owned()
        }
    };
    format!("{found} is not {}", people_say(expected))
}

/// Rust's names of types in words.
fn people_say(expected: &str) -> String {
    match expected {
        "u8" => format!("a whole number from 0 to {}", u8::MAX),
        "u16" => format!("a whole number from 0 to {}", u16::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" => format!("a whole number from 0 to {}", u64::MAX),
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
fn place_of(text: &str, path: &str) -> Option<(usize, usize)> {
    nth_place_of(text, path, 1)
}

/// As [`place_of`], of the `nth` key with this path.
///
/// `serde_yaml` keeps no places, but tells where an error occurred: so one is raised at the key.
fn nth_place_of(text: &str, path: &str, nth: u32) -> Option<(usize, usize)> {
    let steps: Vec<String> =
        path.replace('[', ".").replace(']', "").split('.').map(str::to_owned).collect();
    (1..=steps.len()).rev().find_map(|depth| {
        let left = Cell::new(nth);
        let finder = Finder { path: &steps[..depth], left: &left };
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
    /// How many places that fit are still to come, the wanted one included.
    left: &'a Cell<u32>,
}

impl Finder<'_> {
    /// Fails at the place that is looked for, and lets earlier ones pass.
    fn here<E: de::Error>(&self) -> Result<(), E> {
        self.left.set(self.left.get().saturating_sub(1));
        if self.left.get() == 0 { Err(E::custom(FOUND)) } else { Ok(()) }
    }
}

/// Reads a key, and fails at the one that is looked for.
struct Key<'a> {
    finder: Finder<'a>,
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
        if self.wanted == Some(key) {
            self.finder.here()?;
        }
        Ok(key.to_owned())
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
        if self.path.is_empty() { self.here() } else { Ok(()) }
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
        while let Some(key) = map.next_key_seed(Key { finder: self, wanted })? {
            if key == *first && wanted.is_none() {
                map.next_value_seed(Finder { path: rest, ..self })?;
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
            let more = if wanted == Some(at) {
                seq.next_element_seed(Finder { path: rest, ..self })?.is_some()
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
