//! Detects the removal of a run directory, and the removal or change of a file in it.
//!
//! Uses inotify, so watching costs nothing while nothing happens. Also watches the parent, because
//! the kernel does not report the removal of a directory that is still open.
//!
//! *Invariant:* reports only that something has happened; the owner checks what is wrong.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that is readable when something has been removed or written.
#[derive(Debug)]
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }
}

/// Watches a run directory.
#[derive(Debug)]
pub struct Presence(AsyncFd<Descriptor>);

impl Presence {
    /// Starts to watch; `None` if the system has no watches left, and then nothing is detected.
    pub fn watch(directory: &Path) -> Option<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
        let removed = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
        inotify.add_watch(directory, removed | AddWatchFlags::IN_CLOSE_WRITE).ok()?;
        inotify.add_watch(directory.parent()?, removed).ok()?;
        // SAFETY: an inotify instance holds one open descriptor for all its life.
        let descriptor = unsafe { AsyncFd::register(Descriptor(inotify)) };
        Some(Self(descriptor.ok()?))
    }

    /// Waits until something has been removed or written.
    pub async fn disturbed(&self) {
        let read = |descriptor: &Descriptor| match descriptor.0.read_events() {
            Err(Errno::EAGAIN) => Err(std::io::ErrorKind::WouldBlock.into()),
            other => other.map(drop).map_err(std::io::Error::from),
        };
        // The error would repeat at once, so watching stops.
        if self.0.async_io(Interest::READABLE, read).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
