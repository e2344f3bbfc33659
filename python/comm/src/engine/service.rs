//! The engine's thread.
//!
//! *Invariant:* each socket is watched for edges, so whoever is told of one is served until its
//! socket has nothing more or something else holds it up.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname};
use nix::unistd::Pid;

use super::entry::{Entry, Next, Scratch};
use super::{Command, End, Engine, Settings, Waiting, accept, prepare_tcp};
use crate::connection::{Connection, Ending};
use crate::listener::Listener;
use crate::peer::{self, Peer};

const WAKE: u64 = 0;

/// Accepted connections that may be greeting at the same time; beyond them, the oldest is given up.
/// Or an eighth of the descriptors that this process may have, if those are fewer: it needs the others.
const GREETING: usize = 1024;

/// So many may be greeting in any case.
const LEAST_GREETING: usize = 16;

/// Connections that are accepted before others have their turn.
const ACCEPTED: usize = 64;

/// How long a listener waits that has run out of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// How often a process with a limit looks how much memory it has, while it holds some that it need
/// not: as often as Dask does.
const LOOK: Duration = Duration::from_millis(100);

struct Service {
    engine: &'static Engine,
    entries: HashMap<u64, Entry>,
    listeners: HashMap<u64, Arc<Listener>>,
    /// To be served again.
    again: VecDeque<u64>,
    /// Connections of this process that are greeting, and when they must have finished; sorted if
    /// all have the same time.
    greeting: Waiting<u64>,
    /// As above: those that others have made.
    strangers: Waiting<u64>,
    /// Listeners that wait for descriptors.
    paused: Waiting<u64>,
    /// When it looks again whether the process has too much memory.
    look: Instant,
    scratch: Scratch,
}

/// Serves until the process ends.
pub(super) fn run(engine: &'static Engine) {
    let mut service = Service::new(engine);
    let wake = EpollEvent::new(EpollFlags::EPOLLIN, WAKE);
    if engine.epoll.add(engine.wake.as_fd(), wake).is_err() {
        return;
    }
    let mut events = [EpollEvent::empty(); 128];
    loop {
        let next = service.on_time(Instant::now());
        let timeout = if service.again.is_empty() { timeout(next) } else { EpollTimeout::ZERO };
        let count = match engine.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => continue,
            Err(_) => return,
        };
        for _ in 0..service.again.len() {
            if let Some(id) = service.again.pop_front() {
                service.serve(id);
            }
        }
        for event in &events[..count] {
            match event.data() {
                WAKE => engine.commands().into_iter().for_each(|command| service.on(command)),
                id => service.on_event(id, event.events()),
            }
        }
    }
}

fn timeout(next: Option<Instant>) -> EpollTimeout {
    let Some(next) = next else { return EpollTimeout::NONE };
    // Rounded up, so that it is not woken just before.
    let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
}

impl Service {
    fn new(engine: &'static Engine) -> Self {
        Self {
            engine,
            entries: HashMap::new(),
            listeners: HashMap::new(),
            again: VecDeque::new(),
            greeting: VecDeque::new(),
            strangers: VecDeque::new(),
            paused: VecDeque::new(),
            look: Instant::now(),
            scratch: Scratch::new(),
        }
    }

    /// Does what is due. The time at which something is due next.
    fn on_time(&mut self, now: Instant) -> Option<Instant> {
        for greeting in [&mut self.greeting, &mut self.strangers] {
            while let Some((due, id)) = greeting.front().copied() {
                match self.entries.get(&id) {
                    Some(entry) if entry.is_greeting() && due > now => break,
                    Some(entry) if entry.is_greeting() => {
                        entry.connection.fail(Ending::Silent);
                    }
                    _ => {}
                }
                greeting.pop_front();
            }
        }
        while let Some((_, id)) = self.paused.front().copied().filter(|(due, _)| *due <= now) {
            self.paused.pop_front();
            if let Some(listener) = self.listeners.get(&id) {
                let _ = self.engine.epoll.add(listener.as_fd(), listening(id));
            }
        }
        let trim = self.engine.pool.trim(now);
        let forget = self.engine.mappings.trim(now);
        let look = (trim.or(forget).is_some() && self.engine.limits.bounds_process()).then(|| {
            if self.look <= now {
                self.engine.relieve();
                self.look = now + LOOK;
            }
            self.look
        });
        let due = |waiting: &Waiting<u64>| waiting.front().map(|(due, _)| *due);
        let times = [&self.greeting, &self.strangers, &self.paused].map(due);
        times.into_iter().chain([trim, forget, look]).flatten().min()
    }

