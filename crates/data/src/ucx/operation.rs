//! Operations in flight: what UCX holds, and what it returns.
//!
//! Does not start operations; endpoints and arrivals do.
//!
//! An operation is written in place and stays there until its completion is handled. Moving it
//! costs more than everything else that is done with it: a wide read of something just written in
//! pieces stalls until the pieces are in the cache, and they wait for earlier writes to memory that
//! the peer reads.
//!
//! *Invariant:* from its submission until its callback runs, only UCX owns an [`Operation`] (as a
//! raw pointer in the request's user data).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;

use smallvec::SmallVec;

use super::abi::{self, Submitted};
use super::address::Connections;
use super::context::ContextInner;
use super::memory::{Buffer, Payload};
use super::status::{RawStatus, Status};

/// Longest message header. Headers are kept inside the operation, because UCX reads them until the
/// message is sent.
pub const HEADER_LIMIT: usize = 24;

/// How the bytes of a message travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// UCX decides.
    Auto,
    /// Immediately, through UCX's memory at the receiver.
    Eager,
    /// After the receiver has provided a buffer, directly into it.
    Rendezvous,
}

impl Protocol {
    pub(super) fn flags(self) -> u32 {
        match self {
            Protocol::Auto => 0,
            Protocol::Eager => ucx1_sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_EAGER.0,
            Protocol::Rendezvous => ucx1_sys::ucp_send_am_flags::UCP_AM_SEND_FLAG_RNDV.0,
        }
    }
}

/// Data up to this length is kept without an allocation.
pub(super) const SMALL: usize = 16;

/// Identifies an endpoint of a worker; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub(super) u64);

/// The failure of an endpoint, which UCX has given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointFailure {
    /// The endpoint.
    pub endpoint: EndpointId,
    pub status: Status,
}

/// What UCX's callbacks recorded, for the worker's owner to read.
pub(super) struct Records<P> {
    pub(super) context: Rc<ContextInner>,
    /// Operations that UCX holds.
    pub(super) in_flight: Cell<usize>,
    pub(super) completions: RefCell<VecDeque<Completion<P>>>,
    pub(super) failures: RefCell<VecDeque<EndpointFailure>>,
    pub(super) arrivals: RefCell<VecDeque<Box<RawArrival>>>,
    /// Receives that the owner has started.
    pub(super) receives: RefCell<VecDeque<Box<Operation<P>>>>,
    pub(super) endpoints: Cell<u64>,
    pub(super) connections: RefCell<Connections>,
    /// Endpoints that UCX still holds.
    pub(super) open_endpoints: Cell<usize>,
    /// Whether it was ever connected to a peer.
    pub(super) had_peers: Cell<bool>,
    /// Whether it was to connect to one peer more often than UCX can tell apart.
    pub(super) exhausted: Cell<bool>,
}

impl<P> Records<P> {
    pub(super) fn functions(&self) -> &abi::Functions {
        &self.context.library.functions
    }

    /// Records a message in place, field by field, as for [`Operation`]s.
    #[inline]
    pub(super) fn arrived(&self, header: &[u8], data: Data) {
        let mut arrival = Box::write(Box::new_uninit(), RawArrival::EMPTY);
        arrival.data = data;
        arrival.header_length = header.len();
        arrival.header[..header.len()].copy_from_slice(header);
        self.arrivals.borrow_mut().push_back(arrival);
    }
}

/// A message as the callback records it.
pub(super) struct RawArrival {
    pub(super) header: [u8; HEADER_LIMIT],
    pub(super) header_length: usize,
    pub(super) data: Data,
}

impl RawArrival {
    const EMPTY: Self = Self { header: [0; HEADER_LIMIT], header_length: 0, data: Data::Nothing };
}

pub(super) enum Data {
    /// The bytes, copied because UCX needs its memory back.
    Copied(SmallVec<[u8; SMALL]>),
    /// UCX's descriptor with the bytes in it.
    Held { descriptor: *mut c_void, length: usize },
    /// UCX's descriptor for bytes that are still at the sender.
    Remote { descriptor: *mut c_void, length: usize },
    /// No data, or a receive has taken it.
    Nothing,
}

/// An operation that has ended, and the memory that it owned.
pub struct Completion<P>(Box<Operation<P>>);

impl<P> Completion<P> {
    /// The purpose that it was started with.
    pub fn purpose(&self) -> &P {
        &self.0.purpose
    }

    /// The operation's result.
    ///
    /// # Errors
    /// If it failed.
    pub fn result(&self) -> Result<(), Status> {
        if self.0.status.is_error() { Err(self.0.status) } else { Ok(()) }
    }

    /// The memory, whatever the result; empty when called again.
    pub fn take_payload(&mut self) -> Payload {
        std::mem::take(&mut self.0.payload)
    }
}

impl<P: fmt::Debug> fmt::Debug for Completion<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Operation { purpose, payload, .. } = &*self.0;
        let mut completion = f.debug_struct("Completion");
        completion.field("purpose", purpose).field("result", &self.result());
        completion.field("payload", payload).finish()
    }
}

/// The state of one operation that UCX holds.
pub(super) struct Operation<P> {
    /// Where its end is recorded.
    records: Rc<Records<P>>,
    status: Status,
    purpose: P,
    pub(super) payload: Payload,
    pub(super) kept: Kept,
    /// Host memory that UCX uses instead of a payload that it cannot access.
    stage: Option<Buffer>,
}

