//! What a process does on the thread that owns its UCX: answers who asks, and fetches.
//!
//! When the thread polls and sleeps, and in which order things come here, is `ucx::thread`'s.
//!
//! *Invariant:* UCX is used on that thread alone, which needs nothing of Python.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use cuda_cluster_data::cuda::ForeignContext;
use cuda_cluster_data::ucx::thread::{self, Handler, Opened, Outlet};
use cuda_cluster_data::ucx::{
    Arrival, Buffer, Completion, EndpointFailure, HEADER_LIMIT, Payload, Protocol, Status,
    UcpEndpoint, UcpWorker, WorkerAddress, lane_transports,
};

use super::Peer as Offerer;
use super::wire::{Header, LENGTH};
use super::{Command, Fetched, Key, Place, Plane, Range, Transfer, waited_for};

const _: () = assert!(LENGTH <= HEADER_LIMIT, "headers fit into UCX's messages");

/// What an operation of UCX is for.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// A range of an offer goes out.
    Sent(u64),
    /// A range of a fetch comes in.
    Received(u64),
    /// A question or an answer without data.
    Word,
}

struct Offer {
    transfer: Arc<Transfer>,
    ranges: Vec<Range>,
    /// Ranges that UCX is sending, once somebody has asked.
    sending: Option<usize>,
    /// Who has asked.
    to: Option<WorkerAddress>,
    failure: Option<String>,
}

struct Fetch {
    transfer: Arc<Transfer>,
    from: WorkerAddress,
    /// Those that nothing has come for.
    buffers: Vec<Option<Box<Buffer>>>,
    /// In host and in device memory, of all of them.
    bytes: [u64; 2],
    /// Ranges that UCX is filling.
    filling: usize,
    failure: Option<String>,
}

/// Another process.
struct Peer {
    endpoint: UcpEndpoint<Purpose>,
    /// Known once something has gone each way.
    lanes: Option<Arc<[String]>>,
}

struct Owner {
    worker: UcpWorker<Purpose>,
    address: WorkerAddress,
    key: Key,
    peers: HashMap<WorkerAddress, Peer>,
    offers: BTreeMap<u64, Offer>,
    fetches: BTreeMap<u64, Fetch>,
    fetched: Arc<Fetched>,
}

/// Opens UCX, tells how that went, and serves until the process ends, or UCX cannot go on.
pub(super) fn run(
    context: Option<ForeignContext>,
    library: Option<&Path>,
    key: Key,
    tell: &mpsc::Sender<Result<Plane, String>>,
) {
    let (mut owner, outlet, plane) = match open(context, library, key) {
        Ok(opened) => opened,
        Err(error) => return drop(tell.send(Err(error))),
    };
    if tell.send(Ok(plane)).is_ok()
        && let Err(error) = outlet.serve(&mut owner)
    {
        owner.stop(&error.in_words());
    }
}

fn open(
    context: Option<ForeignContext>,
    library: Option<&Path>,
    key: Key,
) -> Result<(Owner, Outlet<Command>, Plane), String> {
    let devices = context.ok_or_else(|| "there was no CUDA context when UCX was opened".to_owned());
    let devices = devices.and_then(|one| one.make_current().map_err(|error| error.to_string()));
    let opened = Opened::new(library, &[]).map_err(|error| error.in_words())?;
    let Opened { version, resources, worker, address, .. } = opened;
    let transports: Vec<String> =
        lane_transports(&resources).into_iter().map(str::to_owned).collect();
    let devices = devices.and_then(|()| {
        let knows = transports.iter().any(|transport| transport.starts_with("cuda"));
        knows.then_some(()).ok_or_else(|| format!("UCX {version} has no CUDA transports"))
    });
    let (inbox, outlet) = thread::inbox().map_err(|error| error.in_words())?;
    let fetched = Arc::<Fetched>::default();
    let mut numbers = [0; 32];
    getrandom::fill(&mut numbers).map_err(|error| error.to_string())?;
    let plane = Plane {
        numbers,
        key,
        address: address.clone(),
        library: version.to_string().into(),
        transports,
        devices,
        exposed: worker.exposed(),
        inbox,
        fetched: Arc::clone(&fetched),
    };
    let (peers, offers, fetches) = Default::default();
    Ok((Owner { worker, address, key, peers, offers, fetches, fetched }, outlet, plane))
}

impl Handler for Owner {
    type Command = Command;
    type Purpose = Purpose;

    fn worker(&self) -> &UcpWorker<Purpose> {
        &self.worker
    }

