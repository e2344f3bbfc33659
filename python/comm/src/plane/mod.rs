//! Moves memory between processes over UCX: that of GPUs, and host memory between machines.
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

use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};

use cuda_cluster_data::cuda::{DeviceBuffer, ForeignContext};
use cuda_cluster_data::memory::HostMemory;
use cuda_cluster_data::ucx::thread::{self, Inbox};
use cuda_cluster_data::ucx::{self, Buffer, WorkerAddress};

use crate::completions::Completions;
use crate::engine::Engine;

/// A process's key, with which others seal addresses for it. It tells those whom it has let in, so
/// an address with this seal is one that such a process has taken from its UCX.
pub type Key = [u8; 32];

/// A range of memory of another library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Where it begins.
    pub place: Place,
    /// In bytes.
    pub len: usize,
}

/// A place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An address of this process, whose provenance is exposed.
    Host(usize),
    /// On a GPU.
    Device {
        /// Its address there.
        address: u64,
        /// The stream whose work is to be waited for, as in `__cuda_array_interface__`; the
        /// default stream if none is named.
        stream: Option<u64>,
    },
}

/// What this process offers, or is fetching.
#[derive(Debug)]
pub struct Transfer {
    id: u64,
    outcome: Mutex<Option<Result<(), String>>>,
    released: AtomicBool,
    lanes: OnceLock<Arc<[String]>>,
    completions: Arc<Completions>,
}

/// What a process moves over UCX.
#[derive(Debug)]
pub struct Plane {
    /// Makes the numbers of transfers, which nobody guesses who is not told.
    numbers: Key,
    /// Opens what others have sealed for this process.
    key: Key,
    address: WorkerAddress,
    library: Arc<str>,
    transports: Vec<String>,
    devices: Result<(), String>,
    exposed: Option<String>,
    inbox: Arc<Inbox<Command>>,
    fetched: Arc<Fetched>,
}

/// Bytes that have been fetched.
#[derive(Debug, Default)]
struct Fetched {
    host: AtomicU64,
    device: AtomicU64,
}

/// What UCX's thread is to do.
enum Command {
    /// Keeps ranges until they are asked for.
    Offer { transfer: Arc<Transfer>, ranges: Vec<Range> },
    /// Fills ranges with what the process at this address offers under a number.
    Fetch { transfer: Arc<Transfer>, from: Peer, offer: u64, ranges: Vec<Range> },
    /// Nobody waits for a transfer any more.
    Cancel(u64),
}

/// Another process that offers something.
struct Peer {
    address: WorkerAddress,
    key: Key,
}

/// Whether this thread has a CUDA context, so that its process may have device memory.
pub fn has_context() -> bool {
    ForeignContext::is_there()
}

/// The range as a buffer, once the work on it is done.
///
/// # Safety
/// As `DeviceBuffer::foreign` and `HostMemory::foreign`; and the stream exists.
unsafe fn waited_for(range: Range) -> Result<Buffer, String> {
    match range.place {
        Place::Host(address) => {
            let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
            let start = start.ok_or_else(|| "a frame lies nowhere".to_owned())?;
            // SAFETY: the caller's promise.
            Ok(Buffer::Host(unsafe { HostMemory::foreign(start, range.len) }))
        }
        Place::Device { address, stream } => {
            // SAFETY: the caller's promise.
            let buffer = unsafe { DeviceBuffer::foreign(address, range.len) };
            let buffer = buffer.map_err(|error| error.to_string())?;
            if let Some(context) = buffer.foreign_context() {
                // SAFETY: the caller's promise.
                unsafe { context.wait(stream) }.map_err(|error| error.to_string())?;
            }
            Ok(Buffer::Device(buffer))
        }
    }
}

impl Engine {
    /// The plane of this process, which the first call opens: with this libucp, or the one that the
    /// loader finds. If a CUDA context is current on this thread, it moves memory of its device.
    ///
    /// # Errors
    /// If UCX cannot be opened; later calls return the same.
    pub fn plane(&self, library: Option<&Path>) -> Result<&Plane, String> {
        // SAFETY: it belongs to RMM or CuPy, which use the device's primary context and leave it to
        // the end of the process.
        let context = || unsafe { ForeignContext::current() };
        let open = || Plane::open(context(), library, self.plane_key);
        let plane = self.plane.get_or_init(open);
        plane.as_ref().map_err(Clone::clone)
    }

