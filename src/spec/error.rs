//! What is wrong with a spec, and where.
//!
//! Does not look for mistakes; `read` and `contradictions` do.
//!
//! *Invariant:* an error names the file (or `command line`), the key path where there is one, and
//! the line and column where the text has one.

use std::fmt;

use crate::text::{self, Position};

/// A mistake in a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The file's name, or `command line`.
    pub origin: String,
    /// Line and column, from 1; `None` if the values came from several places.
    pub place: Option<Position>,
    /// Key path, like `ucx.net_devices[1]`; empty for the whole text.
    pub key: String,
    /// What is wrong.
    pub problem: Box<Problem>,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.origin)?;
        if let Some(Position { line, column }) = self.place {
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
            Problem::Text(problem) => problem.hint(),
            Problem::NoVersion => Some("begin the file with 'version: 1'".to_owned()),
            Problem::Version { .. } => None,
            Problem::Contradiction { hint, .. } => Some((*hint).to_owned()),
        }
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
        SpecError { origin: origin.to_owned(), place: None, key: self.key, problem }
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
