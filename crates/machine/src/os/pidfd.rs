//! A descriptor for a process: readable when the process has ended, and never that of another one.
//!
//! *Invariant:* a signal through a [`PidFd`] reaches the process for which it was opened, or none.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;

/// `pidfd_open(2)`, Linux 5.3.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens a process. Unless it is a child that has not been reaped, the caller must check
    /// afterwards that it is the intended one.
    pub fn open(pid: Pid) -> Result<Self, Errno> {
        // SAFETY: the call takes two integers.
        let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
        let raw = RawFd::try_from(Errno::result(raw)?).map_err(|_| Errno::EBADF)?;
        // SAFETY: the kernel has just made this descriptor, closed by `exec`, for this process.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Sends a signal; does nothing if the process has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let info = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: a null `info` asks the kernel to fill one in as `kill(2)` does.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                signal as libc::c_int,
                info,
                0,
            )
        };
    }

    /// Waits at most this long for the process to end; returns whether it has.
    pub(crate) fn wait(&self, within: std::time::Duration) -> bool {
        let millis = u16::try_from(within.as_millis()).unwrap_or(u16::MAX);
        let mut watched = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut watched, PollTimeout::from(millis)), Ok(1..))
    }
}

/// Waits until a process, which need not be a child, has ended. Returns at once if it does not
/// exist.
pub async fn ended(pid: u32) {
    let Ok(process) = PidFd::open(Pid::from_raw(pid.cast_signed())) else { return };
    until_ended(process).await;
}

/// Waits until a process has ended.
pub async fn until_ended(process: PidFd) {
    // SAFETY: a `PidFd` holds one open descriptor for all its life.
    let Ok(process) = (unsafe { AsyncFd::register(process) }) else {
        return std::future::pending().await;
    };
    // After an error nothing is known of the process.
    if process.readable().await.is_err() {
        std::future::pending().await
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
