//! One end of a connection, as the event loop's thread and the engine's share it.
//!
//! The event loop's thread submits messages, which go to the socket at once as far as it takes
//! them, and receives messages that the engine's thread has put together.
//!
//! *Invariant:* once a connection has ended, nothing refers to frames that were to be sent but a
//! thread that is just writing them (which [`Connection::settle`] waits for), and nothing more is received but the messages that had arrived before.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cuda_cluster_data::copy::{Copiers, Piece, STREAMED};
use cuda_cluster_data::memory::Block;
use cuda_cluster_data::memory::arena::Arena;
use cuda_cluster_data::memory::mapped::Mapped;
use nix::sys::socket::{Shutdown, shutdown};

use crate::completions::Completions;
use crate::engine::Engine;
use crate::outbox::{Frame, Outbox, Writing};
use crate::peer::Barrier;
#[cfg(feature = "plane")]
use crate::plane::Transfer;
use crate::reader::{Granted, Message, Span};
use crate::wire::Grant;

/// Messages that wait for the event loop: no more are read from the socket beyond so many bytes.
/// Whoever writes more than this before it reads has to wait for its peer to read.
const WAITING_BYTES: usize = 64 << 20;

/// Most bytes that are written to a peer's memory before looking whether the connection has ended.
const PART: usize = 4 << 20;

/// And beyond so many messages.
const WAITING_MESSAGES: usize = 1024;

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ending {
    /// The peer has closed it or is gone.
    #[error("the peer has closed the connection")]
    Closed,
    /// This process has.
    #[error("this process has closed the connection")]
    Aborted,
    /// The peer did not greet in time.
    #[error("the peer did not greet in time")]
    Silent,
    /// It was not let in, or did not let this process in.
    #[error("{0}")]
    Refused(String),
    /// The peer has closed it before the end of the greeting.
    #[error(
        "the peer has closed the connection instead of greeting; hint: perhaps it has another secret, \
         or its address begins with another word, such as tls://"
    )]
    Unwelcome,
    /// The socket, the peer's bytes or its memory are not as they should be.
    #[error("{0}")]
    Broken(String),
}

/// A message on its way to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It needs nothing any more.
    Done,
    /// Its frames are in use until [`Connection::is_done`].
    Pending(u64),
}

/// A message that has arrived: blocks of memory, and the frames in them.
#[derive(Debug)]
pub struct Receipt {
    /// Memory that belongs to the receiver.
    pub blocks: Vec<Block>,
    /// For each frame: the block that it is in, its start in it and its length, in bytes.
    pub frames: Vec<(usize, usize, usize)>,
}

/// What is known of the peer after the greeting.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer {
    /// The host that the connector has connected to.
    pub(crate) host: String,
    /// Whether the peer copies large frames itself.
    pub(crate) copies: bool,
    /// Whether this process copies those of the peer.
    pub(crate) is_copied: bool,
    /// What prevents that, if it was tried.
    pub(crate) barrier: Option<Barrier>,
    /// Whether each maps the other's shared memory.
    pub(crate) maps: bool,
}

impl Peer {
    fn waits(&self) -> bool {
        self.copies || self.maps
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    id: u64,
    socket: OwnedFd,
    engine: &'static Engine,
    completions: Arc<Completions>,
    state: Mutex<State>,
    /// A thread has stopped writing frames.
    settled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: bool,
    ending: Option<Ending>,
    peer: Peer,
    inbox: VecDeque<Message>,
    inbox_bytes: usize,
    outbox: Outbox,
    /// The engine has stopped reading because of the messages that wait.
    paused: bool,
    /// The event loop is to be told of the next message, or of the greeting's end.
    reader_waits: bool,
    /// The event loop is to be told when all that was submitted is done.
    writer_waits: bool,
    /// What UCX moves of its messages.
    #[cfg(feature = "plane")]
    transfers: Vec<std::sync::Weak<Transfer>>,
}

impl Connection {
    pub(crate) fn new(
        id: u64,
        socket: OwnedFd,
        engine: &'static Engine,
        completions: Arc<Completions>,
    ) -> Self {
        Self { id, socket, engine, completions, state: Mutex::default(), settled: Condvar::new() }
    }

    /// The number of its events: this one when a message, the greeting or an end has arrived, and
    /// the next one when all that was submitted is done.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The first message that has arrived, if there is one; otherwise the event loop is told of the
    /// next.
    pub fn receive(&self) -> Result<Option<Receipt>, Ending> {
        let mut state = self.state();
        let Some(message) = state.inbox.pop_front() else {
            if let Some(ending) = &state.ending {
                return Err(ending.clone());
            }
            state.reader_waits = true;
            return Ok(None);
        };
        state.inbox_bytes -= message.weight();
        let resume = state.paused && !state.is_full();
        state.paused &= !resume;
        drop(state);
        if resume {
            self.engine.resume(self.id);
        }
        let frames = message.frames.iter().map(|Span { block, start, len }| (*block, *start, *len));
        Ok(Some(Receipt { frames: frames.collect(), blocks: message.blocks }))
    }