    /// The plane, if it has been opened.
    pub fn opened_plane(&self) -> Option<&Plane> {
        self.plane.get()?.as_ref().ok()
    }
}

impl Plane {
    fn open(
        context: Option<ForeignContext>,
        library: Option<&Path>,
        key: Key,
    ) -> Result<Self, String> {
        let (tell, hear) = mpsc::channel();
        let library = library.map(Path::to_owned);
        let thread = std::thread::Builder::new().name("direct ucx".into());
        let run = move || owner::run(context, library.as_deref(), key, &tell);
        thread.spawn(run).map_err(|error| error.to_string())?;
        hear.recv().map_err(|_| "UCX's thread has ended".to_owned())?
    }

    /// Where a process asks for what this one offers, sealed with that process's key.
    pub fn address_for(&self, peer: &Key) -> Vec<u8> {
        self.address.seal(peer)
    }

    /// The UCX that it uses, by its version.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// What UCX has opened: `rc_mlx5`, `tcp`.
    pub fn transports(&self) -> &[String] {
        &self.transports
    }

    /// Whether it moves device memory.
    ///
    /// # Errors
    /// Why not.
    pub fn devices(&self) -> Result<(), String> {
        self.devices.clone()
    }

    /// A warning, if other users of this machine can end this process.
    pub fn exposed(&self) -> Option<&str> {
        self.exposed.as_deref()
    }

    /// Bytes of host and of device memory that this process has fetched.
    pub fn fetched(&self) -> [u64; 2] {
        let Fetched { host, device } = &*self.fetched;
        [host, device].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    /// Offers ranges under the transfer's [`Transfer::id`]; it ends when they have been sent.
    ///
    /// # Safety
    /// The ranges stay allocated and unchanged, and their streams exist, until the transfer is
    /// released.
    pub unsafe fn offer(
        &self,
        ranges: Vec<Range>,
        completions: &Arc<Completions>,
    ) -> Arc<Transfer> {
        let transfer = self.transfer(completions);
        self.inbox.send(Command::Offer { transfer: Arc::clone(&transfer), ranges });
        transfer
    }

    /// Fills ranges with what a process offers, which has this key and has sealed its address for
    /// this one; the transfer ends when they are full.
    ///
    /// # Errors
    /// If the address has not the seal.
    ///
    /// # Safety
    /// The ranges stay allocated, their streams exist, and nobody uses them until the transfer is
    /// released.
    pub unsafe fn fetch(
        &self,
        from: &[u8],
        key: Key,
        offer: u64,
        ranges: Vec<Range>,
        completions: &Arc<Completions>,
    ) -> Result<Arc<Transfer>, ucx::Error> {
        let from = Peer { address: WorkerAddress::open(from, &self.key)?, key };
        let transfer = self.transfer(completions);
        self.inbox.send(Command::Fetch { transfer: Arc::clone(&transfer), from, offer, ranges });
        Ok(transfer)
    }

    fn transfer(&self, completions: &Arc<Completions>) -> Arc<Transfer> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let count = LAST.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.numbers, &count.to_le_bytes());
        let number =
            hash.as_bytes().first_chunk().map_or(count, |bytes| u64::from_le_bytes(*bytes));
        Arc::new(Transfer {
            // Its event is not one of a connection's or a listener's, which have small numbers.
            id: (1 << 63) | number,
            outcome: Mutex::default(),
            released: AtomicBool::new(false),
            lanes: OnceLock::new(),
            completions: Arc::clone(completions),
        })
    }

    /// Ends a transfer for a reason. Its memory is in use until it is released.
    pub fn give_up(&self, transfer: &Transfer, reason: &str) {
        transfer.tell(Err(reason.to_owned()));
        if !transfer.is_released() {
            self.inbox.send(Command::Cancel(transfer.id));
        }
    }
}

impl Transfer {
    /// The number of its event, and of an offer.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// How it has ended, if it has.
    pub fn outcome(&self) -> Option<Result<(), String>> {
        self.locked().clone()
    }

