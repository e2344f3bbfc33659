//! The page: shows this user's clusters in a browser, and passes requests for changes on. What it
//! shows is also there for a terminal ([`Watch`], [`Meter`]).
//!
//! A process of its own: it reads `control.sock` and files, and measures processes and GPUs itself,
//! only while somebody looks. The supervisor opens no port.
//!
//! | module | task |
//! |---|---|
//! | `guard` | who may ask for what (pure) |
//! | `server` | the requests and their answers |
//! | `feed` | what open pages are told of a cluster |
//! | `log_view`, `log_requests` | logs as one, in pages, by text and level; what may be asked |
//! | `overview` | all clusters, joined hosts, and who holds this machine's GPUs and NICs |
//! | `tasks` | what tasks do, and why one waits |
//! | `opening` | the file that leads a browser to the page |
//! | `watch` | the same for this program's own screen |
//! | `measure` | what processes, GPUs and NICs do now |
//! | `metrics` | the same and all clusters' metrics, for Prometheus |
//! | `scrape` | for Prometheus likewise: what the plan, the audit and native processes know |
//! | `assets` | the page's files |
//!
//! *Invariant:* `guard` has let in every request that is answered with anything about a cluster.

mod assets;
mod feed;
mod guard;
mod history;
mod log_requests;
mod log_view;
mod measure;
mod metrics;
mod opening;
mod overview;
mod patience;
mod scrape;
mod server;
mod tasks;
mod watch;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokio::net::TcpListener;

use crate::os::own_user::OwnUser;
use crate::os::run_directory::RunDirectoryError;
pub use feed::Lanes;
use guard::{Door, Token};
pub use measure::{Figures, Meter, ProcessFigures, processes_of};
pub use opening::Opening;
use patience::Patient;
pub use watch::{Update, Watch};

/// Where the page is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On a loopback address, to those who have the token.
    Loopback(SocketAddr),
    /// On a Unix socket, to this user.
    Socket(PathBuf),
}

/// Why the page can't be served.
#[derive(Debug, thiserror::Error)]
pub enum DashboardError {
    /// It is neither an address nor a path.
    #[error("{text:?} is neither an address such as 127.0.0.1:0 nor the path of a socket")]
    NoAddress {
        /// What was given.
        text: String,
    },
    /// Other machines could connect.
    #[error("{address} is not a loopback address")]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// The address is in use.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The socket can't be created.
    #[error("cannot listen on {}", path.display())]
    BindSocket {
        /// The socket's path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The system has no random numbers for the token.
    #[error("cannot make a token: {0}")]
    Token(getrandom::Error),
    /// The token's file can't be used.
    #[error("cannot use the token's file {}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file that leads a browser to the page can't be written.
    #[error("cannot write {} for a browser", path.display())]
    Opening {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The directory of that file can't be used.
    #[error(transparent)]
    Directory(#[from] RunDirectoryError),
}

impl DashboardError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoAddress { .. } => Some("a path contains a '/'".to_owned()),
            Self::NotLoopback { .. } => Some(
                "from another machine: ssh -L 8788:localhost:PORT HOST, then open the link with \
                 port 8788"
                    .to_owned(),
            ),
            Self::BindSocket { .. } => Some(
                "name a new file, for its socket, in a directory that is there and yours"
                    .to_owned(),
            ),
            Self::Bind { .. } => Some("port 0 takes a free one".to_owned()),
            Self::TokenFile { .. } => Some(
                "it is created if it is missing; otherwise it is a regular file with at least 16 \
                 letters or digits, and is closed to other users (chmod 600)"
                    .to_owned(),
            ),
            Self::Directory(error) => error.hint(),
            Self::Token(_) | Self::Opening { .. } => None,
        }
    }
}

impl FromStr for Listen {
    type Err = DashboardError;

    fn from_str(text: &str) -> Result<Self, DashboardError> {
        if text.contains('/') {
            return Ok(Self::Socket(PathBuf::from(text)));
        }
        let no_address = |_| DashboardError::NoAddress { text: text.to_owned() };
        let address: SocketAddr = text.parse().map_err(no_address)?;
        match address.ip().is_loopback() {
            true => Ok(Self::Loopback(address)),
            false => Err(DashboardError::NotLoopback { address }),
        }
    }
}

