//! Moves device memory between processes, over UCX.
//!
//! Does not know messages: a process offers ranges of memory under a number, which it tells the
//! other process itself; that one asks for them, and they are sent to it. So nothing arrives that
//! nobody waits for. All a process's connections to another one share one endpoint.
//!
//! *Invariant:* memory that was offered or is to be filled is in use until its [`Transfer`] is
//! released, whatever becomes of the connection.

#![allow(unsafe_code)]

mod owner;
mod wire;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_cluster::cuda::{DeviceBuffer, ForeignContext};
use cuda_cluster::ucx::{self, Waker};

use crate::completions::Completions;
use crate::engine::Engine;

/// Seals addresses of this protocol. It proves nothing of who sent one: the connection does.
const SEAL: [u8; 32] = *b"native:// address of device data";

/// A range of device memory of another library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its address on the device.
    pub address: u64,
    /// In bytes.
    pub len: usize,
    /// The stream whose work is to be waited for, as in `__cuda_array_interface__`; the default
    /// stream if none is named.
    pub stream: Option<u64>,
}

/// What this process offers, or is fetching.
#[derive(Debug)]
pub struct Transfer {
    id: u64,
    outcome: Mutex<Option<Result<(), String>>>,
    released: AtomicBool,
    completions: Arc<Completions>,
}

/// The device memory of a process, to its peers.
#[derive(Debug)]
pub struct Plane {
    address: Vec<u8>,
    library: String,
    queue: Arc<Queue>,
    seen: Arc<Seen>,
}

/// What has been received.
#[derive(Debug, Default)]
struct Seen {
    bytes: AtomicU64,
    /// The lanes of the connection to each process that something was fetched from, by its address.
    lanes: Mutex<BTreeMap<Vec<u8>, Vec<String>>>,
}

/// What the owner's thread is to do.
struct Queue {
    commands: Mutex<Vec<Command>>,
    waker: Waker,
}

enum Command {
    /// Keeps ranges until they are asked for.
    Offer { transfer: Arc<Transfer>, ranges: Vec<Range> },
    /// Fills ranges with what the process at this address offers under a number.
    Fetch { transfer: Arc<Transfer>, from: Vec<u8>, offer: u64, ranges: Vec<Range> },
    /// Nobody waits for a transfer any more.
    Cancel(u64),
}

/// Whether this thread has a CUDA context, so that its process may have device memory.
pub fn has_context() -> bool {
    ForeignContext::current().is_some()
}

/// Copies a range to the host.
///
/// # Errors
/// If the driver does not know the memory, or refuses.
///
/// # Safety
/// The range stays allocated and unchanged meanwhile.
pub unsafe fn download(range: Range, to: &mut [u8]) -> Result<(), String> {
    // SAFETY: the caller's promise.
    let buffer = unsafe { waited_for(range) }?;
    buffer.read(0, to).map_err(|error| error.to_string())
}

/// The range as a buffer, once the work on it is done.
///
/// # Safety
/// As `DeviceBuffer::foreign`.
unsafe fn waited_for(range: Range) -> Result<DeviceBuffer, String> {
    // SAFETY: the caller's promise.
    let buffer = unsafe { DeviceBuffer::foreign(range.address, range.len) };
    let buffer = buffer.map_err(|error| error.to_string())?;
    if let Some(context) = buffer.foreign_context() {
        context.wait(range.stream).map_err(|error| error.to_string())?;
    }
    Ok(buffer)
}

impl Engine {
    /// The plane of this process, which the first call opens: with this libucp, or the one that the
    /// loader finds. The context that is current on this thread is the one whose memory UCX knows.
    ///
    /// # Errors
    /// If there is no context, or UCX cannot be opened or does not know CUDA; later calls return the
    /// same.
    pub fn plane(&self, library: Option<&Path>) -> Result<&Plane, String> {
        let plane = self.plane.get_or_init(|| {
            let context = ForeignContext::current();
            let context = context.ok_or_else(|| "no CUDA context is current".to_owned())?;
            Plane::open(context, library)
        });
        plane.as_ref().map_err(Clone::clone)
    }

