//! Reads a value from YAML or JSON, and says precisely what is wrong with it.
//!
//! Does not know the values; serde's messages about them are turned into plain words.
//!
//! *Invariant:* an error that can be attributed to a key names the key and its position.

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::{Problem, ReadError, nearest};
use super::tree::{self, Refusal, Style, Tree};
use super::{Form, Place, Position, outline};

/// Reads a value from at most `limit` bytes.
pub fn read<T: DeserializeOwned>(text: &str, form: Form, limit: usize) -> Result<T, ReadError> {
    if text.len() > limit {
        let problem = Problem::TooLong { bytes: text.len(), limit };
        return Err(ReadError { place: None, key: String::new(), problem });
    }
    let text = without_mark(text);
    match form {
        Form::Json => from_json(text),
        Form::Yaml => from_yaml(text),
    }
}

/// A YAML text whose keys are known, and that is not yet a typed value. Merge keys (`<<`) are
/// applied.
pub struct Document<'a> {
    text: &'a str,
    tree: Option<Tree>,
}

/// The most errors that are reported at once.
const ERRORS: usize = 20;

impl<'a> Document<'a> {
    /// Reads a text within the limits of its caller.
    pub(crate) fn parse(text: &'a str) -> Result<Self, ReadError> {
        outline::check(text).map_err(|fault| no_yaml(text, fault.at, fault.message))?;
        let refused = |refusal| match refusal {
            // The parser that reads the values says what is wrong in better words.
            Refusal::Malformed(at, message) => {
                let other = from_yaml::<IgnoredAny>(text).err();
                other.unwrap_or_else(|| no_yaml(text, at, message))
            }
            Refusal::Twice(key, place) => {
                ReadError { place: Some(place), key, problem: Problem::Twice }
            }
            Refusal::Unread(at, what) => {
                let problem = Problem::Value { message: what.to_owned() };
                ReadError { place: Some(Place::both(at)), key: String::new(), problem }
            }
        };
        Ok(Self { text, tree: tree::read(text).map_err(refused)? })
    }

    /// Leaves out keys of the whole that are not meant for a reader.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        if let Some(tree) = &mut self.tree {
            tree.retain(keep);
        }
    }

    /// Visits every scalar, which may be changed: its key path, what it says, how it is written.
    pub(crate) fn scalars<E>(
        &mut self,
        mut visit: impl FnMut(&str, &mut String, &mut Style) -> Result<(), E>,
    ) -> Result<(), E> {
        self.tree.as_mut().map_or(Ok(()), |tree| tree.scalars("", &mut visit))
    }

    /// The typed value.
    ///
    /// # Errors
    /// The first that is wrong, and all others that can be found without it, up to a limit.
    pub fn read<T: DeserializeOwned>(mut self) -> Result<T, (ReadError, Vec<ReadError>)> {
        let mut errors: Vec<ReadError> = Vec::new();
        loop {
            let again = self.tree.as_ref().map(Tree::to_yaml).unwrap_or_default();
            let reader = serde_yaml::Deserializer::from_str(&again);
            let error = match serde_path_to_error::deserialize(reader) {
                Ok(value) if errors.is_empty() => return Ok(value),
                Ok(_) => None,
                Err(error) => {
                    let (message, _) = in_parts(error.inner());
                    let path = error.path().to_string();
                    Some(wrong(self.text, &path, without_path(&message), Some(Position::START)))
                }
            };
            let removed = match (&error, &mut self.tree) {
                (Some(error), Some(tree)) => tree.remove(&error.key),
                _ => false,
            };
            errors.extend(error);
            if !removed || errors.len() == ERRORS {
                let first = errors.remove(0);
                return Err((first, errors));
            }
        }
    }
}

/// A text without the byte order mark that editors on Windows put first and hide.
pub fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// The error for a value that must not occur twice; `classify` recognises it.
pub fn given_twice(name: &str) -> String {
    format!("{TWICE} `{name}`")
}

/// The beginning of serde's message, and ours, about a name that occurs twice.
const TWICE: &str = "duplicate field";

fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    let place = |error: &serde_json::Error| Position {
        line: error.line().max(1),
        column: error.column().max(1),
    };
    let syntax = |error: &serde_json::Error| {
        let message = without_place(&error.to_string(), error.line(), error.column());
        syntax(Form::Json, place(error), message)
    };
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let cause = error.inner();
        if !cause.is_data() {
            return syntax(cause);
        }
        let message = without_place(&cause.to_string(), cause.line(), cause.column());
        wrong(text, &error.path().to_string(), &message, Some(place(cause)))
    })?;
    reader.end().map(|()| value).map_err(|error| syntax(&error))
}

fn from_yaml<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    outline::check(text).map_err(|fault| no_yaml(text, fault.at, fault.message))?;
    let reader = || serde_yaml::Deserializer::from_str(text);
    serde_path_to_error::deserialize(reader()).map_err(|error| {
        // A text that cannot even be read as "anything" is damaged; other errors concern a value.
        if let Err(error) = IgnoredAny::deserialize(reader()) {
            let (message, place) = in_parts(&error);
            return no_yaml(text, place.unwrap_or(Position::START), message);
        }
        let (message, place) = in_parts(error.inner());
        wrong(text, &error.path().to_string(), without_path(&message), place)
    })
}

/// A message without the less precise key path that the reader puts before some.
fn without_path(message: &str) -> &str {
    match message.split_once(": ") {
        Some((before, rest)) if is_path(before) => rest,
        _ => message,
    }
}

/// An error's message and position.
fn in_parts(error: &serde_yaml::Error) -> (String, Option<Position>) {
    let Some(at) = error.location() else {
        return (without_place(&error.to_string(), 0, 0), None);
    };
    let message = without_place(&error.to_string(), at.line(), at.column());
    (message, Some(Position { line: at.line(), column: at.column() }))
}

fn syntax(form: Form, at: Position, message: String) -> ReadError {
    let problem = Problem::Syntax { form, message };
    ReadError { place: Some(Place::both(at)), key: String::new(), problem }
}

/// The error for a text that is not YAML at all.
fn no_yaml(text: &str, at: Position, message: String) -> ReadError {
    let Some(column) = column_of_tab(text, at.line) else {
        return syntax(Form::Yaml, at, message);
    };
    let place = Some(Place::both(Position { line: at.line, column }));
    ReadError { place, key: String::new(), problem: Problem::Tab }
}

/// Column, from 1, of a tab in a line's indentation.
fn column_of_tab(text: &str, line: usize) -> Option<usize> {
    let line = text.lines().nth(line.checked_sub(1)?)?;
    let indentation = line.len() - line.trim_start().len();
    line[..indentation].find('\t').map(|at| at + 1)
}

/// A parser's message without the position that it contains, and in our words where it is about
/// the parser's own limit on nesting, which aliases reach.
fn without_place(message: &str, line: usize, column: usize) -> String {
    let message = message.replace(&format!(" at line {line} column {column}"), "");
    message.replace("recursion limit exceeded", outline::TOO_DEEP).trim().to_owned()
}

/// Whether the beginning of a message is a key path rather than text.
fn is_path(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '[' | ']' | '?');
    !text.is_empty() && text.chars().all(plain)
}

/// The error for a value at a key path; the parser was at `parser_at`.
fn wrong(text: &str, path: &str, message: &str, parser_at: Option<Position>) -> ReadError {
    // `?` stands for a position inside a text that is not YAML.
    let path = if path == "." || path.contains('?') { "" } else { path };
    let (key, problem) = classify(path, message);
    let nth = if matches!(problem, Problem::Twice) { 2 } else { 1 };
    let place = outline::find(text, &key, nth).filter(|_| !key.is_empty());
    ReadError { place: place.or(parser_at.map(Place::both)), key, problem }
}

