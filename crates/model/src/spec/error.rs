//! What is wrong with a spec, and where.
//!
//! Does not look for mistakes; `read` and `contradictions` do.
//!
//! *Invariant:* an error names the file (or `command line`), the key path where there is one, and
//! the line and column where the text has one.

use std::fmt;

use crate::text::{self, Position, nearest};

/// A mistake in a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpecError {
    /// The file's name, or `command line`.
    pub origin: String,
    /// Line and column, from 1; `None` if the values came from several places.
    pub place: Option<Position>,
    /// Key path, like `ucx.net_devices[1]`; empty for the whole text.
    pub key: String,
    /// What is wrong.
    pub problem: Box<Problem>,
    /// What else is wrong.
    pub others: Vec<SpecError>,
}

impl fmt::Display for SpecError {
    /// Of several errors each with its hint, on a line of its own.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_alone(f)?;
        if self.others.is_empty() {
            return Ok(());
        }
        for (at, error) in std::iter::once(self).chain(&self.others).enumerate() {
            if at > 0 {
                f.write_str("\n")?;
                error.write_alone(f)?;
            }
            if let Some(hint) = error.own_hint() {
                write!(f, " ({hint})")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for SpecError {}

impl SpecError {
    /// An error without a place.
    pub(crate) fn new(origin: &str, key: String, problem: Box<Problem>) -> Self {
        Self { origin: origin.to_owned(), place: None, key, problem, others: Vec::new() }
    }

    /// What the user can do about it; of several errors it is a part of the text.
    pub fn hint(&self) -> Option<String> {
        self.own_hint().filter(|_| self.others.is_empty())
    }

    fn write_alone(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.origin)?;
        if let Some(Position { line, column }) = self.place {
            write!(f, "{line}:{column}:")?;
        }
        if !self.key.is_empty() {
            write!(f, " {}:", text::shown(&self.key))?;
        }
        write!(f, " {}", self.problem)
    }

    fn own_hint(&self) -> Option<String> {
        match &*self.problem {
            Problem::Text(problem) => problem.hint(),
            Problem::NoVersion => Some("begin the file with 'version: 1'".to_owned()),
            Problem::Version { .. } => None,
            Problem::Contradiction { hint, .. } | Problem::Variable { hint, .. } => {
                Some((*hint).to_owned())
            }
        }
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Problem {
    /// The text is not YAML, or a name or a value is wrong.
    #[error(transparent)]
    Text(#[from] text::Problem),
    /// The file has no `version`.
    #[error("'version' is missing")]
    NoVersion,
    /// The file has a version that this program does not read.
    #[error("{found} is not readable by this program, which reads version {readable}")]
    Version {
        /// The version that the file names.
        found: u32,
        /// The version that this program reads.
        readable: u32,
    },
    /// A variable that cannot be put in.
    #[error("{message}")]
    Variable {
        message: String,
        /// What to do.
        hint: &'static str,
    },
    /// Values that contradict each other.
    #[error("{message}")]
    Contradiction {
        /// Which values, and why.
        message: String,
        /// What to do.
        hint: &'static str,
    },
}

/// A contradiction and its key.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Found {
    pub(super) key: String,
    pub(super) problem: Problem,
}

impl Found {
    /// The error, for values that came from several places.
    pub(super) fn without_place(self, origin: &str) -> SpecError {
        let problem = Box::new(self.problem);
        SpecError::new(origin, self.key, problem)
    }
}

/// A contradiction: the key, what is wrong, what to do.
pub(super) fn refuse(
    key: &str,
    message: impl Into<String>,
    hint: &'static str,
) -> Result<(), Found> {
    let problem = Problem::Contradiction { message: message.into(), hint };
    Err(Found { key: key.to_owned(), problem })
}

/// Refuses a word that is not in a list.
pub(super) fn one_of(key: &str, word: &str, words: &[&str]) -> Result<(), Found> {
    if words.contains(&word) {
        return Ok(());
    }
    let expected = words.iter().map(|&word| word.to_owned()).collect();
    let nearest = nearest(word, words.iter().copied());
    let problem = text::Problem::UnknownWord { word: word.to_owned(), expected, nearest }.into();
    Err(Found { key: key.to_owned(), problem })
}
