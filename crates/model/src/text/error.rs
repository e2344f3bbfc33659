//! Errors in a text, described for the person who wrote it.
//!
//! Does not find errors; `read` does.
//!
//! *Invariant:* an error about a name lists the names that would be valid.

use std::fmt;

use super::{Form, Place, Position};

/// An error in a text that a person wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// Where it is; `None` if it concerns the whole text.
    pub place: Option<Place>,
    /// Key path, like `gpus[3].pci`; empty for the whole text.
    pub key: String,
    /// What is wrong, as a sentence; it may have a hint.
    pub problem: Problem,
}

impl ReadError {
    /// Where to look: at the key if its name is wrong, otherwise at the value.
    pub fn position(&self) -> Option<Position> {
        let named = matches!(self.problem, Problem::UnknownKey { .. } | Problem::Twice);
        self.place.map(|place| if named { place.key } else { place.value })
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(position) = self.position() {
            write!(f, "{position}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", shown(&self.key))?;
        }
        self.problem.fmt(f)
    }
}

impl std::error::Error for ReadError {}

/// A key path with its control characters written out.
pub fn shown(key: &str) -> String {
    let escaped = |c: char| {
        let (plain, code) =
            if c.is_control() { (None, Some(c.escape_default())) } else { (Some(c), None) };
        plain.into_iter().chain(code.into_iter().flatten())
    };
    key.chars().flat_map(escaped).collect()
}

/// What is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum Problem {
    /// The text is too long.
    #[error("{bytes} bytes are too many; the most is {limit}")]
    TooLong {
        /// The text's length.
        bytes: usize,
        /// The most that may be read.
        limit: usize,
    },
    /// Not well-formed, so keys and values are unknown.
    #[error("not well-formed {form}: {message}")]
    Syntax {
        /// The form that it was read as.
        form: Form,
        message: String,
    },
    /// A tab in a line's indentation.
    #[error("a tab indents this line, and YAML knows only blanks")]
    Tab,
    /// A key that does not exist.
    #[error("unknown key{}", if nearest.is_none() { format!("; expected one of {}", .expected.join(", ")) } else { String::new() })]
    UnknownKey {
        /// The keys that would be valid.
        expected: Vec<String>,
        /// The most similar of them.
        nearest: Option<String>,
    },
    /// A word that is not one of the choices.
    #[error("unknown word {word:?}; expected one of {}", .expected.join(", "))]
    UnknownWord {
        word: String,
        /// The words that would be valid.
        expected: Vec<String>,
        /// The most similar of them.
        nearest: Option<String>,
    },
    /// A value of a wrong type or form, or a missing one.
    #[error("{message}")]
    Value {
        /// What was found and what was expected.
        message: String,
    },
    /// A key that occurs twice.
    #[error("given twice")]
    Twice,
}

impl Problem {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKey { nearest, .. } | Self::UnknownWord { nearest, .. } => {
                nearest.as_deref().map(did_you_mean)
            }
            Self::Tab => Some("replace the tabs at the beginning of lines by blanks".to_owned()),
            _ => None,
        }
    }
}

/// An error with its causes, on one line.
pub fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The hint that names what was probably meant.
pub fn did_you_mean(name: &str) -> String {
    format!("did you mean '{name}'?")
}

/// The candidate most similar to `word`, if any is similar enough to be meant.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let folded = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    let word = folded(word);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, &folded(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate.to_owned())
}