    fn on(&mut self, command: Command) {
        match command {
            Command::Connect { connection, settings } => {
                self.add(connection, End::Connector, &settings);
            }
            Command::Listen(listener) => {
                let id = listener.id();
                if self.engine.epoll.add(listener.as_fd(), listening(id)).is_ok() {
                    self.listeners.insert(id, listener);
                }
            }
            Command::Resume(id) => {
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.resume();
                }
                self.serve(id);
            }
            Command::Copied { id, message } => {
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.copied(message);
                }
                self.serve(id);
            }
            Command::Remove(id) => {
                self.remove(id);
            }
            Command::RemoveListener(id) => {
                if let Some(listener) = self.listeners.remove(&id) {
                    let _ = self.engine.epoll.delete(listener.as_fd());
                }
            }
        }
    }

    fn on_event(&mut self, id: u64, events: EpollFlags) {
        if let Some(listener) = self.listeners.get(&id) {
            return self.accept(&Arc::clone(listener));
        }
        let Some(entry) = self.entries.get(&id) else { return };
        if events.contains(EpollFlags::EPOLLOUT) {
            entry.connection.flush();
        }
        self.serve(id);
    }

    fn serve(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if entry.serve(self.engine, &mut self.scratch) == Next::Again {
            self.again.push_back(id);
        }
    }

    fn accept(&mut self, listener: &Arc<Listener>) {
        for _ in 0..ACCEPTED {
            match accept(listener) {
                Ok(socket) => {
                    let completions = Arc::clone(&listener.completions);
                    let id = self.engine.id();
                    let connection = Connection::new(id, socket, self.engine, completions);
                    let end = End::Listener(Arc::clone(listener));
                    self.add(Arc::new(connection), end, &listener.settings);
                }
                Err(Errno::EAGAIN) => return,
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(_) => {
                    // Too many files, or no memory: they wait in the backlog meanwhile. Who greets
                    // makes room for those that do more.
                    self.give_up_oldest();
                    let _ = self.engine.epoll.delete(listener.as_fd());
                    self.paused.push_back((Instant::now() + PAUSE, listener.id()));
                    return;
                }
            }
        }
    }

    fn add(&mut self, connection: Arc<Connection>, end: End, settings: &Settings) {
        let is_ours = matches!(end, End::Connector);
        let process = match admit(&connection, settings) {
            Ok(process) => process,
            Err(ending) => return connection.fail(ending),
        };
        let entry = match Entry::new(self.engine, Arc::clone(&connection), end, settings, process) {
            Ok(entry) => entry,
            Err(error) => return connection.fail(error.into()),
        };
        let edges = EpollFlags::EPOLLIN
            | EpollFlags::EPOLLOUT
            | EpollFlags::EPOLLRDHUP
            | EpollFlags::EPOLLET;
        let id = connection.id();
        if let Err(error) = self.engine.epoll.add(connection.as_fd(), EpollEvent::new(edges, id)) {
            return connection.fail(std::io::Error::from(error).into());
        }
        self.entries.insert(id, entry);
        let due = Instant::now() + settings.greeting;
        if is_ours {
            self.greeting.push_back((due, id));
            return;
        }
        self.strangers.push_back((due, id));
        if self.strangers.len() > LEAST_GREETING && self.strangers.len() > most_greeting() {
            self.strangers.retain(|(_, id)| self.entries.get(id).is_some_and(Entry::is_greeting));
            if self.strangers.len() > most_greeting() {
                self.give_up_oldest();
            }
        }
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        let _ = self.engine.epoll.delete(entry.connection.as_fd());
        Some(entry)
    }

    /// Gives up one that has been greeting for long: a stranger on a network rather than a process of
    /// this user. Its descriptor is free at once: hundreds may be accepted before the next command.
    fn give_up_oldest(&mut self) {
        let is = |id: &u64, local: bool| {
            let entry = self.entries.get(id);
            entry.is_some_and(|entry| entry.is_greeting() && (local || !entry.is_local()))
        };
        let stranger = self.strangers.iter().position(|(_, id)| is(id, false));
        let oldest = stranger.or_else(|| self.strangers.iter().position(|(_, id)| is(id, true)));
        if let Some((_, id)) = oldest.and_then(|at| self.strangers.remove(at))
            && let Some(entry) = self.remove(id)
        {
            entry.connection.fail(Ending::Refused("too many peers are greeting".to_owned()));
        }
    }
}

fn most_greeting() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    usize::try_from(limit / 8).unwrap_or(usize::MAX).clamp(LEAST_GREETING, GREETING)
}

fn listening(id: u64) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN, id)
}

/// Who is at the other end: a process of this user on this machine, or someone on a network.
fn admit(connection: &Connection, settings: &Settings) -> Result<Option<Pid>, Ending> {
    let broken = |error: Errno| Ending::from(std::io::Error::from(error));
    let socket = connection.as_fd().try_clone_to_owned()?;
    let name: SockaddrStorage =
        getsockname(std::os::fd::AsRawFd::as_raw_fd(&socket)).map_err(broken)?;
    if name.family() != Some(AddressFamily::Unix) {
        prepare_tcp(&socket, settings.tcp_timeout).map_err(broken)?;
        return Ok(None);
    }
    match peer::of(&socket).map_err(broken)? {
        Peer::Own(process) => Ok(Some(process)),
        Peer::Unknown(user) => {
            Err(Ending::Refused(format!("the peer is a process of user {user}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;

    use super::{ACCEPTED, Service, most_greeting};
    use crate::completions::Completions;
    use crate::engine::{Engine, Settings};
    use crate::listener::Listener;

    /// The engine of a test, whose thread is the test itself.
    fn service() -> Service {
        Service::new(Box::leak(Box::new(Engine::new().unwrap())))
    }

    #[test]
    fn strangers_hold_few_descriptors_even_before_the_next_command() {
        let mut service = service();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = UnixListener::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        let completions = Arc::new(Completions::new().unwrap());
        let settings = Settings::new("here");
        let id = service.engine.id();
        let listener = Listener::new(id, socket.into(), settings, completions, service.engine);
        let listener = Arc::new(listener);

        let mut strangers = Vec::new();
        while strangers.len() < most_greeting() + 2 * ACCEPTED {
            strangers.extend((0..ACCEPTED).map(|_| UnixStream::connect(&path).unwrap()));
            service.accept(&listener);
            assert!(service.entries.len() <= most_greeting(), "{}", service.entries.len());
        }
        assert_eq!(service.entries.len(), most_greeting());
    }
}
