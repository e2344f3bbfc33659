//! One connection, as the engine's thread sees it: greets, then reads.
//!
//! *Invariant:* while it is blocked (a copy is under way, or messages wait), nothing is read.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use cuda_cluster_data::copy::{Copiers, Part};
use cuda_cluster_data::memory::arena::Arena;
use cuda_cluster_data::memory::mapped::Mapped;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;

use super::{Command, End, Engine, Settings, host_of_peer};
use crate::connection::{Connection, Ending, Peer};
use crate::greeting::{Greeting, Hello, LENGTH, Refusal, Step as Greeted};
use crate::incoming::{Grants, Incoming, Means};
use crate::peer;
use crate::reader::{Granted, Message, Reader, Step, Waiting};

/// Copies up to this size, in bytes, are made by the engine's own thread: waking another one would
/// take longer.
const AT_ONCE: usize = 1 << 20;

/// Most bytes that are read from one socket before the others have their turn.
const TURN: usize = 4 << 20;

/// From this size on, in bytes, what is missing of a frame is read where it belongs.
const DIRECT: usize = 16 << 10;

pub(super) struct Entry {
    pub(super) connection: Arc<Connection>,
    end: End,
    /// Whether the other end is a process of this machine and user.
    is_local: bool,
    /// That process, where its memory may be read.
    process: Option<Pid>,
    stage: Stage,
    /// Whether this end waits for the first bytes of the peer, which it is to answer.
    is_silent: bool,
    /// Bytes that have been read and not been looked at.
    rest: Vec<u8>,
    blocked: bool,
    /// Whether this end maps memory of its peer.
    maps: bool,
    /// The peer after the greeting.
    peer: Peer,
    /// Files that the peer has sent.
    files: VecDeque<OwnedFd>,
    /// The peer's shared memory, if it has sent it.
    mapped: Option<Arc<Mapped>>,
    /// The shared memory of this process that the peer has got.
    arena: Weak<Arena>,
}

/// Where bytes are read to before it is known what they are.
pub(super) struct Scratch {
    bytes: Box<[u8]>,
    control: Vec<u8>,
}

#[expect(clippy::large_enum_variant, reason = "nearly all connections have been greeted")]
enum Stage {
    Greeting(Box<Greeting>),
    Reading(Reader),
}

/// What is to be done with an entry after it was served.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Wait for its socket.
    Wait,
    /// Serve it again after the others.
    Again,
}

impl Scratch {
    pub(super) fn new() -> Self {
        let bytes = vec![0; 128 << 10].into_boxed_slice();
        Self { bytes, control: nix::cmsg_space!([RawFd; 1]) }
    }
}

impl Entry {
    /// Begins to greet.
    pub(super) fn new(
        engine: &Engine,
        connection: Arc<Connection>,
        end: End,
        settings: &Settings,
        process: Option<Pid>,
    ) -> io::Result<Self> {
        let mut nonce = [0; LENGTH];
        getrandom::fill(&mut nonce)?;
        let is_local = process.is_some();
        // The kernel says who is at the other end of a Unix socket: someone who could read the file
        // with the secret, too.
        let secret = settings.secret.filter(|_| !is_local);
        let copies = is_local && settings.route.copies();
        let process = process.filter(|_| copies);
        let maps = is_local && settings.route.maps() && engine.shares();
        let own = Hello {
            role: end.role(),
            has_secret: secret.is_some(),
            maps,
            nonce,
            // A peer may have a number for this process where this one has none for the peer.
            token_at: if copies { engine.token.as_ptr().addr() as u64 } else { 0 },
            token: engine.token,
            host: settings.host.clone(),
        };
        let (greeting, hello) = Greeting::new(own, secret);
        let is_silent = matches!(end, End::Listener(_));
        if !is_silent {
            connection.send_bytes(&hello);
        }
        let peer = Peer { host: settings.host.clone(), ..Peer::default() };
        Ok(Self {
            connection,
            end,
            is_local,
            process,
            stage: Stage::Greeting(Box::new(greeting)),
            is_silent,
            rest: Vec::new(),
            blocked: false,
            maps,
            peer,
            files: VecDeque::new(),
            mapped: None,
            arena: Weak::new(),
        })
    }

    pub(super) fn is_greeting(&self) -> bool {
        matches!(self.stage, Stage::Greeting(_))
    }

    pub(super) fn is_local(&self) -> bool {
        self.is_local
    }

    /// Reads what there is.
    pub(super) fn serve(&mut self, engine: &'static Engine, scratch: &mut Scratch) -> Next {
        match self.read(engine, scratch) {
            Ok(next) => next,
            Err(ending) => {
                self.connection.fail(ending);
                Next::Wait
            }
        }
    }

    /// Messages that waited have been taken.
    pub(super) fn resume(&mut self) {
        self.blocked = false;
    }

    /// A copy has ended.
    pub(super) fn copied(&mut self, message: Result<Message, Ending>) {
        match message {
            Ok(message) => self.blocked = !self.connection.deliver(message),
            Err(ending) => self.connection.fail(ending),
        }
    }

