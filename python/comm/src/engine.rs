//! The thread that waits for all sockets of the process.
//!
//! It accepts, greets, puts messages together, copies large frames (many bytes on threads of their
//! own), sends what sockets did not take at once, and tells event loops. It sleeps when nothing
//! happens, and needs nothing of Python.
//!
//! *Invariant:* an engine belongs to the process that started it; a fork starts its own.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
#[cfg(feature = "plane")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuda_cluster_data::copy::Copiers;
use cuda_cluster_data::memory::mapped::Mappings;
use cuda_cluster_data::memory::{Block, Limits, Pool};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{SockFlag, accept4, setsockopt, sockopt};

use crate::completions::Completions;
use crate::connection::{Connection, Ending};
use crate::greeting::{LENGTH, Role};
use crate::listener::Listener;
use crate::reader::Message;
use crate::remembered::Remembered;
use crate::routes;

mod entry;
mod service;

/// What [`Engine::bound`] has said last: bytes of memory that are kept, and of the whole process.
static KEEP: AtomicUsize = AtomicUsize::new(256 << 20);
static PROCESS: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Threads that copy at the same time. Two fill the memory bus of a small machine, and the event
/// loops of the workers need the processors, too.
const COPIERS: usize = 2;

/// The engine of this process, or of the one that this process is a fork of.
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());

/// How an end of a connection behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's secret: both ends of a TCP connection prove that they know it.
    pub secret: Option<[u8; LENGTH]>,
    /// The host that the connector has connected to; of a listener, none.
    pub host: String,
    /// After this time without an answer from the other machine, a TCP connection is broken.
    pub tcp_timeout: Duration,
    /// How long a peer may take to greet.
    pub greeting: Duration,
    /// Which route large frames may take between processes of one machine.
    pub route: Route,
}

/// Which route large frames may take between processes of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The fastest that is there.
    Auto,
    /// The sender writes them to memory that both have mapped.
    Mapped,
    /// The receiver copies them from the sender's memory.
    Copied,
    /// The socket.
    Socket,
}

/// All connections and listeners of a process, and the thread that waits for them.
#[derive(Debug)]
pub struct Engine {
    process: u32,
    epoll: Epoll,
    wake: EventFd,
    commands: Mutex<Vec<Command>>,
    limits: Arc<Limits>,
    pool: Arc<Pool>,
    token: [u8; LENGTH],
    ids: AtomicU64,
    copiers: Arc<Copiers>,
    mappings: Mappings,
    routes: Mutex<routes::Knowledge>,
    received: Received,
    is_prepared: AtomicBool,
    #[cfg(feature = "plane")]
    pub(crate) plane: OnceLock<Result<crate::plane::Plane, String>>,
    /// Seals addresses for this process.
    #[cfg(feature = "plane")]
    pub(crate) plane_key: crate::plane::Key,
}

/// Bytes of frames that have arrived, by the way that they took.
#[derive(Debug, Default)]
struct Received {
    copied: AtomicU64,
    mapped: AtomicU64,
    socket: AtomicU64,
}

#[derive(Debug)]
enum Command {
    Connect { connection: Arc<Connection>, settings: Settings },
    Listen(Arc<Listener>),
    Resume(u64),
    Copied { id: u64, message: Result<Message, Ending> },
    Remove(u64),
    RemoveListener(u64),
}

impl Settings {
    /// Without a secret.
    pub fn new(host: &str) -> Self {
        let (tcp_timeout, greeting) = (Duration::from_secs(30), Duration::from_secs(10));
        Self { secret: None, host: host.to_owned(), tcp_timeout, greeting, route: Route::Auto }
    }
}

