//! A terminal and its user, who types, reads, and goes away.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::termios::{InputFlags, SetArg, cfmakeraw, tcgetattr, tcsetattr};

const CTRL_C: u8 = 0x03;
const CTRL_Q: u8 = 0x11;
const CTRL_S: u8 = 0x13;

/// The user's side of the terminal.
pub(crate) struct Terminal {
    master: File,
    slave: Option<File>,
    seen: Arc<Mutex<Vec<u8>>>,
    over: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    /// Opens one and starts to read it. A raw one passes every byte on, except Ctrl-S and Ctrl-Q.
    pub(crate) fn open(raw: bool) -> Self {
        // No child of another thread may inherit it: that would keep the terminal open.
        let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let master = posix_openpt(flags).expect("a terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("its other end");
        let path = ptsname_r(&master).expect("its name");
        let slave = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlag::O_NOCTTY.bits())
            .open(path)
            .expect("its other end");
        if raw {
            let mut settings = tcgetattr(&slave).expect("its settings");
            cfmakeraw(&mut settings);
            settings.input_flags |= InputFlags::IXON;
            tcsetattr(&slave, SetArg::TCSANOW, &settings).expect("set");
        }
        let master = File::from(master.as_fd().try_clone_to_owned().expect("a descriptor"));
        let (seen, over) = (Arc::default(), Arc::default());
        let reader = {
            let (seen, over) = (Arc::clone(&seen), Arc::clone(&over));
            let master = master.try_clone().expect("a descriptor");
            std::thread::spawn(move || read(master, &seen, &over))
        };
        Self { master, slave: Some(slave), seen, over, reader: Some(reader) }
    }

    /// Makes a program run in it, as the leader of a session.
    pub(crate) fn adopt(&mut self, command: &Command) -> Command {
        let slave = self.slave.take().expect("one program");
        let end = || Stdio::from(slave.try_clone().expect("a descriptor"));
        let mut inside = Command::new("setsid");
        inside.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (variable, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(variable, value),
                None => inside.env_remove(variable),
            };
        }
        inside.stdin(end()).stdout(end()).stderr(end());
        inside
    }

    fn press(&mut self, key: u8) {
        // The other end may be gone.
        let _ = self.master.write_all(&[key]);
    }

    pub(crate) fn interrupt(&mut self) {
        self.press(CTRL_C);
    }

    pub(crate) fn stop(&mut self) {
        self.press(CTRL_S);
    }

    pub(crate) fn resume(&mut self) {
        self.press(CTRL_Q);
    }

    /// The output so far.
    pub(crate) fn seen(&self) -> Vec<u8> {
        self.seen.lock().expect("no panic").clone()
    }

    /// Reads the output until every program has left the terminal.
    pub(crate) fn read_to_end(mut self) -> Vec<u8> {
        self.reader.take().map(JoinHandle::join);
        self.seen()
    }

    /// Closes the terminal.
    pub(crate) fn hang_up(self) {}
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.reader.take().map(JoinHandle::join);
    }
}

fn read(mut master: File, seen: &Mutex<Vec<u8>>, over: &AtomicBool) {
    let mut buffer = [0; 4096];
    while !over.load(Ordering::Relaxed) {
        let mut watched = [PollFd::new(master.as_fd(), PollFlags::POLLIN)];
        match poll(&mut watched, 20u8) {
            Ok(0) | Err(_) => continue,
            Ok(_) => {}
        }
        match master.read(&mut buffer) {
            Ok(length @ 1..) => seen.lock().expect("no panic").extend(&buffer[..length]),
            // Linux returns EIO when the other end is closed.
            _ => return,
        }
    }
}
