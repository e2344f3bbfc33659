//! The socket of a process, which comes back when it is removed.
//!
//! Session managers remove run directories, and people clean up; the supervisor makes its directory
//! again, but only who listens can listen again.
//!
//! *Invariant:* a socket that another process has made in its place is left alone, and so is a
//! directory with another cluster's secret.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::error::Error;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_wire::secret::Secret;

/// Time between two looks whether the socket is there.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// Listens on a socket that only this user can connect to.
pub(super) struct Listener {
    path: PathBuf,
    secret: Secret,
    listener: UnixListener,
    looks: Interval,
}

impl Listener {
    /// Listens on a socket in the run directory of the cluster with this secret.
    pub(super) fn new(path: &Path, secret: Secret) -> Result<Self, Error> {
        let socket =
            |source| Error::Socket { action: "listen on", path: path.to_path_buf(), source };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(socket(error)),
            _ => {}
        }
        let listener = bind(path).map_err(socket)?;
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { path: path.to_owned(), secret, listener, looks })
    }

    /// The next connection.
    pub(super) async fn accept(&mut self) -> io::Result<UnixStream> {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => return accepted.map(|(stream, _)| stream),
                _ = self.looks.tick() => self.come_back(),
            }
        }
    }

    fn come_back(&mut self) {
        let is_gone = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
        if !fs::symlink_metadata(&self.path).is_err_and(is_gone) {
            return;
        }
        let of_this_cluster = self.path.parent().is_some_and(|directory| {
            Paths::at(directory).read_secret().is_ok_and(|secret| secret == self.secret)
        });
        // Otherwise the directory is not back yet, or somebody else's.
        if of_this_cluster && let Ok(listener) = bind(&self.path) {
            tracing::info!(socket = %self.path.display(), "the socket was removed, and is back");
            self.listener = listener;
        }
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_comes_back_in_its_own_clusters_directory_alone() {
        let folder = tempfile::tempdir().expect("a directory");
        let paths = Paths::at(folder.path());
        let [own, others] = [[1_u8; 32], [2; 32]].map(Secret::new);
        let know = |secret: &Secret| fs::write(paths.secret(), secret.to_hex()).expect("written");
        let socket = folder.path().join("gpu0.sock");
        know(&own);
        let mut listener = Listener::new(&socket, own.clone()).expect("it listens");
        let mut reached = async || {
            let connecting = UnixStream::connect(&socket).await.is_ok();
            let accepted = tokio::time::timeout(LOOK * 10, listener.accept()).await;
            connecting && accepted.is_ok_and(|accepted| accepted.is_ok())
        };
        assert!(reached().await);
        fs::remove_file(&socket).expect("removed");
        know(&others);
        assert!(!reached().await && !reached().await, "it is another cluster's directory");
        know(&own);
        assert!(!reached().await && reached().await, "once somebody has looked");
        fs::remove_file(&socket).expect("removed");
        let _another = UnixListener::bind(&socket).expect("it listens");
        reached().await;
        assert!(!reached().await, "it is another process's socket");
    }
}