impl Engine {
    /// The engine of this process, which is started by the first call.
    pub fn of_this_process() -> io::Result<&'static Self> {
        loop {
            let at = ENGINE.load(Ordering::Acquire);
            // An engine is never freed: forks and their parents may still refer to it.
            if let Some(engine) = engine_at(at)
                && engine.is_alive_here()
            {
                return Ok(engine);
            }
            let new = Box::leak(Box::new(Self::new()?));
            let swapped = ENGINE.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire);
            if swapped.is_ok() {
                let engine: &'static Self = new;
                engine.pool.wake_with(move || {
                    let _ = engine.wake.write(1);
                });
                let thread = std::thread::Builder::new().name("direct comm".into());
                thread.spawn(move || service::run(engine))?;
                return Ok(engine);
            }
        }
    }

    /// Sets how many bytes of memory are kept for later messages, and the resident memory of the
    /// process from which on none is ([`usize::MAX`] for any).
    pub fn bound(keep: usize, process: usize) {
        KEEP.store(keep, Ordering::Relaxed);
        PROCESS.store(process, Ordering::Relaxed);
        if let Some(engine) = engine_at(ENGINE.load(Ordering::Acquire))
            && engine.is_alive_here()
        {
            engine.limits.set(keep, process);
            engine.relieve();
            // Its thread looks at what the process has from now on.
            let _ = engine.wake.write(1);
        }
    }

    /// Readies this process for its first large messages, once: finds their route, and touches so
    /// many bytes of memory for them. A thread of low priority does that.
    pub fn prepare(&'static self, bytes: usize) {
        if bytes == 0 || self.is_prepared.swap(true, Ordering::Relaxed) {
            return;
        }
        let thread = std::thread::Builder::new().name("direct memory".into());
        // Without the thread, the first messages take longer, and nothing else.
        let _ = thread.spawn(move || {
            lower_priority();
            let has_room = || self.limits.excess(routes::SAMPLES) == 0;
            if self.routes().measures(has_room) {
                self.measure_routes();
            }
            let _ = self.pool.prepare(bytes);
        });
    }

    /// Gives back what this process has too much of: memory of the pool, and page tables of the
    /// memory of peers.
    fn relieve(&self) {
        let excess = self.limits.excess(0);
        let freed = self.pool.free_up(excess);
        self.mappings.free_up(excess.saturating_sub(freed));
    }

    /// Memory of the pool.
    ///
    /// # Errors
    /// If there is none.
    pub fn take(&self, len: usize) -> io::Result<Block> {
        self.pool.take(len)
    }

    /// What the pool keeps now, in bytes.
    pub fn kept(&self) -> usize {
        self.pool.kept()
    }

    /// What the pool and its blocks share with peers, and what peers share with this process and it
    /// has written, in bytes.
    pub fn shared(&self) -> (usize, usize) {
        (self.pool.shared(), self.mappings.touched())
    }

    /// Bytes of frames that this process has received: copied, in mapped memory, over sockets.
    pub fn received(&self) -> [u64; 3] {
        let Received { copied, mapped, socket } = &self.received;
        [copied, mapped, socket].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    /// From how many bytes on a message is written to mapped memory though it could be copied, if it
    /// ever is. None before that was measured.
    pub fn least(&self) -> Option<Option<usize>> {
        let routes = self.routes();
        routes.is_known().then(|| routes.least())
    }

    /// Takes over a connected socket and begins to greet.
    pub fn connect(
        &'static self,
        socket: OwnedFd,
        settings: Settings,
        completions: &Arc<Completions>,
    ) -> Arc<Connection> {
        let connection = Connection::new(self.id(), socket, self, Arc::clone(completions));
        let connection = Arc::new(connection);
        self.post(Command::Connect { connection: Arc::clone(&connection), settings });
        connection
    }

    /// Takes over a listening socket.
    pub fn listen(
        &'static self,
        socket: OwnedFd,
        settings: Settings,
        completions: &Arc<Completions>,
    ) -> Arc<Listener> {
        let completions = Arc::clone(completions);
        let listener = Arc::new(Listener::new(self.id(), socket, settings, completions, self));
        self.post(Command::Listen(Arc::clone(&listener)));
        listener
    }

    /// Whether this is the process that started it, and not a fork.
    pub fn is_alive_here(&self) -> bool {
        self.process == std::process::id()
    }

    pub(crate) fn resume(&self, id: u64) {
        self.post(Command::Resume(id));
    }

    pub(crate) fn remove(&self, id: u64) {
        self.post(Command::Remove(id));
    }

    pub(crate) fn remove_listener(&self, id: u64) {
        self.post(Command::RemoveListener(id));
    }

    /// Whether this process can share memory.
    fn shares(&self) -> bool {
        self.pool.can_share()
    }

    /// From how many bytes on a message is written to mapped memory though it could be copied, once
    /// that has been measured. A message of `len` bytes may be reason to measure.
    fn least_written(&'static self, len: usize) -> Option<usize> {
        let has_room = || self.limits.excess(routes::SAMPLES.saturating_add(len)) == 0;
        if len >= routes::LEAST && self.routes().measures(has_room) {
            let thread = std::thread::Builder::new().name("direct routes".into());
            if thread.spawn(|| self.measure_routes()).is_err() {
                self.routes().learn(None);
            }
        }
        self.routes().least()
    }

    fn measure_routes(&self) {
        let remembered = Remembered::here();
        let known = self.routes().is_first().then(|| remembered.read()).flatten();
        let found = known.or_else(|| routes::measure().inspect(|found| remembered.write(*found)));
        self.routes().learn(found);
        if self.routes().least().is_some() {
            self.pool.share();
        }
    }

    fn routes(&self) -> MutexGuard<'_, routes::Knowledge> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new() -> io::Result<Self> {
        let limits = Limits::new(KEEP.load(Ordering::Relaxed));
        limits.set(limits.keep(), PROCESS.load(Ordering::Relaxed));
        let mut token = [0; LENGTH];
        getrandom::fill(&mut token)?;
        #[cfg(feature = "plane")]
        let plane_key = {
            let mut key = [0; 32];
            getrandom::fill(&mut key)?;
            key
        };
        Ok(Self {
            process: std::process::id(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            commands: Mutex::default(),
            pool: Pool::new(&limits),
            token,
            ids: AtomicU64::new(2),
            copiers: Copiers::new("direct copy", COPIERS),
            mappings: Mappings::new(&limits),
            limits,
            routes: Mutex::new(routes::Knowledge::NONE),
            received: Received::default(),
            is_prepared: AtomicBool::new(false),
            #[cfg(feature = "plane")]
            plane: OnceLock::new(),
            #[cfg(feature = "plane")]
            plane_key,
        })
    }

    /// A number for a connection or listener; connections use the next one, too.
    fn id(&self) -> u64 {
        self.ids.fetch_add(2, Ordering::Relaxed)
    }

    fn post(&self, command: Command) {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.push(command);
        if commands.len() == 1 {
            let _ = self.wake.write(1);
        }
    }

    fn commands(&self) -> Vec<Command> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.wake.read();
        std::mem::take(&mut commands)
    }
}

