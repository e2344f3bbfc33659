//! One connection, as the engine's thread sees it: greets, then reads.
//!
//! *Invariant:* while it is blocked (a copy is under way, or messages wait), nothing is read.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use nix::unistd::Pid;

use super::{Command, End, Engine, Settings};
use crate::connection::{Connection, Ending, Peer};
use crate::copy;
use crate::greeting::{Greeting, Hello, LENGTH, Step as Greeted};
use crate::reader::{Message, Reader, Step};

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
    /// The process at the other end, where it is one of this machine.
    process: Option<Pid>,
    stage: Stage,
    /// Bytes that have been read and not been looked at.
    rest: Vec<u8>,
    blocked: bool,
}

enum Stage {
    Greeting { greeting: Box<Greeting>, peer: Peer },
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
        let process = process.filter(|pid| settings.copies && pid.as_raw() > 0);
        let own = Hello {
            role: end.role(),
            has_secret: settings.secret.is_some(),
            nonce,
            token_at: process.map_or(0, |_| engine.token.as_ptr().addr() as u64),
            token: engine.token,
            host: settings.host.clone(),
        };
        let (greeting, hello) = Greeting::new(own, settings.secret);
        connection.send_bytes(&hello);
        let peer = Peer { host: settings.host.clone(), ..Peer::default() };
        let stage = Stage::Greeting { greeting: Box::new(greeting), peer };
        Ok(Self { connection, end, process, stage, rest: Vec::new(), blocked: false })
    }

    pub(super) fn is_greeting(&self) -> bool {
        matches!(self.stage, Stage::Greeting { .. })
    }

    /// Reads what there is.
    pub(super) fn serve(&mut self, engine: &'static Engine, scratch: &mut [u8]) -> Next {
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

    fn read(&mut self, engine: &'static Engine, scratch: &mut [u8]) -> Result<Next, Ending> {
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
                Stage::Greeting { .. } => None,
            };
            let is_direct = direct.is_some();
            let to = direct.unwrap_or(&mut *scratch);
            let most = to.len().min(TURN);
            match recv(socket, &mut to[..most], MsgFlags::MSG_DONTWAIT) {
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
                Stage::Greeting { greeting, peer } => {
                    let step = greeting.feed(&mut input);
                    match step.map_err(|refusal| Ending::Refused(refusal.to_string()))? {
                        Greeted::More => return Ok(()),
                        Greeted::Heard(hello) => {
                            peer.is_copied = self.process.is_some_and(|pid| {
                                hello.token_at != 0
                                    && copy::can_read(pid, hello.token_at, &hello.token)
                            });
                            if let End::Listener(_) = self.end {
                                peer.host = hello.host;
                            }
                            self.connection.send_bytes(&greeting.finish(peer.is_copied));
                        }
                        Greeted::Done { peer_reads } => {
                            let peer = Peer { copies: peer_reads, ..peer.clone() };
                            self.connection.open(peer);
                            self.stage = Stage::Reading(Reader::new(Arc::clone(&engine.pool)));
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
                        Step::Message(message) if message.copies.is_empty() => {
                            self.blocked = !self.connection.deliver(message);
                        }
                        Step::Message(message) => self.copy(engine, message)?,
                    }
                }
            }
        }
    }

    /// Copies the frames of a message from the peer's memory, here or on another thread.
    fn copy(&mut self, engine: &'static Engine, message: Message) -> Result<(), Ending> {
        let Some(process) = self.process else {
            let text = "the peer sent an address in memory that cannot be read";
            return Err(Ending::Broken(text.to_owned()));
        };
        let len: usize = message.copies.iter().map(|(at, _)| message.blocks[*at].len()).sum();
        let connection = Arc::clone(&self.connection);
        if len <= AT_ONCE {
            self.copied(fetch(&connection, process, message));
            return Ok(());
        }
        self.blocked = true;
        engine.copiers.run(Box::new(move || {
            let message = fetch(&connection, process, message);
            engine.post(Command::Copied { id: connection.id(), message });
        }));
        Ok(())
    }
}

/// Copies, and makes sure that the sender has kept its frames meanwhile: a sender that lets go of
/// them, or dies, shuts its socket down first.
fn fetch(connection: &Connection, process: Pid, mut message: Message) -> Result<Message, Ending> {
    if let Err(error) = copy::copy_all(process, &mut message) {
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
