//! The standard input of `run`, which one rank may have.
//!
//! A rank reads a file or a pipe itself. A terminal is this command's: the ranks are in a session
//! of their own, and the kernel would give them an error. So a thread reads it and hands it on; in
//! the background, where a reader is stopped (SIGTTIN), it waits instead.
//!
//! *Invariant:* what the rank reads is what was typed or written, in order, and its end is the end.

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpgrp, tcgetpgrp};

use super::failure::{Exit, Failure};
use crate::os::process;

/// How long to wait until the terminal may be read again.
const PAUSE: Duration = Duration::from_millis(200);

/// Which rank has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// None: it is not read.
    Nobody,
    Rank(u32),
}

/// Reads `none`, or a rank's number.
pub(super) fn reader(text: &str) -> Result<Reader, String> {
    match text {
        "none" => Ok(Reader::Nobody),
        number => match super::flags::whole(number) {
            Ok(rank) => Ok(Reader::Rank(rank)),
            Err(reason) => Err(format!("{reason}, or 'none'")),
        },
    }
}

/// Standard input for a rank: itself, or what a thread reads from the terminal.
pub(super) fn handed_on() -> Result<OwnedFd, Failure> {
    let failed = |error: io::Error| {
        let error = anyhow::Error::new(error).context("cannot pass standard input on");
        Failure::new(Exit::Failed, error)
    };
    let input = io::stdin();
    if !input.is_terminal() {
        return input.as_fd().try_clone_to_owned().map_err(failed);
    }
    let (reader, mut writer) = io::pipe().map_err(failed)?;
    let pass_on = move || {
        // This thread is not to be stopped: a read in the background then fails.
        let mut stopped = SigSet::empty();
        stopped.add(Signal::SIGTTIN);
        if stopped.thread_block().is_ok() {
            // A rank that has ended, or does not read any more, needs no more of it.
            let _ = copy(&mut io::stdin().lock(), &mut writer, in_background);
        }
    };
    std::thread::Builder::new().name("input".to_owned()).spawn(pass_on).map_err(failed)?;
    Ok(reader.into())
}

/// Leaves standard input to the rank that has it; a terminal is still read here.
pub(super) fn let_go() {
    if !io::stdin().is_terminal() {
        // Otherwise a writer learns a little later that nobody reads any more.
        let _ = process::let_go_of_input();
    }
}

/// Whether another group of processes has the terminal.
fn in_background() -> bool {
    tcgetpgrp(io::stdin()).is_ok_and(|group| group != getpgrp())
}

/// Copies until the end, and waits while `must_wait` and nothing can be read.
fn copy(from: &mut impl Read, to: &mut impl Write, must_wait: impl Fn() -> bool) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(length) => to.write_all(&bytes[..length])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if must_wait() => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_or_nobody_reads() {
        assert_eq!(reader("none"), Ok(Reader::Nobody));
        assert_eq!(reader("3"), Ok(Reader::Rank(3)));
        assert!(reader("all").is_err_and(|said| said.contains("'none'")));
        assert!(reader("-1").is_err());
    }

    /// A terminal that refuses once.
    struct Terminal(Vec<io::Result<&'static [u8]>>);

    impl Read for Terminal {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            let next = if self.0.is_empty() { Ok(&b""[..]) } else { self.0.remove(0) };
            next.inspect(|next| bytes[..next.len()].copy_from_slice(next)).map(<[u8]>::len)
        }
    }

    #[test]
    fn what_comes_after_a_time_in_the_background_is_read_and_a_hang_up_is_the_end() {
        let refused = || Err(io::Error::from_raw_os_error(libc::EIO));
        let mut terminal = Terminal(vec![Ok(b"a"), refused(), Ok(b"b\n")]);
        let mut read = Vec::new();
        copy(&mut terminal, &mut read, || true).expect("an end");
        assert_eq!(read, b"ab\n");
        let mut terminal = Terminal(vec![Ok(b"a"), refused(), Ok(b"b\n")]);
        let mut read = Vec::new();
        copy(&mut terminal, &mut read, || false).expect_err("a hang-up");
        assert_eq!(read, b"a");
    }
}