#[allow(unsafe_code)]
fn engine_at(at: *mut Engine) -> Option<&'static Engine> {
    // SAFETY: what is stored in `ENGINE` is null or a leaked box.
    unsafe { at.as_ref() }
}

/// Of this thread: whatever else wants to run goes first.
#[allow(unsafe_code)]
fn lower_priority() {
    // Not SCHED_IDLE: that would be kept off the processor for long while it holds a lock of the pool.
    // SAFETY: numbers alone. On Linux, 0 is the calling thread.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// Accepts one connection, if one waits.
#[allow(unsafe_code)]
fn accept(listener: &Listener) -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = accept4(listener.as_fd().as_raw_fd(), flags)?;
    // SAFETY: a new descriptor, which nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

impl Route {
    fn copies(self) -> bool {
        matches!(self, Route::Auto | Route::Copied)
    }

    fn maps(self) -> bool {
        matches!(self, Route::Auto | Route::Mapped)
    }
}

/// Which end of a connection this process is, and through which listener.
#[derive(Debug)]
enum End {
    Connector,
    Listener(Arc<Listener>),
}

impl End {
    fn role(&self) -> Role {
        match self {
            End::Connector => Role::Connector,
            End::Listener(_) => Role::Listener,
        }
    }
}

/// Sends small messages at once, and notices a machine that is gone, as Dask's TCP does.
fn prepare_tcp(socket: &OwnedFd, timeout: Duration) -> nix::Result<()> {
    const PROBES: u32 = 10;
    let whole = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX).max(PROBES + 1);
    let interval = (whole.saturating_sub((whole / 4).max(2)) / PROBES).max(1);
    let idle = whole.saturating_sub(interval * PROBES).max(1);
    setsockopt(socket, sockopt::TcpNoDelay, &true)?;
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepCount, &PROBES)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &idle)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &interval)?;
    setsockopt(socket, sockopt::TcpUserTimeout, &whole.saturating_mul(1000))
}

/// The addresses of both ends of a TCP connection: this one's, and the peer's.
#[cfg(feature = "python")]
pub(crate) fn tcp_addresses(
    connection: &Connection,
) -> io::Result<(std::net::SocketAddr, std::net::SocketAddr)> {
    let stream = std::net::TcpStream::from(connection.as_fd().try_clone_to_owned()?);
    Ok((stream.local_addr()?, stream.peer_addr()?))
}

/// Listeners that have run out of descriptors, until they try again.
type Waiting<T> = VecDeque<(std::time::Instant, T)>;

/// Where a connection's peer is, for messages.
fn host_of_peer(connection: &Connection) -> String {
    let ends = connection.as_fd().try_clone_to_owned().map(|socket| {
        let stream = std::net::TcpStream::from(socket);
        (stream.local_addr(), stream.peer_addr())
    });
    match ends {
        Ok((_, Ok(peer))) => peer.ip().to_string(),
        // Once the peer has closed its end, the kernel does not tell who it was.
        Ok((Ok(own), Err(_))) if own.ip().is_loopback() => own.ip().to_string(),
        Ok((Ok(_), Err(_))) => "a host that is gone".to_owned(),
        // A Unix socket.
        _ => "this machine".to_owned(),
    }
}

#[cfg(all(test, feature = "plane"))]
mod tests {
    use super::*;

    #[test]
    fn each_process_has_a_key_of_its_own_that_nobody_can_guess() {
        let keys = [(); 2].map(|()| Engine::new().expect("an engine").plane_key);
        assert_ne!(keys[0], keys[1]);
        assert!(keys.iter().all(|key| *key != [0; 32]));
    }
}
