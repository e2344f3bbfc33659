//! The terminal while `top` uses it: without echo and line editing, on the alternate screen.
//!
//! *Invariant:* a [`Session`] that ends leaves the terminal as it was, also after a panic.

use std::io::{self, IsTerminal, Write};
use std::sync::Once;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{Command, execute};
use ratatui::{Frame, Terminal};
use tokio::sync::mpsc;

use crate::cli::screen::{self, To};

/// A terminal in use.
pub(super) struct Session {
    terminal: Terminal<CrosstermBackend<Frames>>,
    /// Keys and changes of the size.
    pub(super) events: mpsc::Receiver<io::Result<Event>>,
    colour: bool,
}

impl Session {
    /// Whether there is a terminal.
    pub(super) fn is_possible() -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// Takes the terminal.
    ///
    /// # Errors
    /// If its settings can't be changed.
    pub(super) fn open() -> io::Result<Self> {
        screen::open();
        restore_after_panics();
        enable_raw_mode()?;
        let terminal = enter().inspect_err(|_| drop(disable_raw_mode()))?;
        let (sender, events) = mpsc::channel(64);
        let keys = std::thread::Builder::new().name("keys".to_owned());
        let read = move || {
            loop {
                let event = event::read();
                let failed = event.is_err();
                if sender.blocking_send(event).is_err() || failed {
                    return;
                }
            }
        };
        // Ends with the program: a read can't be interrupted.
        keys.spawn(read).inspect_err(|_| drop(disable_raw_mode()))?;
        let choice = anstream::AutoStream::choice(&io::stdout());
        Ok(Self { terminal, events, colour: choice != anstream::ColorChoice::Never })
    }

    /// Draws a picture, and is told whether it may have colours. While the terminal takes no
    /// output, nothing is drawn.
    ///
    /// # Errors
    /// If the terminal has gone.
    pub(super) fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>, bool)) -> io::Result<()> {
        if screen::is_idle() {
            let colour = self.colour;
            self.terminal.draw(|frame| picture(frame, colour))?;
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Nothing is left to be done where this fails.
        let _ = disable_raw_mode();
        let _ = execute!(self.terminal.backend_mut(), LeaveAlternateScreen, Show);
    }
}

fn enter() -> io::Result<Terminal<CrosstermBackend<Frames>>> {
    let mut frames = Frames(Vec::new());
    execute!(frames, EnterAlternateScreen)?;
    Terminal::new(CrosstermBackend::new(frames))
}

/// The message of a panic is shown on the terminal that the user had before.
fn restore_after_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let _ = disable_raw_mode();
            // What was drawn comes first; a terminal that takes no output is not waited for.
            let _ = screen::settle();
            let mut text = String::new();
            // Writing to a text cannot fail.
            let _ = LeaveAlternateScreen.write_ansi(&mut text);
            let _ = Show.write_ansi(&mut text);
            let _ = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
            tell(panic);
        }));
    });
}

/// Collects what is drawn, and hands it whole to the screen's thread.
#[derive(Debug)]
struct Frames(Vec<u8>);

impl Write for Frames {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.0);
        if bytes.is_empty() {
            return Ok(());
        }
        screen::write(To::Output, &bytes)
            .unwrap_or_else(|| io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    use nix::pty::openpty;
    use nix::sys::termios::tcgetattr;

    use super::*;

    /// Set for the process that panics.
    const INSIDE: &str = "CUDA_CLUSTER_TEST_PANICS";

    #[test]
    fn a_panic_leaves_the_terminal_as_it_was() {
        if std::env::var_os(INSIDE).is_some() {
            let _session = Session::open().expect("a terminal");
            panic!("on purpose");
        }
        let terminal = openpty(None, None).expect("a terminal");
        let before = tcgetattr(&terminal.slave).expect("its settings");
        let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "--nocapture"]);
        command.arg("cli::top::session::tests::a_panic_leaves_the_terminal_as_it_was");
        command.env(INSIDE, "1").stdin(end()).stdout(end()).stderr(end());
        let status = command.status().expect("it runs");
        assert!(!status.success(), "it panics");
        assert_eq!(tcgetattr(&terminal.slave).expect("its settings"), before);
        drop((command, terminal.slave));
        let mut bytes = Vec::new();
        // The end of a terminal without writers is an error.
        let _ = File::from(terminal.master).read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        let at = |words| text.find(words).unwrap_or_else(|| panic!("{words:?} in {text:?}"));
        let (entered, left, told) = (at("\x1b[?1049h"), at("\x1b[?1049l"), at("on purpose"));
        assert!(entered < left && left < told, "{text:?}");
    }
}
