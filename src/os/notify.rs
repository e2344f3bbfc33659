//! Tells the service manager how this process stands (`sd_notify(3)`): READY, alive, stopping.
//!
//! *Invariant:* without `NOTIFY_SOCKET` nothing is sent, and nothing here ever fails a caller.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// A service manager that listens.
#[derive(Debug)]
pub struct Notifier {
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl Notifier {
    /// The one that started this process, if there is one.
    pub fn from_environment() -> Option<Self> {
        let path = std::env::var_os("NOTIFY_SOCKET")?;
        let manager = match path.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&path),
        };
        Some(Self { socket: UnixDatagram::unbound().ok()?, manager: manager.ok()? })
    }

    /// How often it wants to hear that this process is alive; half of `WATCHDOG_USEC`.
    pub fn watchdog(&self) -> Option<Duration> {
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let meant = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        number("WATCHDOG_USEC").filter(|_| meant).map(|usec| Duration::from_micros(usec / 2))
    }

    /// The cluster is READY; `status` is for people.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// What is going on, for people.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// This process is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// This process is ending.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    fn send(&self, message: &str) {
        // A manager that does not listen has chosen so.
        let _ = self.socket.send_to_addr(message.as_bytes(), &self.manager);
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_hears_that_the_cluster_is_ready() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("notify.sock");
        let manager = UnixDatagram::bind(&path).expect("bound");
        let notifier = Notifier {
            socket: UnixDatagram::unbound().expect("a socket"),
            manager: SocketAddr::from_pathname(&path).expect("a path"),
        };
        notifier.ready("8 workers\nREADY");
        let mut message = [0; 64];
        let length = manager.recv(&mut message).expect("a message");
        assert_eq!(&message[..length], b"READY=1\nSTATUS=8 workers READY");
    }
}