/// Recognises serde's messages about names.
fn classify(path: &str, message: &str) -> (String, Problem) {
    let quoted: Vec<String> = message.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let names = quoted.split_first();
    // The path ends in the key itself if the reader had descended to it.
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
/// serde's message about a wrong type, in plain words.
fn in_words(message: &str) -> String {
    let parts = message.strip_prefix("invalid type: ").or(message.strip_prefix("invalid value: "));
    let Some((found, expected)) = parts.and_then(|rest| rest.split_once(", expected ")) else {
        return message.to_owned();
    };
    let found = match found {
        // It fits, but for its sign, which serde does not tell.
        "integer `0`" if expected.starts_with('u') => "-0".to_owned(),
        "sequence" => "a list".to_owned(),
        "map" => "a mapping".to_owned(),
        "unit value" => "an empty value".to_owned(),
        other => {
            let bare = ["string ", "integer ", "boolean ", "floating point "];
            let bare = bare.iter().find_map(|kind| other.strip_prefix(kind)).unwrap_or(other);
            // serde quotes digits that fit no usual integer, and names the type that does hold
            // them.
            let bare =
                bare.strip_suffix(" as u128").or(bare.strip_suffix(" as i128")).unwrap_or(bare);
            bare.trim_matches('`').to_owned()
        }
    };
    format!("{found} is not {}", people_say(expected))
}

/// Names of Rust's types in plain words.
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
        // Enums: serde's own name, and `serde_yaml`'s.
        other if other.starts_with("enum ") || other.starts_with("a YAML tag") => {
            "one of the words that can stand here".to_owned()
        }
        "field identifier" => "a key".to_owned(),
        "variant identifier" => "one of the words that can stand here".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn problem(text: &str, form: Form) -> Problem {
        read::<Value>(text, form, 1 << 20).expect_err("wrong").problem
    }

    #[test]
    fn a_text_longer_than_its_kind_is_not_looked_at() {
        let error = read::<Value>("[[[", Form::Json, 2).expect_err("too long");
        assert_eq!(error.problem, Problem::TooLong { bytes: 3, limit: 2 });
    }

    #[test]
    fn aliases_that_multiply_are_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for (this, last) in (1..9).zip(0..) {
            let aliases = vec![format!("*a{last}"); 9].join(", ");
            text.push_str(&format!("a{this}: &a{this} [{aliases}]\n"));
        }
        assert_eq!(problem(&text, Form::Yaml).to_string(), "repetition limit exceeded");
    }

    #[test]
    fn nesting_is_limited_in_both_forms() {
        let lines: String = (0..1000).map(|depth| format!("{:depth$}-\n", "")).collect();
        let aliases = (1..9).map(|next| format!(", &a{next} {}*a{}", "[".repeat(40), next - 1));
        let aliases: String = aliases.map(|alias| alias + &"]".repeat(40)).collect();
        for (text, form) in [
            ("[".repeat(200_000), Form::Yaml),
            ("[".repeat(200_000), Form::Json),
            ("{\"a\":".repeat(100_000), Form::Json),
            ("- ".repeat(200_000), Form::Yaml),
            ("? ".repeat(200_000), Form::Yaml),
            (format!("- {}x", "- ? ".repeat(100_000)), Form::Yaml),
            (lines, Form::Yaml),
            (format!("[&a0 1{aliases}]"), Form::Yaml),
        ] {
            let found = problem(&text, form).to_string();
            assert!(found.contains(outline::TOO_DEEP), "{form}: {found}: {}", &text[..20]);
        }
    }

    #[test]
    fn a_mistake_is_told_with_its_key_and_its_value() {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only read")]
        struct Gpu {
            index: u32,
        }
        let said = |text: &str, form| read::<Vec<Gpu>>(text, form, 99).expect_err(text).to_string();
        for form in [Form::Yaml, Form::Json] {
            let wrong = "[{\"index\": 1},\n {\"index\": true}]";
            let words = "line 2, column 12: [1].index: true is not a whole number from 0 to ";
            assert!(said(wrong, form).starts_with(words), "{}", said(wrong, form));
            let negative = "[{\"index\": -0}]";
            let words = "line 1, column 12: [0].index: -0";
            assert!(said(negative, form).starts_with(words), "{}", said(negative, form));
            let hidden = "[{\"in\\u001bdex\": 1}]";
            let words = "line 1, column 3: [0].in\\u{1b}dex: unknown key";
            assert_eq!(said(hidden, form), words);
            let unknown = "[{\"index\": 1, \"uuid\": 2}]";
            let words = "line 1, column 15: [0].uuid: unknown key; expected one of index";
            assert_eq!(said(unknown, form), words);
            let twice = "[{\"index\": 1, \"index\": 2}]";
            assert_eq!(said(twice, form), "line 1, column 15: [0].index: given twice");
            assert_eq!(said("[{}]", form), "line 1, column 2: [0]: 'index' is missing");
        }
    }
}