    /// What has carried it: `cuda_ipc/cuda`; none before its end.
    pub fn lanes(&self) -> &[String] {
        self.lanes.get().map_or(&[], |lanes| lanes)
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

impl thread::Command for Command {
    fn refuse(self, reason: &str) {
        match self {
            Command::Offer { transfer, .. } | Command::Fetch { transfer, .. } => {
                transfer.end(Err(reason.to_owned()));
            }
            Command::Cancel(_) => {}
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// A plane of its own, as another process has one.
    fn plane(key: u8) -> Plane {
        Plane::open(None, None, [key; 32]).expect("libucp is installed")
    }

    fn range(bytes: &mut [u8]) -> Range {
        Range { place: Place::Host(bytes.as_mut_ptr().expose_provenance()), len: bytes.len() }
    }

    fn outcome(transfer: &Transfer) -> Result<(), String> {
        let begun = Instant::now();
        while transfer.outcome().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        transfer.outcome().expect("it has ended")
    }

    #[test]
    fn an_offer_that_is_asked_for_twice_is_sent_once_and_ends() {
        let (giver, taker) = (plane(1), plane(2));
        let completions = Arc::new(Completions::new().expect("an event"));
        let (mut from, mut to, mut more) = (vec![7; 1 << 24], vec![0; 1 << 24], vec![0; 1 << 24]);
        // SAFETY: they live until both transfers are released, and are not touched before.
        let offer = unsafe { giver.offer(vec![range(&mut from)], &completions) };
        let at = giver.address_for(&[2; 32]);
        let fetches = [&mut to, &mut more].map(|buffer| {
            // SAFETY: as above.
            let fetch =
                unsafe { taker.fetch(&at, [1; 32], offer.id(), vec![range(buffer)], &completions) };
            fetch.expect("the seal is right")
        });
        assert_eq!(outcome(&fetches[0]), Ok(()));
        assert_eq!(outcome(&fetches[1]), Err("the peer does not offer it any more".to_owned()));
        assert_eq!(outcome(&offer), Ok(()));
        assert!(offer.is_released() && fetches.iter().all(|fetch| fetch.is_released()));
        assert!(to == from && more.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_address_without_the_seal_for_this_process_never_reaches_ucx() {
        let (giver, taker) = (plane(1), plane(2));
        let completions = Arc::new(Completions::new().expect("an event"));
        // A seal that everybody knew once, and one for another process.
        let known = *b"direct:// address of data by UCX";
        let random = [0xa5; 215];
        let forged = [&blake3::keyed_hash(&known, &random).as_bytes()[..], &random].concat();
        for address in [forged, giver.address_for(&[3; 32]), giver.address_for(&known)] {
            // SAFETY: there is no memory.
            let refused = unsafe { taker.fetch(&address, [1; 32], 1, Vec::new(), &completions) };
            assert!(matches!(refused, Err(ucx::Error::Address { .. })), "{refused:?}");
        }
        // An asker whose own address is sealed for somebody else is not answered.
        let mut bytes = [7; 100];
        // SAFETY: it is kept until the end.
        let offer = unsafe { giver.offer(vec![range(&mut bytes)], &completions) };
        let at = giver.address_for(&[2; 32]);
        // SAFETY: there is no memory.
        let wrong = unsafe { taker.fetch(&at, [9; 32], offer.id(), Vec::new(), &completions) };
        let mut to = [0; 100];
        // SAFETY: it is kept until the transfer is released.
        let right =
            unsafe { taker.fetch(&at, [1; 32], offer.id(), vec![range(&mut to)], &completions) };
        assert_eq!(outcome(&right.expect("the seal is right")), Ok(()));
        assert_eq!((to, wrong.expect("the seal is right").outcome()), (bytes, None));
    }

    #[test]
    fn a_plane_whose_ucx_cannot_go_on_refuses_what_waits_and_what_comes() {
        let plane = plane(1);
        let completions = Arc::new(Completions::new().expect("an event"));
        let (inbox, outlet) = thread::inbox().expect("an event");
        let offer = || {
            let transfer = plane.transfer(&completions);
            inbox.send(Command::Offer { transfer: Arc::clone(&transfer), ranges: Vec::new() });
            transfer
        };
        let waits = offer();
        drop(outlet);
        let comes = offer();
        for transfer in [waits, comes] {
            assert_eq!(transfer.outcome(), Some(Err("UCX's thread has ended".to_owned())));
            assert!(transfer.is_released());
        }
    }
}
