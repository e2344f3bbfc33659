//! What the ranks of a program ask the one that started them, in the languages of other launchers.
//!
//! | language | who speaks it | from |
//! |---|---|---|
//! | [`Pmi`]: PMI-1, PMI-2 | MPICH, Intel MPI, MVAPICH | MPICH: `src/pmi/maint/pmi-*.txt` |
//! | [`Rrun`] | RapidsMPF, cudf-polars | RapidsMPF: `cpp/src/bootstrap/socket_backend.cpp` |
//!
//! Both have values by name and a meeting of all ranks, and differ in how they say it. A session
//! reads what one rank says, answers by itself what it can, and leaves the rest as an [`Ask`] to
//! whoever knows the other ranks.
//!
//! *Invariant:* no input makes a session panic, or hold more than [`LONGEST`] bytes of it.

mod pmi;
mod rrun;

use std::time::Duration;

pub use pmi::Pmi;
pub use rrun::{Greeted, Rrun, greeted};

/// Longest message that is read, its value included.
pub const LONGEST: usize = 1 << 20;

/// Longest name of a value.
pub const LONGEST_NAME: usize = 255;

/// What a rank wants of the other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// To keep a value for all.
    Put { name: String, value: Vec<u8> },
    /// A value of any rank.
    Get { name: String, wait: Wait },
    /// To wait until every rank has come to the same meeting.
    Meet { name: &'static str },
}

/// How long to wait for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// What is there now.
    No,
    /// At most this long.
    For(Duration),
    /// As long as it takes.
    Forever,
}

/// The answer to an [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is kept, or all ranks have come.
    Done,
    /// The value.
    Value(Vec<u8>),
    /// There is no such value.
    Missing,
    /// It can't be done.
    Refused(&'static str),
}

/// What a session has read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// To be written to the rank.
    Say(Vec<u8>),
    /// To be answered by [`Session::answer`].
    Ask(Ask),
    /// Nothing to be said.
    Nothing,
}

/// What a rank has said that is not of its language.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub String);

impl Malformed {
    fn of(what: &str, bytes: &[u8]) -> Self {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]);
        Self(format!("{what}: {shown:?}"))
    }
}

/// One rank's end of a language.
pub trait Session {
    /// Takes the next message out of `bytes`, if it is there as a whole.
    ///
    /// # Errors
    /// If it is not of this language, or too long; nothing more can be read then.
    fn hear(&mut self, bytes: &mut Vec<u8>) -> Result<Option<Heard>, Malformed>;

    /// What to write as the answer to the last [`Ask`].
    fn answer(&mut self, answer: Answer) -> Vec<u8>;
}

/// Takes a line out of the front, without its end.
fn line(bytes: &mut Vec<u8>, longest: usize) -> Result<Option<Vec<u8>>, Malformed> {
    let Some(end) = bytes.iter().take(longest + 1).position(|byte| *byte == b'\n') else {
        return match bytes.len() > longest {
            true => Err(Malformed::of("a line that is too long", bytes)),
            false => Ok(None),
        };
    };
    let mut line: Vec<u8> = bytes.drain(..=end).collect();
    line.pop();
    Ok(Some(line))
}
