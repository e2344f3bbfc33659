//! Notifies the service manager (`sd_notify(3)`) of this process's status: READY, alive, stopping.
//!
//! *Invariant:* sends nothing without `NOTIFY_SOCKET`, and never fails.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// A connection to the service manager.
#[derive(Debug)]
pub struct Notifier {
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl Notifier {
    /// The service manager that started this process, if any.
    pub fn from_environment() -> Option<Self> {
        let path = std::env::var_os("NOTIFY_SOCKET")?;
        let manager = match path.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(&path),
        };
        Some(Self { socket: UnixDatagram::unbound().ok()?, manager: manager.ok()? })
    }

    /// The interval of keep-alive messages; half of `WATCHDOG_USEC`.
    pub fn watchdog(&self) -> Option<Duration> {
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let meant = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        number("WATCHDOG_USEC").filter(|_| meant).map(|usec| Duration::from_micros(usec / 2))
    }

    /// Asks for this much time to become READY, even if the unit's `TimeoutStartSec` is shorter.
    pub fn starting(&self, within: Duration) {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", within.as_micros()));
    }

    /// Reports READY; `status` is for people.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// Reports a status, for people.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// Reports that this process is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// Reports that this process is ending.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    fn send(&self, message: &str) {
        // A manager that does not read its socket misses the message.
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
