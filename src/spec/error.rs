//! What is wrong with a spec, and where.
//!
//! Does not find mistakes; `read` and `contradictions` do.
//!
//! *Invariant:* an error names the file (or `command line`), the key path where there is one, and
//! the line and column where the text has one.

use std::fmt;

/// A mistake in a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The file's name, or `command line`.
    pub origin: String,
    /// Line and column, from 1; `None` when the values came from several places.
    pub place: Option<(usize, usize)>,
    /// Key path, like `ucx.net_devices[1]`; empty for the whole text.
    pub key: String,
    /// What is wrong.
    pub problem: Box<Problem>,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.origin)?;
        if let Some((line, column)) = self.place {
            write!(f, "{line}:{column}:")?;
        }
        if !self.key.is_empty() {
            write!(f, " {}:", self.key)?;
        }
        write!(f, " {}", self.problem)
    }
}

impl std::error::Error for SpecError {}

impl SpecError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match &*self.problem {
            Problem::UnknownKey { nearest: Some(name), .. }
            | Problem::UnknownWord { nearest: Some(name), .. } => {
                Some(format!("did you mean '{name}'?"))
            }
            Problem::NoVersion => Some("begin the file with 'version: 1'".to_owned()),
            Problem::Tab => Some("replace the tabs at the beginning of lines by blanks".to_owned()),
            Problem::Contradiction { hint, .. } => Some((*hint).to_owned()),
            _ => None,
        }
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is no YAML.
    #[error("{message}")]
    Syntax {
        /// The YAML reader's words.
        message: String,
    },
    /// A tab in a line's indentation.
    #[error("a tab indents this line, and YAML knows only blanks")]
    Tab,
    /// A key that a spec does not have.
    #[error("unknown key; expected one of {}", .expected.join(", "))]
    UnknownKey {
        /// The keys that could stand there.
        expected: Vec<String>,
        /// The most similar of them.
        nearest: Option<String>,
    },
    /// A word that is none of the choices.
    #[error("unknown word {word:?}; expected one of {}", .expected.join(", "))]
    UnknownWord {
        /// The word.
        word: String,
        /// The words that could stand there.
        expected: Vec<String>,
        /// The most similar of them.
        nearest: Option<String>,
    },
    /// A value of a wrong type or form.
    #[error("{message}")]
    Value {
        /// What was found and what was expected.
        message: String,
    },
    /// A key that comes twice.
    #[error("given twice")]
    Twice,
    /// The file does not say which version of the form it is in.
    #[error("'version' is missing")]
    NoVersion,
    /// A version that this program does not read.
    #[error("{found} is not readable by this program, which reads version {readable}")]
    Version {
        /// The version that the file names.
        found: u32,
        /// The version that this program reads.
        readable: u32,
    },
    /// Values that cannot hold together.
    #[error("{message}")]
    Contradiction {
        /// Which values, and why not.
        message: String,
        /// What to do.
        hint: &'static str,
    },
}

/// The candidate most similar to `word`, if any is similar enough to be meant.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<String> {
    let folded = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    let word = folded(word);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, &folded(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate.to_owned())
}
