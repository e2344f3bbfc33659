//! A listener on a Unix socket for this user alone.
//!
//! *Invariant:* connections of other users, except root, are closed before anything is read from
//! them.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::unistd::Uid;
use tokio::net::{UnixListener, UnixStream};

/// Accepts only connections of this user, or root.
#[derive(Debug)]
pub struct OwnUser(UnixListener);

impl OwnUser {
    /// Listens at `path`, with mode 0600.
    ///
    /// # Errors
    /// If the socket can't be created.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self(listener))
    }

    /// The next connection.
    pub async fn connection(&mut self) -> UnixStream {
        axum::serve::Listener::accept(self).await.0
    }
}

impl axum::serve::Listener for OwnUser {
    type Io = UnixStream;
    type Addr = tokio::net::unix::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = axum::serve::Listener::accept(&mut self.0).await;
            let own = Uid::effective().as_raw();
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}
