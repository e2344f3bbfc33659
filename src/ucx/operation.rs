//! Operations in flight: what UCX holds, and what comes back.
//!
//! Does not start operations; endpoints and arrivals do.
//!
//! *Invariant:* an [`Operation`] is owned by UCX (as a raw pointer in the request's user data) from
//! its submission until its callback runs, and by nobody else.

use std::ffi::c_void;
use std::rc::Rc;

use super::abi::{RawStatus, Submitted};
use super::hash::NumberMap;
use super::memory::Payload;
use super::status::Status;
use super::worker::Records;

/// Longest message header. Headers are kept inside the operation, for UCX reads them until the
/// message is sent.
pub const HEADER_LIMIT: usize = 32;

/// Names one operation of one worker; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(pub(super) u64);

/// How the bytes of a message travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// As UCX sees fit.
    Auto,
    /// At once, through the receiver's own memory.
    Eager,
    /// When the receiver has named a buffer, straight into it.
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

/// An operation that has come to its end, and the memory that it owned.
#[derive(Debug)]
pub struct Completion {
    /// Which one.
    pub id: OperationId,
    /// How it ended.
    pub result: Result<(), Status>,
    /// The memory, whatever the result.
    pub payload: Payload,
}

/// The operations that UCX holds, by name, so that they can be cancelled.
#[derive(Default)]
pub(super) struct InFlight {
    next: u64,
    /// The operation whose submitting call runs, until it has ended within that call, as most do.
    submitting: Option<OperationId>,
    requests: NumberMap<u64, *mut c_void>,
}

impl InFlight {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn request(&self, id: OperationId) -> Option<*mut c_void> {
        self.requests.get(&id.0).copied()
    }

    fn name(&mut self) -> OperationId {
        self.next += 1;
        OperationId(self.next)
    }

    /// Remembers a request, unless it has ended already.
    fn submitted(&mut self, id: OperationId, request: *mut c_void) {
        if self.submitting.take() == Some(id) {
            self.requests.insert(id.0, request);
        }
    }

    fn ended(&mut self, id: OperationId) {
        if self.submitting == Some(id) {
            self.submitting = None;
        } else {
            self.requests.remove(&id.0);
        }
    }
}

/// What UCX holds for one operation.
pub(super) struct Operation {
    records: Rc<Records>,
    id: OperationId,
    pub(super) header: [u8; HEADER_LIMIT],
    pub(super) payload: Payload,
}

impl Operation {
    pub(super) fn new(records: &Rc<Records>, payload: Payload) -> Self {
        let id = records.in_flight.borrow_mut().name();
        Self { records: Rc::clone(records), id, header: [0; HEADER_LIMIT], payload }
    }

    /// Hands the operation to UCX through `submit`, which gets it as user data.
    ///
    /// `submit` must pass the pointer to UCX as user data of a request whose callback is
    /// [`sent`] or [`received`], or as the arguments of that one call, and nowhere else.
    pub(super) fn submit(self, submit: impl FnOnce(*mut Operation) -> Submitted) -> OperationId {
        let id = self.id;
        let records = Rc::clone(&self.records);
        records.in_flight.borrow_mut().submitting = Some(id);
        let raw = Box::into_raw(Box::new(self));
        match submit(raw) {
            // A transport that copies synchronously (cma) may have run the callback within the
            // call; then the request is gone.
            Submitted::Pending(request) => records.in_flight.borrow_mut().submitted(id, request),
            Submitted::Done => {
                // SAFETY: UCX is done with the operation and calls no callback for it.
                unsafe { Box::from_raw(raw) }.finish(Status::OK);
            }
            Submitted::Refused(status) => {
                // SAFETY: as above; a refused operation never reached UCX.
                unsafe { Box::from_raw(raw) }.finish(status);
            }
        }
        id
    }

    /// Ends a receive whose bytes are at hand already.
    pub(super) fn fill(mut self, bytes: &[u8]) -> OperationId {
        let id = self.id;
        let status = match &mut self.payload {
            Payload::Owned(buffer) => match buffer.write(bytes) {
                Ok(()) => Status::OK,
                Err(status) => status,
            },
            Payload::Empty | Payload::Shared(_) => Status::OK,
        };
        self.finish(status);
        id
    }

    fn finish(self, status: Status) {
        let Operation { records, id, payload, .. } = self;
        let result = if status.is_error() { Err(status) } else { Ok(()) };
        records.in_flight.borrow_mut().ended(id);
        records.completions.borrow_mut().push_back(Completion { id, result, payload });
    }
}

/// UCX's callback for everything that sends, flushes or closes.
///
/// # Safety
/// `user_data` must come from [`Operation::submit`], and this must be its only callback.
pub(super) unsafe extern "C" fn sent(
    request: *mut c_void,
    status: RawStatus,
    user_data: *mut c_void,
) {
    // SAFETY: the caller's promise; UCX calls back once and gives the operation up.
    let operation = unsafe { Box::from_raw(user_data.cast::<Operation>()) };
    let free = operation.records.functions().ucp_request_free;
    operation.finish(Status(status));
    // SAFETY: the request is complete and is not used after this.
    unsafe { free(request) };
}

/// UCX's callback for received message data.
///
/// # Safety
/// As for [`sent`].
pub(super) unsafe extern "C" fn received(
    request: *mut c_void,
    status: RawStatus,
    _length: usize,
    user_data: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe { sent(request, status, user_data) };
}
