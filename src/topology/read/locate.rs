//! Finds the line and column of a key path such as `gpus[3].pci` in a YAML or JSON text.
//!
//! Does not read values; it walks the document to the path and lets the parser say where it is.
//!
//! *Invariant:* an answer is the place of the longest leading part of the path that exists.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Position;

/// One step of a key path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Item(usize),
}

/// The place of a key path's value; `None` when not even the document's start is found.
pub(super) fn locate(text: &str, path: &str) -> Option<Position> {
    let steps = steps(path);
    (0..=steps.len()).rev().find_map(|known| {
        let error = Walk(&steps[..known]).deserialize(serde_yaml::Deserializer::from_str(text));
        let error = error.err().filter(|error| error.to_string().contains(FOUND))?;
        error.location().map(|at| Position { line: at.line(), column: at.column() })
    })
}

/// Splits `gpus[3].nvlinks[0].peer` into its steps.
fn steps(path: &str) -> Vec<Step> {
    path.split(['.', '['])
        .filter(|part| !part.is_empty())
        .map(|part| match part.strip_suffix(']').and_then(|number| number.parse().ok()) {
            Some(at) => Step::Item(at),
            None => Step::Key(part.to_owned()),
        })
        .collect()
}

/// What the trap at the end of the path is recognised by.
const FOUND: &str = "the place that was looked for";

/// Walks down the steps, and springs the trap at their end.
struct Walk<'a>(&'a [Step]);

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    /// Every kind of value that is not walked into is refused with these words, at its place.
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { FOUND } else { "another document" })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((Step::Key(wanted), rest)) = self.0.split_first() else {
            return Err(serde::de::Error::invalid_type(serde::de::Unexpected::Map, &self));
        };
        while let Some(key) = map.next_key::<String>()? {
            if key == *wanted {
                map.next_value_seed(Walk(rest))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some((Step::Item(wanted), rest)) = self.0.split_first() else {
            return Err(serde::de::Error::invalid_type(serde::de::Unexpected::Seq, &self));
        };
        for _ in 0..*wanted {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Ok(());
            }
        }
        seq.next_element_seed(Walk(rest)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_where_its_value_stands() {
        let text = "version: 1\ngpus:\n  - {index: 0}\n  - {index: 1, pci: nonsense}\n";
        assert_eq!(locate(text, "gpus[1].pci"), Some(Position { line: 4, column: 21 }));
        assert_eq!(locate(text, "gpus[1]"), Some(Position { line: 4, column: 5 }));
        assert_eq!(locate(text, "gpus[1].uuid"), locate(text, "gpus[1]"));
        assert_eq!(locate("{\"gpus\":\n [{}]}", "gpus[0]"), Some(Position { line: 2, column: 3 }));
        assert_eq!(locate("%", "gpus[0]"), None);
    }
}
