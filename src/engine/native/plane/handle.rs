//! The data plane: buffers between workers over UCX.
//!
//! A [`Plane`] is the handle of the one thread that owns this process's UCX worker. Objects are put
//! under a name and fetched by peers; both sides own their buffers, and a fetched buffer comes back
//! with its future. Dropping the future gives the transfer up: bytes that are on their way land in
//! memory that is kept until UCX is done with it.
//!
//! Does not talk to the scheduler; [`super::worker`] does, and passes on what it hears.
//!
//! *Invariant:* UCX is called by its own thread only, and that thread waits for nobody.

mod core;
mod measure;
mod owner;
mod patience;
mod transfer;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};

use tokio::sync::{mpsc as async_mpsc, oneshot};

use self::owner::Owner;
use crate::cuda::{self, Device};
use crate::ucx::{self, Buffer, Setting, Sleeper, Waker};
use crate::wire::native::{Measurement, Member, PeerKey, Samples, ToWorker};
use crate::wire::peer::Measure;
use crate::wire::secret::Secret;
use crate::wire::status::PeerLanes;

/// Why an object did not come.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// No such peer is connected.
    #[error("there is no connection to {peer}")]
    NoPeer {
        /// The name asked for.
        peer: String,
    },
    /// The peer went away before the object was here.
    #[error("{peer} was lost: {cause}")]
    PeerLost {
        /// The peer.
        peer: String,
        /// What is known about it.
        cause: String,
    },
    /// The peer has no such object.
    #[error("{peer} has no object {name:?}")]
    Missing {
        /// The peer.
        peer: String,
        /// The object.
        name: String,
    },
    /// The name is too long.
    #[error("an object's name of {bytes} bytes is too long")]
    Name {
        /// Its length.
        bytes: usize,
    },
    /// There is no room for the object.
    #[error("no memory for the object's {bytes} bytes")]
    Memory {
        /// The object's length.
        bytes: usize,
        /// The device's words, where it should go to a device.
        #[source]
        source: Option<cuda::Error>,
    },
    /// What arrived is not what was sent.
    #[error("the checksum of {name:?} from {peer} is wrong")]
    Checksum {
        /// The peer.
        peer: String,
        /// The object.
        name: String,
    },
    /// A checksum was asked for, and nobody could compute it.
    #[error("there is no checksum of {name:?} from {peer} to compare with")]
    Unchecked {
        /// The peer.
        peer: String,
        /// The object.
        name: String,
    },
    /// UCX failed.
    #[error("the transfer from {peer} failed: {status}")]
    Failed {
        /// The peer.
        peer: String,
        /// UCX's words.
        status: ucx::Status,
    },
    /// The data plane has ended.
    #[error("the data plane has ended")]
    Ended,
}

/// Where a fetched object goes.
#[derive(Debug, Default)]
pub enum Target {
    /// New host memory.
    #[default]
    Host,
    /// New memory of this worker's device.
    Device,
    /// A buffer of the caller's, at least as long as the object, which fills its beginning.
    Into(Buffer),
}

/// An object that has come.
#[derive(Debug)]
pub struct Fetched {
    /// The memory with the object at its beginning.
    pub buffer: Buffer,
    /// The object's length, in bytes.
    pub length: usize,
}

/// How UCX is to be opened.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Which libucp; `None` for the loader's choice.
    pub library: Option<PathBuf>,
    /// Settings on top of the environment's.
    pub settings: Vec<Setting>,
    /// The worker's device.
    pub device: Option<Device>,
    /// Most bytes that are received at one time; more wait at their senders. One message always
    /// may.
    pub bytes_in_flight: u64,
}

/// Bytes received at one time, unless the opening says otherwise.
pub const BYTES_IN_FLIGHT: u64 = 256 << 20;

/// What the data plane says.
#[derive(Debug)]
pub enum Report {
    /// UCX is open; this is the worker's address, sealed.
    Open {
        /// The address.
        address: Vec<u8>,
        /// The library's version, its name and its transports, for people.
        library: String,
    },
    /// Every expected peer is reached, over these lanes.
    Ready(Vec<PeerLanes>),
    /// A connection broke although its peer was not said to be lost.
    PeerFailed {
        /// The peer.
        member: Member,
        /// UCX's words.
        cause: String,
    },
    /// The thread is at work: the answer to [`Plane::pulse`].
    Pulse,
    /// A measurement has ended.
    Measured {
        /// Its number.
        id: u64,
        /// What was measured, or why nothing was.
        result: Result<Samples, String>,
    },
}

/// What the thread is told.
enum Command {
    Heard(ToWorker),
    Put {
        name: String,
        buffer: Arc<Buffer>,
    },
    Remove {
        name: String,
    },
    Get(transfer::Request),
    Cancel {
        id: u64,
    },
    Summed {
        name: String,
        buffer: Arc<Buffer>,
        checksum: Option<u32>,
    },
    Echo {
        peer: String,
        reply: oneshot::Sender<Result<(), TransferError>>,
    },
    Measure {
        id: u64,
        measurement: Measurement,
    },
    /// Memory for a measurement of this worker.
    RoomToSend {
        id: u64,
        measurement: Measurement,
        room: Result<Buffer, String>,
    },
    /// Memory for a peer's measurement.
    RoomToReceive {
        id: u64,
        from: PeerKey,
        measure: Measure,
        room: Option<Vec<Buffer>>,
        mapped: Option<Result<(), i32>>,
    },
    Pulse,
    Stop,
}

/// What an operation of the thread's is for.
enum Purpose {
    /// Nothing that anybody waits for.
    Message,
    /// Receives a probe, whose bytes should have this checksum.
    Probe { by: Box<Member>, checksum: u64 },
    /// Receives the object that was asked for.
    Object { request: u64 },
    /// Sends a message of a measured stream.
    Sent { measurement: u64 },
    /// Receives one.
    Received { from: PeerKey, measurement: u64 },
}

