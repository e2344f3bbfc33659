//! The failure of a command: what happened, its causes, and what to do.

use std::process::ExitCode;

use crate::cluster::detached::{NOT_READY, USAGE};
use crate::os::exhausted::Exhausted;

/// The documented exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// 0: done.
    Done,
    /// 1: failed while running.
    Failed,
    /// 2: wrong usage, spec or input.
    Usage,
    /// 3: not ready in time.
    NotReady,
    /// 4: verification failed.
    Unverified,
    /// 5: its processes cannot go on by themselves (`why`, `--end-when-stalled`), or lines name a
    /// cause (`why`).
    Stalled,
    /// 6: the scheduler elsewhere that its workers had joined is lost.
    SchedulerLost,
    /// 128+n: ended by signal n.
    Signal(u8),
    /// The exit code of a program that was run on the user's behalf.
    Program(u8),
}

impl Exit {
    /// By SIGINT, which is 2 everywhere.
    pub(super) const INTERRUPTED: Self = Exit::Signal(2);

    /// The reader of standard output has gone (SIGPIPE).
    pub(crate) const BROKEN_PIPE: Self = Exit::Signal(13);

    /// As a number.
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => USAGE,
            Exit::NotReady => NOT_READY,
            Exit::Unverified => 4,
            Exit::Stalled => 5,
            Exit::SchedulerLost => 6,
            Exit::Signal(number) => 128u8.saturating_add(number),
            Exit::Program(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// What happened; its sources are the causes.
    pub(crate) error: anyhow::Error,
    /// What to do.
    pub(crate) hint: Option<String>,
}

impl Failure {
    /// A failure with an exit code. If a resource has run out, the input is not to blame: the exit
    /// code becomes [`Exit::Failed`], and the hint names the resource.
    pub(crate) fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let exhausted = Exhausted::behind(error.as_ref());
        let exit = if exhausted.is_some() && exit == Exit::Usage { Exit::Failed } else { exit };
        Self { exit, error, hint: exhausted.map(Exhausted::hint) }
    }

    /// The error with its causes, in a line.
    pub(crate) fn one_line(&self) -> String {
        format!("{:#}", self.error)
    }

    /// Adds what to do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds a hint, if the error has one.
    pub(crate) fn maybe_hint(mut self, hint: Option<String>) -> Self {
        self.hint = hint.or(self.hint);
        self
    }
}
