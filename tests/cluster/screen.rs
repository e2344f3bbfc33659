//! A program on a terminal, and what a person sees there.
//!
//! *Invariant:* the program ends with its [`Screen`].

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;
use vt100::Parser;

use super::sandbox::{Sandbox, eventually};

/// Long, because other tests run at the same time.
const LONG: Duration = Duration::from_secs(60);

/// Ctrl-C, as typed.
pub(crate) const CTRL_C: &str = "\x03";

/// A program that runs on a terminal, as the leader of a session of its own.
pub(crate) struct Screen {
    child: Child,
    master: File,
    slave: OwnedFd,
    before: Termios,
    parser: Arc<Mutex<Parser>>,
}

impl Screen {
    /// Starts the program on a terminal of this many columns and lines.
    pub(crate) fn start(sandbox: &Sandbox, size: (u16, u16), arguments: &[&str]) -> Self {
        let (columns, lines) = size;
        let window = Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(Some(&window), None).expect("a terminal");
        let before = tcgetattr(&terminal.slave).expect("its settings");
        let end = || Stdio::from(terminal.slave.try_clone().expect("a descriptor"));
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(env!("CARGO_BIN_EXE_cuda-cluster")).args(arguments);
        command.env("XDG_RUNTIME_DIR", sandbox.runtime()).env("TERM", "xterm-256color");
        command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("NO_COLOR");
        command.stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("it starts");
        let master = File::from(terminal.master);
        let parser = Arc::new(Mutex::new(Parser::new(some(lines), some(columns), 0)));
        let (mut reader, seen) = (master.try_clone().expect("a descriptor"), Arc::clone(&parser));
        // Ends when nobody can write any more.
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                seen.lock().expect("no panic").process(&buffer[..length]);
            }
        });
        Self { child, master, slave: terminal.slave, before, parser }
    }

    /// The text on the screen.
    pub(crate) fn text(&self) -> String {
        self.parser.lock().expect("no panic").screen().contents()
    }

    /// Waits until these words are on the screen.
    pub(crate) fn wait_for(&self, words: &str) {
        self.wait_until(words, |text| text.contains(words));
    }

    /// Waits until the text of the screen is like this.
    pub(crate) fn wait_until(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let began = Instant::now();
        loop {
            let text = self.text();
            if holds(&text) {
                return;
            }
            assert!(began.elapsed() < LONG, "not within {LONG:?}: {what}; the screen:\n{text}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Types.
    pub(crate) fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("typed");
    }

    /// Makes the terminal this large.
    pub(crate) fn resize(&self, columns: u16, lines: u16) {
        self.parser.lock().expect("no panic").screen_mut().set_size(some(lines), some(columns));
        let size = format!("cols {columns} rows {lines}");
        let mut stty = Command::new("stty");
        stty.args(size.split(' ')).stdin(Stdio::from(self.slave.try_clone().expect("one")));
        assert!(stty.status().expect("stty").success());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("it lives");
    }

    /// Waits for its end, and returns its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }

    /// Checks that the terminal is as it was before.
    pub(crate) fn assert_restored(&self) {
        assert_eq!(tcgetattr(&self.slave).expect("its settings"), self.before);
        eventually("the screen from before", LONG, || {
            let parser = self.parser.lock().expect("no panic");
            !parser.screen().alternate_screen() && !parser.screen().hide_cursor()
        });
    }
}

fn some(length: u16) -> NonZero<u16> {
    NonZero::new(length).expect("a terminal has columns and lines")
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It has ended already, unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