    fn read(&mut self, engine: &'static Engine, scratch: &mut Scratch) -> Result<Next, Ending> {
        let Scratch { bytes: scratch, control } = scratch;
        let mut read = 0;
        let rest = std::mem::take(&mut self.rest);
        if self.blocked {
            self.rest = rest;
        } else {
            self.parse(engine, &rest)?;
        }
        while !self.blocked && !self.connection.has_ended() {
            if read >= TURN {
                return Ok(Next::Again);
            }
            let socket = self.connection.as_fd().as_raw_fd();
            let direct = match &mut self.stage {
                Stage::Reading(reader) => reader.destination(DIRECT),
                Stage::Greeting(_) => None,
            };
            let is_direct = direct.is_some();
            let to = direct.unwrap_or(&mut *scratch);
            let most = to.len().min(TURN);
            match receive(socket, &mut to[..most], control, &mut self.files) {
                Ok(_) if self.files.len() > usize::from(self.maps) => {
                    let text = "the peer sent files that nobody asked for";
                    return Err(Ending::Broken(text.to_owned()));
                }
                Ok(0) if self.is_greeting() => return Err(Ending::Unwelcome),
                Ok(0) => return Err(self.truncated()),
                Ok(len) => {
                    read += len;
                    let bytes = match &mut self.stage {
                        Stage::Reading(reader) if is_direct => {
                            reader.filled(len);
                            &[][..]
                        }
                        _ => &scratch[..len],
                    };
                    self.parse(engine, bytes)?;
                }
                Err(Errno::EAGAIN) => return Ok(Next::Wait),
                Err(Errno::EINTR) => {}
                Err(Errno::ECONNRESET) if self.is_greeting() => return Err(Ending::Unwelcome),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(Next::Wait)
    }

    /// The end of the peer's bytes.
    fn truncated(&self) -> Ending {
        match &self.stage {
            Stage::Reading(reader) if !reader.is_between_messages() => {
                Ending::Broken("the peer is gone in the middle of a message".to_owned())
            }
            _ => Ending::Closed,
        }
    }

    fn parse(&mut self, engine: &'static Engine, mut input: &[u8]) -> Result<(), Ending> {
        loop {
            if self.blocked {
                self.rest = input.to_vec();
                return Ok(());
            }
            match &mut self.stage {
                Stage::Greeting(greeting) => {
                    if self.is_silent && !input.is_empty() {
                        self.is_silent = false;
                        self.connection.send_bytes(&greeting.answer(input));
                    }
                    let step = greeting.feed(&mut input);
                    match step.map_err(|refusal| refused(&self.connection, &self.end, refusal))? {
                        Greeted::More => return Ok(()),
                        Greeted::Heard(hello) => {
                            if let Some(process) = self.process.filter(|_| hello.token_at != 0) {
                                let read = peer::can_read(process, hello.token_at, &hello.token);
                                self.peer.is_copied = read.is_ok();
                                self.peer.barrier = read.err();
                            }
                            self.peer.maps = self.maps && hello.maps;
                            if let End::Listener(_) = self.end {
                                self.peer.host = hello.host;
                            }
                            self.connection.send_bytes(&greeting.finish(self.peer.is_copied));
                        }
                        Greeted::Done { peer_reads } => {
                            self.peer.copies = peer_reads;
                            self.connection.open(self.peer.clone());
                            let waiting = match (self.peer.is_copied, self.peer.maps) {
                                (true, _) => Waiting::Copied,
                                (false, true) => Waiting::Written,
                                (false, false) => Waiting::Never,
                            };
                            let pool = Arc::clone(&engine.pool);
                            self.stage = Stage::Reading(Reader::new(pool, waiting));
                            if let End::Listener(listener) = &self.end {
                                listener.add(Arc::clone(&self.connection));
                            }
                        }
                    }
                }
                Stage::Reading(reader) => {
                    let step = reader.feed(&mut input);
                    match step.map_err(|fault| Ending::Broken(fault.to_string()))? {
                        Step::More => return Ok(()),
                        Step::Taken(number) => self.connection.taken(number),
                        Step::Granted(granted) => self.granted(engine, &granted)?,
                        Step::Announced(message) => self.announced(engine, message)?,
                        Step::Written(message) => {
                            self.proceed(engine, Incoming::written(message))?;
                        }
                    }
                }
            }
        }
    }

    /// Decides how the frames of a message that wait at the peer come.
    fn announced(&mut self, engine: &'static Engine, message: Message) -> Result<(), Ending> {
        count(&engine.received.socket, message.len() - message.waiting());
        let means = Means { copies: self.peer.is_copied, maps: self.peer.maps };
        let least = |whole| engine.least_written(whole);
        self.proceed(engine, Incoming::announced(message, means, least))
    }

    fn proceed(&mut self, engine: &'static Engine, incoming: Incoming) -> Result<(), Ending> {
        match incoming {
            Incoming::Whole(message) => self.copied(Ok(message)),
            Incoming::Copying(message) => self.copy(engine, message)?,
            Incoming::Granted(granted) => self.grant(engine, granted),
        }
        Ok(())
    }

    /// Lets the peer write frames to shared memory of this process.
    fn grant(&mut self, engine: &Engine, granted: Grants) {
        let Stage::Reading(reader) = &mut self.stage else { return };
        let Grants { message, grants, arena, missing, mapped } = granted;
        count(&engine.received.mapped, mapped);
        count(&engine.received.socket, missing.iter().map(|span| span.len).sum());
        let new = arena.filter(|arena| self.arena.as_ptr() != Arc::as_ptr(arena));
        if let Some(new) = &new {
            self.arena = Arc::downgrade(new);
        }
        let number = message.number;
        reader.wait_for(message, missing);
        self.connection.grant(number, &grants, !self.peer.is_copied, new);
    }

    /// Writes frames of this process to shared memory of the peer, here or on another thread.
    fn granted(&mut self, engine: &'static Engine, granted: &Granted) -> Result<(), Ending> {
        if granted.arena {
            let file = self.files.pop_front();
            let file = file.ok_or_else(|| Ending::Broken("the peer sent no file".to_owned()))?;
            self.mapped = Some(engine.mappings.map(&file, Instant::now())?);
        }
        let writing = self.connection.granted(granted)?;
        let len = writing.frames.iter().map(|(frame, _)| frame.len).sum();
        let mapped = self.mapped.clone();
        if let Some(mapped) = &mapped {
            engine.mappings.make_room(mapped, len);
        }
        let connection = Arc::clone(&self.connection);
        let copiers = &engine.copiers;
        let job = move || {
            connection.write(&writing, mapped.as_deref(), copiers);
            engine.relieve();
        };
        if len <= AT_ONCE {
            job();
        } else {
            copiers.run(Box::new(job));
        }
        Ok(())
    }

    /// Copies the frames of a message from the peer's memory, here or on another thread.
    fn copy(&mut self, engine: &'static Engine, message: Message) -> Result<(), Ending> {
        let Some(process) = self.process else {
            let text = "the peer sent an address in memory that cannot be read";
            return Err(Ending::Broken(text.to_owned()));
        };
        let len = message.waiting();
        count(&engine.received.copied, len);
        let connection = Arc::clone(&self.connection);
        if len <= AT_ONCE {
            self.copied(copied(&connection, process, message, &engine.copiers));
            return Ok(());
        }
        self.blocked = true;
        engine.copiers.run(Box::new(move || {
            let message = copied(&connection, process, message, &engine.copiers);
            engine.post(Command::Copied { id: connection.id(), message });
        }));
        Ok(())
    }
}

/// The end of a connection whose peer is not let in, which the listener's owner is told of.
fn refused(connection: &Connection, end: &End, refusal: Refusal) -> Ending {
    let why = refusal.to_string();
    if let End::Listener(listener) = end {
        listener.refuse(&host_of_peer(connection), &why);
    }
    Ending::Refused(why)
}

fn count(sum: &AtomicU64, bytes: usize) {
    sum.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Reads what there is, and takes files that come with it.
#[allow(unsafe_code)]
fn receive(
    socket: RawFd,
    to: &mut [u8],
    control: &mut [u8],
    files: &mut VecDeque<OwnedFd>,
) -> Result<usize, Errno> {
    let mut to = [IoSliceMut::new(to)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let read = recvmsg::<()>(socket, &mut to, Some(control), flags)?;
    for message in read.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = message {
            // SAFETY: new descriptors, which nobody else knows.
            files.extend(received.into_iter().map(|file| unsafe { OwnedFd::from_raw_fd(file) }));
        }
    }
    Ok(read.bytes)
}

/// Copies, and makes sure that the sender has kept its frames meanwhile: a sender that lets go of
/// them, or dies, shuts its socket down first.
#[allow(unsafe_code)]
fn copied(
    connection: &Connection,
    process: Pid,
    mut message: Message,
    copiers: &Arc<Copiers>,
) -> Result<Message, Ending> {
    let parts = std::mem::take(&mut message.copies).into_iter().map(|(block, address)| {
        let bytes = message.blocks[block].bytes_mut();
        Part { address, to: bytes.as_mut_ptr(), len: bytes.len() }
    });
    // SAFETY: each part is a block of its own, which is writable for its length.
    if let Err(error) = unsafe { copiers.read(process, parts.collect()) } {
        return Err(match error.raw_os_error() {
            Some(libc::ESRCH) => Ending::Closed,
            _ => Ending::Broken(format!("cannot copy from the peer's memory: {error}")),
        });
    }
    let hang_up = PollFlags::from_bits_retain(libc::POLLRDHUP);
    let ends = hang_up | PollFlags::POLLHUP | PollFlags::POLLERR;
    let mut socket = [PollFd::new(connection.as_fd(), ends)];
    let gone = poll(&mut socket, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    if gone { Err(Ending::Closed) } else { Ok(message) }
}