/// What an operation keeps for UCX besides the memory.
pub(super) enum Kept {
    /// The message's header, which UCX reads until it is sent.
    Header([u8; HEADER_LIMIT]),
    /// The descriptor of data to be fetched, and its length.
    Descriptor(*mut c_void, usize),
    /// Nothing.
    Nothing,
}

impl<P> Operation<P> {
    pub(super) fn new(
        records: &Rc<Records<P>>,
        purpose: P,
        payload: Payload,
        kept: Kept,
    ) -> Box<Self> {
        let records = Rc::clone(records);
        let (status, stage) = (Status::OK, None);
        Box::write(Box::new_uninit(), Self { records, status, purpose, payload, kept, stage })
    }

    /// The memory that UCX is to send, if there is any. That of a device is copied to the host
    /// first if UCX cannot access it.
    ///
    /// # Errors
    /// If it cannot be copied.
    pub(super) fn source(&mut self) -> Result<Option<&Buffer>, Status> {
        let Some(buffer) = self.payload.buffer() else { return Ok(None) };
        if self.records.context.reaches_devices || !buffer.is_on_device() {
            return Ok(Some(buffer));
        }
        let mut copy = Buffer::undefined(buffer.len()).ok_or(Status::NO_MEMORY)?;
        buffer.read(0, copy.host_mut().unwrap_or_default()).map_err(|_| Status::IO_ERROR)?;
        Ok(Some(self.stage.insert(copy)))
    }

    /// The memory into which UCX is to receive `length` bytes. For a device's, which UCX cannot
    /// access, it is host memory, whose content goes to the device at the end.
    ///
    /// # Errors
    /// If there is no host memory left.
    pub(super) fn target(&mut self, length: usize) -> Result<Option<&mut Buffer>, Status> {
        let Payload::Owned(buffer) = &mut self.payload else { return Ok(None) };
        if self.records.context.reaches_devices || !buffer.is_on_device() {
            return Ok(Some(buffer));
        }
        let room = Buffer::undefined(length).ok_or(Status::NO_MEMORY)?;
        Ok(Some(self.stage.insert(room)))
    }

    /// The header's bytes, for UCX.
    pub(super) fn header(&self) -> &[u8] {
        if let Kept::Header(header) = &self.kept { header } else { &[] }
    }

    /// Hands the operation to UCX through `submit`, which gets it as user data.
    ///
    /// `submit` must pass the pointer to UCX as user data of a request whose callback is
    /// [`sent`] or [`received`], or as the arguments of that one call, and nowhere else.
    pub(super) fn submit(self: Box<Self>, submit: impl FnOnce(*mut Self) -> Submitted) {
        let in_flight = &self.records.in_flight;
        // Before UCX is called: it may run the callback within the call.
        in_flight.set(in_flight.get() + 1);
        let raw = Box::into_raw(self);
        match submit(raw) {
            Submitted::Pending => {}
            Submitted::Done => {
                // SAFETY: UCX is done with the operation and calls no callback for it.
                unsafe { Box::from_raw(raw) }.finish(Status::OK);
            }
            Submitted::Refused(status) => {
                // SAFETY: as above; a refused operation never reached UCX.
                unsafe { Box::from_raw(raw) }.finish(status);
            }
        }
    }

    /// Completes a receive whose bytes are already here.
    pub(super) fn fill(mut self: Box<Self>, bytes: &[u8]) {
        let status = match &mut self.payload {
            Payload::Owned(buffer) => match buffer.write(bytes) {
                Ok(()) => Status::OK,
                Err(status) => status,
            },
            Payload::Empty | Payload::Shared(_) => Status::OK,
        };
        self.end(status);
    }

    /// Completes an operation that UCX held.
    fn finish(mut self: Box<Self>, status: Status) {
        let in_flight = &self.records.in_flight;
        in_flight.set(in_flight.get() - 1);
        match (self.stage.take(), &self.kept) {
            (Some(bytes), Kept::Descriptor(..)) if !status.is_error() => {
                self.fill(bytes.host().unwrap_or_default());
            }
            _ => self.end(status),
        }
    }

    /// Records the end of an operation that UCX does not hold.
    pub(super) fn end(mut self: Box<Self>, status: Status) {
        self.status = status;
        let records = Rc::clone(&self.records);
        records.completions.borrow_mut().push_back(Completion(self));
    }
}

/// UCX's callback for everything that sends or flushes.
///
/// # Safety
/// `user_data` must come from [`Operation::submit`] with the same `P`, and this must be its only
/// callback.
pub(super) unsafe extern "C" fn sent<P>(
    request: *mut c_void,
    status: RawStatus,
    user_data: *mut c_void,
) {
    // SAFETY: the caller's promise; UCX calls back once and gives the operation up.
    let operation = unsafe { Box::from_raw(user_data.cast::<Operation<P>>()) };
    // SAFETY: the request is complete and is not used after this.
    unsafe { (operation.records.functions().ucp_request_free)(request) };
    operation.finish(Status(status));
}

/// UCX's callback for received message data.
///
/// # Safety
/// As for [`sent`].
pub(super) unsafe extern "C" fn received<P>(
    request: *mut c_void,
    status: RawStatus,
    _length: usize,
    user_data: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe { sent::<P>(request, status, user_data) };
}