    fn command(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Offer { transfer, ranges } => {
                let (sending, to, failure) = (None, None, None);
                let offer = Offer { ranges, sending, to, failure, transfer };
                self.offers.insert(offer.transfer.id(), offer);
            }
            Command::Fetch { transfer, from, offer, ranges } => {
                if let Err(error) = self.fetch(&transfer, from, offer, &ranges) {
                    self.fetches.remove(&transfer.id());
                    transfer.end(Err(error));
                }
            }
            Command::Cancel(id) => {
                let failure = || Some("nobody waits for it any more".to_owned());
                if let Some(offer) = self.offers.get_mut(&id) {
                    offer.sending.get_or_insert(0);
                    offer.failure = failure();
                    self.end_offer(id);
                }
                if let Some(fetch) = self.fetches.get_mut(&id) {
                    fetch.failure = failure();
                    self.end_fetch(id);
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn arrived(&mut self, arrival: Arrival<Purpose>) {
        match Header::decode(arrival.header()) {
            Some(Header::Ask { offer, fetch }) => {
                // Without the seal, a stranger has sent it.
                let from = arrival.bytes().map(|bytes| WorkerAddress::open(bytes, &self.key));
                drop(arrival);
                if let Some(Ok(from)) = from {
                    self.answer(offer, fetch, &from);
                }
            }
            Some(Header::Data { index, fetch: id }) => {
                let Some(fetch) = self.fetches.get_mut(&id) else { return };
                let buffer = fetch.buffers.get_mut(index as usize).and_then(Option::take);
                let outcome = match buffer {
                    Some(buffer) if buffer.len() == arrival.len() => {
                        fetch.filling += 1;
                        arrival.receive(buffer, Purpose::Received(id)).map_err(|error| {
                            fetch.filling -= 1;
                            error.in_words()
                        })
                    }
                    _ => Err("the peer sent what was not asked for".to_owned()),
                };
                if let Err(error) = outcome {
                    fetch.failure.get_or_insert(error);
                    self.end_fetch(id);
                }
            }
            Some(Header::Nothing { fetch: id }) => {
                if let Some(fetch) = self.fetches.get_mut(&id) {
                    fetch.failure = Some("the peer does not offer it any more".to_owned());
                    self.end_fetch(id);
                }
            }
            None => {}
        }
    }

    fn completed(&mut self, completion: Completion<Purpose>) {
        let failure = completion.result().err().map(|status| why(&status));
        match *completion.purpose() {
            Purpose::Word => {}
            Purpose::Sent(id) => {
                if let Some(offer) = self.offers.get_mut(&id) {
                    offer.sending = offer.sending.map(|count| count.saturating_sub(1));
                    offer.failure = offer.failure.take().or(failure);
                    self.end_offer(id);
                }
            }
            Purpose::Received(id) => {
                if let Some(fetch) = self.fetches.get_mut(&id) {
                    fetch.filling -= 1;
                    fetch.failure = fetch.failure.take().or(failure);
                    self.end_fetch(id);
                }
            }
        }
    }

    fn failed(&mut self, failure: EndpointFailure) {
        let gone = self.peers.iter().find(|(_, one)| one.endpoint.id() == failure.endpoint);
        let Some(address) = gone.map(|(address, _)| address.clone()) else { return };
        // Its operations end through their callbacks.
        self.peers.remove(&address);
        let ids = self.fetches.iter().filter(|(_, fetch)| fetch.from == address);
        for id in ids.map(|(id, _)| *id).collect::<Vec<_>>() {
            if let Some(fetch) = self.fetches.get_mut(&id) {
                fetch.failure.get_or_insert_with(|| why(&failure.status));
                self.end_fetch(id);
            }
        }
    }

    fn expects(&self) -> bool {
        !(self.offers.is_empty() && self.fetches.is_empty())
    }
}

impl Owner {
    /// Asks for what is offered, with the memory for it ready.
    fn fetch(
        &mut self,
        transfer: &Arc<Transfer>,
        from: Offerer,
        offer: u64,
        ranges: &[Range],
    ) -> Result<(), String> {
        let buffers = ranges.iter().map(|range| {
            // SAFETY: who fetches keeps the range, for this alone, until the transfer is over, which
            // is when no buffer of it is left.
            Ok(Some(Box::new(unsafe { waited_for(*range) }?)))
        });
        let bytes = |on_device| {
            let ranges = ranges.iter();
            let those = ranges.filter(|one| matches!(one.place, Place::Device { .. }) == on_device);
            those.map(|range| range.len as u64).sum()
        };
        let fetch = Fetch {
            transfer: Arc::clone(transfer),
            from: from.address.clone(),
            buffers: buffers.collect::<Result<_, String>>()?,
            bytes: [bytes(false), bytes(true)],
            filling: 0,
            failure: None,
        };
        let id = transfer.id();
        self.fetches.insert(id, fetch);
        let own = self.address.seal(&from.key);
        self.say(&from.address, Header::Ask { offer, fetch: id }, own.into())
    }

    fn say(&mut self, to: &WorkerAddress, header: Header, payload: Payload) -> Result<(), String> {
        let endpoint = self.endpoint(to)?;
        let sent = endpoint.send(&header.encode(), payload, Protocol::Auto, Purpose::Word);
        sent.map_err(|error| error.in_words())
    }

    /// The endpoint to a process, which is opened when it is first needed.
    fn endpoint(&mut self, to: &WorkerAddress) -> Result<&UcpEndpoint<Purpose>, String> {
        if !self.peers.contains_key(to) {
            let endpoint = self.worker.connect(to).map_err(|error| error.in_words())?;
            self.peers.insert(to.clone(), Peer { endpoint, lanes: None });
        }
        self.peers.get(to).map(|peer| &peer.endpoint).ok_or_else(|| "no endpoint".to_owned())
    }

    /// Sends all ranges of an offer at once.
    fn answer(&mut self, id: u64, fetch: u64, to: &WorkerAddress) {
        let is_open = self.offers.get(&id).is_some_and(|offer| offer.sending.is_none());
        let Some(mut offer) = is_open.then(|| self.offers.remove(&id)).flatten() else {
            // Nobody is connected to for that. Who offers nothing any more has ended the connection
            // over which it did, and who asks learns it there.
            if self.peers.contains_key(to) {
                // Who asks may be gone by now, which its endpoint says.
                let _ = self.say(to, Header::Nothing { fetch }, Payload::Empty);
            }
            return;
        };
        offer.sending = Some(0);
        offer.to = Some(to.clone());
        for (index, range) in (0..).zip(&offer.ranges) {
            // SAFETY: who offers keeps the range as it is until the transfer is over, which is when
            // UCX has sent all of them.
            let buffer = unsafe { waited_for(*range) };
            let outcome = buffer.and_then(|buffer| {
                let payload = Payload::Owned(Box::new(buffer));
                let header = Header::Data { index, fetch }.encode();
                let endpoint = self.endpoint(to)?;
                let sent = endpoint.send(&header, payload, Protocol::Rendezvous, Purpose::Sent(id));
                sent.map_err(|error| error.in_words())
            });
            match outcome {
                Ok(()) => offer.sending = offer.sending.map(|count| count + 1),
                Err(error) => {
                    offer.failure = Some(error);
                    let _ = self.say(to, Header::Nothing { fetch }, Payload::Empty);
                    break;
                }
            }
        }
        self.offers.insert(id, offer);
        self.end_offer(id);
    }

    /// Ends an offer that UCX does not send any more.
    fn end_offer(&mut self, id: u64) {
        if self.offers.get(&id).is_none_or(|offer| offer.sending != Some(0)) {
            return;
        }
        let Some(offer) = self.offers.remove(&id) else { return };
        self.end(&offer.transfer, offer.to.as_ref(), offer.failure);
    }

    /// Ends a fetch that is full or has failed, once UCX does not fill anything of it any more.
    fn end_fetch(&mut self, id: u64) {
        let Some(fetch) = self.fetches.get_mut(&id).filter(|fetch| fetch.filling == 0) else {
            return;
        };
        let is_full = fetch.buffers.iter().all(Option::is_none);
        if !is_full && fetch.failure.is_none() {
            return;
        }
        let Some(fetch) = self.fetches.remove(&id) else { return };
        if fetch.failure.is_none() {
            let [host, device] = fetch.bytes;
            self.fetched.host.fetch_add(host, Ordering::Relaxed);
            self.fetched.device.fetch_add(device, Ordering::Relaxed);
        }
        drop(fetch.buffers);
        self.end(&fetch.transfer, Some(&fetch.from), fetch.failure);
    }

    /// Ends a transfer with a process, and says what has carried it.
    fn end(&mut self, transfer: &Transfer, with: Option<&WorkerAddress>, failure: Option<String>) {
        if failure.is_none()
            && let Some(peer) = with.and_then(|with| self.peers.get_mut(with))
        {
            let lanes = || peer.endpoint.lanes().unwrap_or_default().into();
            let _ = transfer.lanes.set(Arc::clone(peer.lanes.get_or_insert_with(lanes)));
        }
        transfer.end(failure.map_or(Ok(()), Err));
    }

    /// UCX cannot go on: everything that is under way ends with an error.
    fn stop(mut self, error: &str) {
        // Their operations end through their callbacks.
        self.peers.clear();
        let idle = thread::drain(&mut self);
        let offers = std::mem::take(&mut self.offers).into_values().map(|one| one.transfer);
        let fetches = std::mem::take(&mut self.fetches).into_values().map(|one| one.transfer);
        for transfer in offers.chain(fetches) {
            // What UCX has not returned it may still use.
            if idle {
                transfer.end(Err(error.to_owned()))
            } else {
                transfer.tell(Err(error.to_owned()))
            }
        }
    }
}

fn why(status: &Status) -> String {
    format!("UCX: {status}")
}