/// A server that listens.
#[derive(Debug)]
pub struct Dashboard {
    listener: Listener,
    door: Door,
}

#[derive(Debug)]
enum Listener {
    Loopback(TcpListener),
    Socket(OwnUser, PathBuf),
}

impl Dashboard {
    /// Listens; answers nothing yet. The token is that in the file, if one is named.
    ///
    /// # Errors
    /// If the place is taken, the file can't be used, or there are no random numbers.
    pub async fn bind(listen: &Listen, token_file: Option<&Path>) -> Result<Self, DashboardError> {
        match listen {
            Listen::Loopback(address) => {
                let failed = |source| DashboardError::Bind { address: *address, source };
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let address = listener.local_addr().map_err(failed)?;
                let token = token(token_file)?;
                let door = Door::Loopback { address, token };
                Ok(Self { listener: Listener::Loopback(listener), door })
            }
            Listen::Socket(path) => {
                let failed = |source| DashboardError::BindSocket { path: path.clone(), source };
                let listener = OwnUser::bind(path).map_err(failed)?;
                Ok(Self {
                    listener: Listener::Socket(listener, path.clone()),
                    door: Door::OwnSocket,
                })
            }
        }
    }

    /// The link to the page, with the token; `None` on a Unix socket.
    pub fn link(&self) -> Option<String> {
        self.door.link()
    }

    /// Serves the page until the future is dropped.
    ///
    /// # Errors
    /// If connections can't be accepted any more.
    pub async fn serve(self) -> io::Result<()> {
        let router = server::router(self.door, feed::Feeds::of_running());
        match self.listener {
            Listener::Loopback(listener) => axum::serve(Patient::new(listener), router).await,
            Listener::Socket(listener, path) => {
                let _removed_at_the_end = Removed(path);
                axum::serve(listener, router).await
            }
        }
    }
}

/// Longest file of a token in bytes; what is longer is no token.
const TOKEN_FILE_LIMIT: u64 = 4096;

/// The token in a file, which is created if it is missing; without a file a new one.
fn token(file: Option<&Path>) -> Result<Token, DashboardError> {
    let Some(path) = file else { return Token::new().map_err(DashboardError::Token) };
    let failed = |source| DashboardError::TokenFile { path: path.to_owned(), source };
    // Opening a pipe in blocking mode would wait for its writer.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    match opened {
        Ok(file) => {
            let about = file.metadata().map_err(failed)?;
            let closed = about.is_file() && about.permissions().mode() & 0o077 == 0;
            let short = about.len() <= TOKEN_FILE_LIMIT;
            let mut text = String::new();
            file.take(TOKEN_FILE_LIMIT).read_to_string(&mut text).map_err(failed)?;
            let token = Token::known(text.trim()).filter(|_| closed && short);
            token.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let token = Token::new().map_err(DashboardError::Token)?;
            let mut options = OpenOptions::new();
            let created = options.write(true).create_new(true).mode(0o600).open(path);
            created.and_then(|mut file| writeln!(file, "{}", token.as_str())).map_err(failed)?;
            Ok(token)
        }
        Err(error) => Err(failed(error)),
    }
}

/// A file that is removed when this is dropped.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // A socket that is left behind is in nobody's way but the next one's.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    #[test]
    fn a_token_is_read_from_a_short_regular_file_alone() {
        let folder = tempfile::tempdir().expect("a directory");
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).expect("a pipe that nobody writes to");
        let long = folder.path().join("long");
        let fresh = folder.path().join("fresh");
        let made = token(Some(&fresh)).expect("a new one");
        assert_eq!(token(Some(&fresh)).expect("the same").as_str(), made.as_str());
        std::fs::write(&long, "a".repeat(1 << 20)).expect("written");
        std::fs::set_permissions(&long, PermissionsExt::from_mode(0o600)).expect("closed");
        for path in [&pipe, &long, Path::new("/dev/zero"), folder.path()] {
            assert!(token(Some(path)).is_err(), "{}", path.display());
        }
    }
}