type Arrival = ucx::Arrival<Purpose>;

/// The way to the thread.
struct Line {
    commands: mpsc::Sender<Command>,
    waker: Waker,
}

impl Line {
    fn tell(&self, command: Command) {
        // A thread that has ended drops the command, and with it the sender of any reply.
        let _ = self.commands.send(command);
        self.waker.wake();
    }
}

type Thread = JoinHandle<Result<(), super::Error>>;

/// The handle of the data plane. The thread ends with [`Plane::stop`], or when it fails.
#[derive(Clone)]
pub struct Plane {
    line: Arc<Line>,
    next: Arc<AtomicU64>,
    /// Taken by the first [`Plane::stop`].
    thread: Arc<Mutex<Option<Thread>>>,
}

impl Plane {
    /// Starts the thread. What it has to say comes through the receiver, which closes when the
    /// thread ends.
    ///
    /// # Errors
    /// If the system gives no thread or event; what UCX refuses is told by [`Plane::stop`].
    pub fn spawn(
        me: Member,
        secret: Secret,
        opening: Opening,
    ) -> Result<(Self, async_mpsc::UnboundedReceiver<Report>), super::Error> {
        let sleeper = Sleeper::new()?;
        let waker = sleeper.waker();
        let (commands, inbox) = mpsc::channel();
        let (reports, incoming) = async_mpsc::unbounded_channel();
        let line = Arc::new(Line { commands, waker });
        let thread_line = Arc::downgrade(&line);
        let run =
            move || Owner::open(me, secret, opening, reports, thread_line)?.run(&sleeper, &inbox);
        let thread = thread::Builder::new()
            .name("ucx".to_owned())
            .spawn(run)
            .map_err(|source| super::Error::System { action: "start the UCX thread", source })?;
        let plane = Self {
            line,
            next: Arc::new(AtomicU64::new(1)),
            thread: Arc::new(Mutex::new(Some(thread))),
        };
        Ok((plane, incoming))
    }

    /// Passes on what the scheduler says.
    pub fn heard(&self, message: ToWorker) {
        self.line.tell(Command::Heard(message));
    }

    /// Offers an object to the peers, in place of an earlier one of that name.
    pub fn put(&self, name: impl Into<String>, buffer: impl Into<Buffer>) {
        let buffer = Arc::new(buffer.into());
        self.line.tell(Command::Put { name: name.into(), buffer });
    }

    /// Offers an object that others keep, too.
    pub fn put_shared(&self, name: impl Into<String>, buffer: Arc<Buffer>) {
        self.line.tell(Command::Put { name: name.into(), buffer });
    }

    /// Stops offering an object. Transfers that have begun go on.
    pub fn remove(&self, name: impl Into<String>) {
        self.line.tell(Command::Remove { name: name.into() });
    }

    /// Fetches an object from a peer; with `checked`, verifies its CRC-32C.
    ///
    /// Dropping the future gives the transfer up.
    pub fn get(
        &self,
        peer: impl Into<String>,
        name: impl Into<String>,
        target: Target,
        checked: bool,
    ) -> Transfer {
        let (peer, name) = (peer.into(), name.into());
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        let request = transfer::Request {
            id,
            peer: peer.clone(),
            name: name.clone(),
            target,
            checked,
            reply,
        };
        self.line.tell(Command::Get(request));
        Transfer { answer, line: Arc::clone(&self.line), id, peer, name, done: false }
    }

    /// Sends a message to a peer and waits for its return.
    ///
    /// # Errors
    /// If there is no such peer, or it is lost meanwhile.
    pub async fn echo(&self, peer: impl Into<String>) -> Result<(), TransferError> {
        let (reply, answer) = oneshot::channel();
        self.line.tell(Command::Echo { peer: peer.into(), reply });
        answer.await.unwrap_or(Err(TransferError::Ended))
    }

    /// Measures the way to a peer; the result comes as [`Report::Measured`].
    pub fn measure(&self, id: u64, measurement: Measurement) {
        self.line.tell(Command::Measure { id, measurement });
    }

    /// Asks whether the thread is at work; it answers with [`Report::Pulse`].
    pub fn pulse(&self) {
        self.line.tell(Command::Pulse);
    }

    /// Closes every connection and waits for the thread's end.
    ///
    /// # Errors
    /// Why the thread ended, if it ended by itself.
    pub fn stop(&self) -> Result<(), super::Error> {
        self.line.tell(Command::Stop);
        let thread = self.thread.lock().map_err(|_| super::Error::PlaneGone)?.take();
        match thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(super::Error::PlaneGone),
        }
    }
}

impl std::fmt::Debug for Plane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plane").finish_non_exhaustive()
    }
}

/// An object on its way here.
#[must_use = "a transfer that is dropped is given up"]
pub struct Transfer {
    answer: oneshot::Receiver<Result<transfer::Arrived, TransferError>>,
    line: Arc<Line>,
    id: u64,
    peer: String,
    name: String,
    done: bool,
}

impl Future for Transfer {
    type Output = Result<Fetched, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = std::task::ready!(Pin::new(&mut self.answer).poll(context));
        self.done = true;
        Poll::Ready(match answer.unwrap_or(Err(TransferError::Ended)) {
            // Here, and not on the UCX thread, which must not be held up.
            Ok(arrived) => arrived.verify(&self.peer, &self.name),
            Err(error) => Err(error),
        })
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.done {
            self.line.tell(Command::Cancel { id: self.id });
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("peer", &self.peer).field("name", &self.name).finish()
    }
}