    /// The plane, if it has been opened.
    pub fn opened_plane(&self) -> Option<&Plane> {
        self.plane.get()?.as_ref().ok()
    }
}

impl Plane {
    fn open(context: ForeignContext, library: Option<&Path>) -> Result<Self, String> {
        let (tell, hear) = mpsc::channel();
        let library = library.map(Path::to_owned);
        let thread = std::thread::Builder::new().name("native ucx".into());
        let run = move || owner::run(context, library.as_deref(), &tell);
        thread.spawn(run).map_err(|error| error.to_string())?;
        hear.recv().map_err(|_| "UCX's thread has ended".to_owned())?
    }

    /// Where other processes ask for what this one offers.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// The UCX that it uses: version and transports.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Bytes that this process has fetched.
    pub fn fetched(&self) -> u64 {
        self.seen.bytes.load(Ordering::Relaxed)
    }

    /// The lanes of the connection to the process at an address, `cuda_ipc/cuda`; none before the
    /// first fetch.
    pub fn lanes(&self, of: &[u8]) -> Vec<String> {
        let lanes = self.seen.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.get(of).cloned().unwrap_or_default()
    }

    /// Offers ranges under the transfer's [`Transfer::id`]; it ends when they have been sent.
    ///
    /// # Safety
    /// The ranges stay allocated and unchanged until the transfer is released.
    pub unsafe fn offer(
        &self,
        ranges: Vec<Range>,
        completions: &Arc<Completions>,
    ) -> Arc<Transfer> {
        let transfer = Transfer::new(completions);
        self.queue.push(Command::Offer { transfer: Arc::clone(&transfer), ranges });
        transfer
    }

    /// Fills ranges with what a process offers; the transfer ends when they are full.
    ///
    /// # Safety
    /// The ranges stay allocated, and nobody uses them until the transfer is released.
    pub unsafe fn fetch(
        &self,
        from: &[u8],
        offer: u64,
        ranges: Vec<Range>,
        completions: &Arc<Completions>,
    ) -> Arc<Transfer> {
        let transfer = Transfer::new(completions);
        let command =
            Command::Fetch { transfer: Arc::clone(&transfer), from: from.to_vec(), offer, ranges };
        self.queue.push(command);
        transfer
    }

    /// Ends a transfer for a reason. Its memory is in use until it is released.
    pub fn give_up(&self, transfer: &Transfer, reason: &str) {
        transfer.tell(Err(reason.to_owned()));
        if !transfer.is_released() {
            self.queue.push(Command::Cancel(transfer.id));
        }
    }
}

impl Transfer {
    fn new(completions: &Arc<Completions>) -> Arc<Self> {
        // Its event is not one of a connection's or a listener's, which have small numbers.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = (1 << 63) | LAST.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            id,
            outcome: Mutex::default(),
            released: AtomicBool::new(false),
            completions: Arc::clone(completions),
        })
    }

    /// The number of its event, and of an offer.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// How it has ended, if it has.
    pub fn outcome(&self) -> Option<Result<(), String>> {
        self.locked().clone()
    }

    /// Whether nothing uses its memory any more.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// UCX is done with its memory.
    fn end(&self, outcome: Result<(), String>) {
        self.released.store(true, Ordering::Release);
        self.tell(outcome);
    }

    fn tell(&self, outcome: Result<(), String>) {
        let mut state = self.locked();
        if state.is_none() {
            *state = Some(outcome);
            self.completions.push(self.id);
        }
    }

    fn locked(&self) -> MutexGuard<'_, Option<Result<(), String>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn push(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.waker.wake();
    }

    fn take(&self) -> Vec<Command> {
        std::mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_empty(&self) -> bool {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

fn told(error: &ucx::Error) -> String {
    match error.hint() {
        Some(hint) => format!("{error}; hint: {hint}"),
        None => error.to_string(),
    }
}
