//! Notices that a run directory, or a file in it, was taken away.
//!
//! The kernel tells (inotify), so that watching costs nothing while nothing happens. The parent is
//! watched too: a directory that somebody holds open is not said to be gone by itself.
//!
//! *Invariant:* it only says that something was removed; what is missing is for the owner to see.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that is readable when something was removed.
#[derive(Debug)]
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }
}

/// Watches one run directory.
#[derive(Debug)]
pub(crate) struct Presence(AsyncFd<Descriptor>);

impl Presence {
    /// Begins to watch; `None` where the system has no watches left, and then nothing is noticed.
    pub(crate) fn watch(directory: &Path) -> Option<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
        let removed = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
        inotify.add_watch(directory, removed).ok()?;
        inotify.add_watch(directory.parent()?, removed).ok()?;
        // SAFETY: an inotify instance holds one open descriptor for all its life.
        let descriptor = unsafe { AsyncFd::register(Descriptor(inotify)) };
        Some(Self(descriptor.ok()?))
    }

    /// Waits until something was removed.
    pub(crate) async fn disturbed(&self) {
        let read = |descriptor: &Descriptor| match descriptor.0.read_events() {
            Err(Errno::EAGAIN) => Err(std::io::ErrorKind::WouldBlock.into()),
            other => other.map(drop).map_err(std::io::Error::from),
        };
        // An error would come again at once; nothing more is noticed then.
        if self.0.async_io(Interest::READABLE, read).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
