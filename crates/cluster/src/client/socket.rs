//! Blocking sockets to the cluster's processes, whose waits end if a process does not answer.
//!
//! The supervisor knows which processes do not answer. A wait continues, however long, while all
//! processes answer, and while the supervisor is going to restart one that does not.
//!
//! *Invariant:* a wait is cut short only after [`PATIENCE`] without a received message.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, getsockopt, recv, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::ClientError;
use crate::control::Control;
use crate::report::recorded_plan;
use cuda_cluster_machine::os::event_loop;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::Unresponsive;
use cuda_cluster_native::connection;
use cuda_cluster_native::error::ConversationError;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::secret::Secret;

/// Shortest silence after which to ask the supervisor which processes do not answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two such requests during a wait.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// The error for a process that does not answer, preferably one of those named.
pub(super) fn silent(paths: &Paths, named: Option<&str>) -> Option<ClientError> {
    if recorded_plan(paths)?.supervision.unresponsive == Unresponsive::Restart {
        return None;
    }
    let control = Control::new(paths.control());
    // On a separate thread, because the caller's may already run an event loop.
    let ask = move || -> Option<ClusterState> {
        let runtime = event_loop::start(&mut tokio::runtime::Builder::new_current_thread()).ok()?;
        runtime.block_on(control.read("/v1/state")).ok()
    };
    let asked = std::thread::Builder::new().spawn(ask).ok()?;
    let state = asked.join().ok()??;
    let silent = state.unresponsive().find(|one| named.is_none_or(|name| one.name == name))?;
    let since = silent.not_answering_since.clone().unwrap_or_default();
    Some(ClientError::NotAnswering { process: silent.name.clone(), since })
}

/// Connects to a process of the cluster, and authenticates both sides.
pub(super) fn connect(
    paths: &Paths,
    process: &str,
    secret: &Secret,
    role: Role,
) -> Result<Ready<Patient>, ClientError> {
    let path = paths.socket(process);
    let patient = Patient::connect(paths, process);
    let patient = patient.map_err(|source| ClientError::Socket { path: path.clone(), source })?;
    let mut socket = Ready(patient);
    match finish(connection::greet(&mut socket, secret, role)) {
        Ok(()) => Ok(socket),
        Err(ConversationError::Frame(_)) => Err(ClientError::Stranger { path }),
        Err(error) => Err(ClientError::conversation(&path, error)),
    }
}

/// A connection whose reads and writes fail when its process does not answer.
pub(super) struct Patient {
    stream: UnixStream,
    paths: Paths,
    process: String,
}

impl Patient {
    fn connect(paths: &Paths, process: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(paths.socket(process))?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))?;
        Ok(Self { stream, paths: paths.clone(), process: process.to_owned() })
    }

    /// The plain connection, whose reads and writes wait forever.
    pub(super) fn into_stream(self) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    /// The process at the other end, if it is one that this process can name.
    pub(super) fn peer(&self) -> Option<u32> {
        let credentials = getsockopt(&self.stream, sockopt::PeerCredentials).ok()?;
        // 0 for a process outside this PID namespace.
        u32::try_from(credentials.pid()).ok().filter(|pid| *pid > 0)
    }

    /// Whether the other end has not closed the connection, and has sent nothing.
    pub(super) fn is_open(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        recv(self.stream.as_raw_fd(), &mut [0], flags) == Err(Errno::EAGAIN)
    }

    fn patiently(
        &mut self,
        mut attempt: impl FnMut(&mut UnixStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let began = Instant::now();
        loop {
            match attempt(&mut self.stream) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                done => return done,
            }
            if began.elapsed() >= PATIENCE
                && let Some(error) = silent(&self.paths, Some(&self.process))
            {
                return Err(io::Error::new(ErrorKind::TimedOut, error));
            }
        }
    }
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.read(buffer))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A blocking stream for functions that are written for asynchronous ends of the same sockets. Its
/// reads and writes block in the system, and so are ready when they return; see [`finish`].
pub(super) struct Ready<S>(pub(super) S);

/// The result of a future that awaits only [`Ready`] streams.
pub(super) fn finish<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("a future over blocking streams waits for something else"),
    }
}

fn uninterrupted<T>(mut attempt: impl FnMut() -> io::Result<T>) -> Poll<io::Result<T>> {
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            done => return Poll::Ready(done),
        }
    }
}

impl<S: Read + Unpin> AsyncRead for Ready<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        uninterrupted(|| {
            let read = self.0.read(buffer.initialize_unfilled())?;
            buffer.advance(read);
            Ok(())
        })
    }
}

impl<S: Write + Unpin> AsyncWrite for Ready<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        uninterrupted(|| self.0.write(bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        uninterrupted(|| self.0.flush())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}