    /// Sends a message as far as the socket takes it now; the rest follows. If it is pending, the
    /// event loop is told when it is done.
    ///
    /// # Safety
    ///
    /// The frames must be readable, and stay so until the message is done.
    #[allow(unsafe_code)]
    pub unsafe fn submit(&self, frames: &[Frame]) -> Result<Submitted, Ending> {
        let mut state = self.state();
        state.is_usable()?;
        let wait = state.peer.waits();
        // SAFETY: the caller's promise.
        let number = unsafe { state.outbox.push_message(frames, wait) };
        if let Err(error) = state.outbox.flush(self.as_fd()) {
            let ending = Ending::from(error);
            self.end(&mut state, ending.clone());
            return Err(ending);
        }
        if state.outbox.is_done(number) {
            return Ok(Submitted::Done);
        }
        state.writer_waits = true;
        Ok(Submitted::Pending(number))
    }

    /// Whether nothing uses the frames of a message any more.
    pub fn is_done(&self, number: u64) -> bool {
        self.state().outbox.is_done(number)
    }

    /// Waits until no thread writes frames any more, which takes a moment once it has ended.
    pub fn settle(&self) {
        if !self.engine.is_alive_here() {
            return;
        }
        let mut state = self.state();
        while state.ending.is_some() && state.outbox.is_writing() {
            state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the connection has ended before the peer had the message.
    pub fn is_lost(&self, number: u64) -> bool {
        self.state().outbox.is_lost(number)
    }

    /// As [`Self::is_done`]; in a fork of the process that has the connection, where nothing uses them, it is.
    pub fn is_done_here(&self, number: u64) -> bool {
        !self.engine.is_alive_here() || self.is_done(number)
    }

    /// Whether all that was submitted is done; if not, the event loop is told when it is.
    pub fn is_flushed(&self) -> bool {
        let mut state = self.state();
        let done = state.ending.is_some() || state.outbox.is_empty();
        state.writer_waits |= !done;
        done
    }

    /// Whether the greeting is over; if not, the event loop is told when it is.
    pub fn is_open(&self) -> Result<bool, Ending> {
        let mut state = self.state();
        if state.open {
            return Ok(true);
        }
        state.reader_waits = state.ending.is_none();
        state.ending.clone().map_or(Ok(false), Err)
    }

    /// Whether it has ended, though messages may still wait.
    pub fn has_ended(&self) -> bool {
        self.state().ending.is_some()
    }

    /// The host that the connector has connected to.
    pub fn host(&self) -> String {
        self.state().peer.host.clone()
    }

    /// Whether large frames wait for the receiver instead of going to the socket.
    pub fn waits(&self) -> bool {
        self.state().peer.waits()
    }

    /// What prevents this process from copying from the peer's memory, if it tried.
    pub fn barrier(&self) -> Option<Barrier> {
        self.state().peer.barrier
    }

    /// Whether this process copies large frames from the peer's memory, the peer those of this one,
    /// and each maps memory of the other.
    pub fn routes(&self) -> (bool, bool, bool) {
        let peer = &self.state().peer;
        (peer.is_copied, peer.copies, peer.maps)
    }

    /// Has a transfer end with the connection.
    #[cfg(feature = "plane")]
    pub fn attach(&self, transfer: &Arc<Transfer>) {
        let mut state = self.state();
        state.transfers.retain(|one| one.strong_count() > 0);
        state.transfers.push(Arc::downgrade(transfer));
        self.give_up_transfers(&mut state);
    }

    /// Gives them up if the connection has ended, for its reason.
    #[cfg(feature = "plane")]
    fn give_up_transfers(&self, state: &mut State) {
        let Some(ending) = &state.ending else { return };
        let transfers = std::mem::take(&mut state.transfers);
        let Some(plane) = self.engine.opened_plane() else { return };
        for transfer in transfers.iter().filter_map(std::sync::Weak::upgrade) {
            plane.give_up(&transfer, &ending.to_string());
        }
    }

    /// Ends it at once. Any thread may do that.
    pub fn abort(&self) {
        if !self.engine.is_alive_here() {
            // A fork of the process that has the connection, which goes on without us.
            return;
        }
        let mut state = self.state();
        self.end(&mut state, Ending::Aborted);
        state.inbox.clear();
        state.inbox_bytes = 0;
    }

    /// Ends it for a reason. Messages that have arrived can still be received.
    pub(crate) fn fail(&self, ending: Ending) {
        self.end(&mut self.state(), ending);
    }

    /// The greeting is over.
    pub(crate) fn open(&self, peer: Peer) {
        let mut state = self.state();
        state.open = true;
        state.peer = peer;
        self.tell_reader(&mut state);
    }

    /// Sends bytes that are no message.
    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        self.send_with(|outbox| outbox.push_bytes(bytes));
    }

    /// Sends what the socket now takes.
    pub(crate) fn flush(&self) {
        self.send_with(|_| ());
    }

    /// The peer has copied the frames of a message.
    pub(crate) fn taken(&self, number: u64) {
        let mut known = false;
        self.send_with(|outbox| known = outbox.taken(number));
        if !known {
            let text = "the peer acknowledged a message that it was not sent".to_owned();
            self.fail(Ending::Broken(text));
        }
    }

    /// This process grants memory for a message of the peer.
    pub(crate) fn grant(
        &self,
        number: u64,
        grants: &[Grant],
        stream: bool,
        arena: Option<Arc<Arena>>,
    ) {
        self.send_with(|outbox| outbox.push_granted(number, grants, stream, arena));
    }

    /// The peer has granted memory for a message: what to write, with [`Self::write`].
    pub(crate) fn granted(&self, granted: &Granted) -> Result<Writing, Ending> {
        let mut state = self.state();
        state.is_usable()?;
        let writing = state.outbox.granted(granted.number, &granted.grants, granted.stream);
        let text = "the peer granted memory for a message that does not wait";
        writing.ok_or_else(|| Ending::Broken(text.to_owned()))
    }

    /// Writes frames to the peer's memory, and tells the peer.
    #[allow(unsafe_code)]
    pub(crate) fn write(
        self: &Arc<Self>,
        writing: &Writing,
        mapped: Option<&Mapped>,
        copiers: &Arc<Copiers>,
    ) {
        let mut result = Ok(());
        match pieces(writing, mapped) {
            // SAFETY: who submitted the frames keeps them while this thread is here (`settle`); the
            // places have room for them, and are granted to them alone.
            Some(pieces) if pieces.iter().map(|piece| piece.len).sum::<usize>() < STREAMED => unsafe {
                for Piece { from, to, len } in pieces {
                    std::ptr::copy_nonoverlapping(from, to.as_ptr(), len);
                }
            },
            Some(pieces) => {
                let connection = Arc::clone(self);
                // SAFETY: as above.
                unsafe { copiers.copy(pieces, move || connection.has_ended()) };
            }
            None => {
                let text = "the peer granted memory that it does not have";
                result = Err(Ending::Broken(text.to_owned()));
            }
        }
        let mut state = self.state();
        state.outbox.written(writing);
        self.settled.notify_all();
        if let Err(ending) = result {
            self.end(&mut state, ending);
        }
        if state.ending.is_none()
            && let Err(error) = state.outbox.flush(self.as_fd())
        {
            self.end(&mut state, error.into());
        }
        self.tell_writer(&mut state);
    }

    /// A message has arrived. False if no more are to be read until the engine is told to resume.
    pub(crate) fn deliver(&self, message: Message) -> bool {
        let mut state = self.state();
        if state.ending == Some(Ending::Aborted) {
            return false;
        }
        if message.waits {
            state.outbox.push_taken(message.number);
            if let Err(error) = state.outbox.flush(self.as_fd()) {
                self.end(&mut state, error.into());
            }
        }
        state.inbox_bytes += message.weight();
        state.inbox.push_back(message);
        state.paused = state.is_full();
        self.tell_reader(&mut state);
        !state.paused
    }

    fn send_with(&self, add: impl FnOnce(&mut Outbox)) {
        let mut state = self.state();
        if state.ending.is_some() {
            return;
        }
        add(&mut state.outbox);
        match state.outbox.flush(self.as_fd()) {
            Ok(()) => self.tell_writer(&mut state),
            Err(error) => self.end(&mut state, error.into()),
        }
    }

    fn tell_reader(&self, state: &mut State) {
        if std::mem::take(&mut state.reader_waits) {
            self.completions.push(self.id);
        }
    }

    fn tell_writer(&self, state: &mut State) {
        if state.writer_waits && state.outbox.is_empty() {
            state.writer_waits = false;
            self.completions.push(self.id + 1);
        }
    }

    fn end(&self, state: &mut State, ending: Ending) {
        if state.ending.is_some() {
            return;
        }
        state.ending = Some(ending);
        // The peer must know before the frames may change: it checks after it has copied them.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        state.outbox.clear();
        #[cfg(feature = "plane")]
        self.give_up_transfers(state);
        self.tell_reader(state);
        self.tell_writer(state);
        self.engine.remove(self.id);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What to copy where. None if the peer does not have that memory.
#[allow(unsafe_code)]
fn pieces(writing: &Writing, mapped: Option<&Mapped>) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    for (frame, place) in &writing.frames {
        let to = mapped?.place(*place, frame.len)?;
        let from = std::ptr::with_exposed_provenance::<u8>(frame.address);
        for start in (0..frame.len).step_by(PART) {
            let len = PART.min(frame.len - start);
            // SAFETY: within the frame, and within its place.
            let (from, to) = unsafe { (from.add(start), to.add(start)) };
            pieces.push(Piece { from, to, len });
        }
    }
    Some(pieces)
}

impl State {
    fn is_full(&self) -> bool {
        self.inbox_bytes > WAITING_BYTES || self.inbox.len() > WAITING_MESSAGES
    }

    fn is_usable(&self) -> Result<(), Ending> {
        self.ending.clone().map_or(Ok(()), Err)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<std::io::Error> for Ending {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPIPE | libc::ECONNRESET) => Ending::Closed,
            _ => Ending::Broken(error.to_string()),
        }
    }
}
