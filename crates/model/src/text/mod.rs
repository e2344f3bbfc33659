//! Texts that people write: read within limits, with the position of every error.
//!
//! Knows no spec and no topology, opens no files. Values are read by `serde_yaml` and `serde_json`.
//! `serde_yaml` keeps no places and reads the whole text before it limits the nesting, so the
//! outline of a text (its nesting, and where each key stands) comes from the events of
//! `saphyr-parser`, as does the tree in which keys are merged and left out. `serde-saphyr` would do
//! all at once, but its errors name the type that was expected and not the value that was found.
//!
//! *Invariant:* reading a text costs at most a small multiple of its length.

mod error;
mod log_level;
mod mask;
mod outline;
mod read;
mod tree;
mod wrap;

use std::fmt;

pub use error::{Problem, ReadError};
pub use error::{did_you_mean, in_full, nearest, shown};
pub use log_level::{LogLevel, NoLevel, without_escapes};
pub use mask::{masked, masked_json, masked_line};
pub use outline::find;
pub use read::{Document, given_twice, read, without_mark};
pub use tree::Style;
pub use wrap::wrapped;

/// Line and column in a text, as editors count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl Position {
    /// The beginning of a text.
    pub(crate) const START: Self = Self { line: 1, column: 1 };

    /// The position of the byte at `offset`.
    pub(crate) fn of_byte(text: &str, offset: usize) -> Self {
        let before = &text[..offset];
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        Self { line: before.matches('\n').count() + 1, column }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// Where a value and its key are. In a list, both are the item's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where the key begins.
    pub key: Position,
    /// Where the value begins; for a section, its first line.
    pub value: Position,
}

impl Place {
    fn both(at: Position) -> Self {
        Self { key: at, value: at }
    }
}

/// A form of text that values are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// YAML 1.2 as `serde_yaml` reads it; JSON is a part of it.
    Yaml,
    /// JSON, and no other YAML.
    Json,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Yaml => "YAML",
            Self::Json => "JSON",
        })
    }
}

/// Whether a character is not seen itself, but changes how others are: it orders them from right to
/// left, breaks lines where there is no line feed, or takes no space.
///
/// These are Unicode's format characters (Cf) and its separators of lines and paragraphs, except
/// for those that written languages and emoji need: the joiners, U+00AD, Arabic's number signs, and
/// the tags of flags.
pub fn is_deceptive(c: char) -> bool {
    matches!(
        c,
        '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{2064}' | '\u{2066}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
    )
}

/// Text escaped for XML, in quotes or between tags; characters that XML cannot hold are dropped.
pub fn xml_escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => {}
            c if c.is_control() => {}
            c if is_deceptive(c) => out.push_str(&c.escape_unicode().to_string()),
            c => out.push(c),
        }
    }
    out
}
