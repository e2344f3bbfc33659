//! Operations in flight: what UCX holds, and what comes back.
//!
//! Does not start operations; endpoints and arrivals do.
//!
//! *Invariant:* an [`Operation`] is owned by UCX (as a raw pointer in the request's user data) from
//! its submission until its callback runs, and by nobody else.

use std::ffi::c_void;
use std::rc::Rc;

use super::abi::{RawStatus, Submitted};
use super::memory::Payload;
use super::status::Status;
use super::worker::Records;

/// Longest message header. Headers are kept inside the operation, for UCX reads them until the
/// message is sent.
pub const HEADER_LIMIT: usize = 24;

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
pub struct Completion<P> {
    /// What its starter said that it is for.
    pub purpose: P,
    /// How it ended.
    pub result: Result<(), Status>,
    /// The memory, whatever the result.
    pub payload: Payload,
}

/// What UCX holds for one operation.
pub(super) struct Operation<P> {
    records: Rc<Records<P>>,
    purpose: P,
    pub(super) header: [u8; HEADER_LIMIT],
    pub(super) payload: Payload,
}

impl<P> Operation<P> {
    pub(super) fn new(records: &Rc<Records<P>>, purpose: P, payload: Payload) -> Box<Self> {
        let records = Rc::clone(records);
        Box::new(Self { records, purpose, header: [0; HEADER_LIMIT], payload })
    }

    /// Hands the operation to UCX through `submit`, which gets it as user data.
    ///
    /// `submit` must pass the pointer to UCX as user data of a request whose callback is
    /// [`sent`] or [`received`], or as the arguments of that one call, and nowhere else.
    pub(super) fn submit(self: Box<Self>, submit: impl FnOnce(*mut Self) -> Submitted) {
        let in_flight = &self.records.in_flight;
        // Before UCX is called: a transport that copies synchronously (cma) runs the callback
        // within the call.
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

    /// Ends a receive whose bytes are at hand already.
    pub(super) fn fill(mut self, bytes: &[u8]) {
        let status = match &mut self.payload {
            Payload::Owned(buffer) => match buffer.write(bytes) {
                Ok(()) => Status::OK,
                Err(status) => status,
            },
            Payload::Empty | Payload::Shared(_) => Status::OK,
        };
        self.end(status);
    }

    /// Ends what UCX held.
    fn finish(self, status: Status) {
        let in_flight = &self.records.in_flight;
        in_flight.set(in_flight.get() - 1);
        self.end(status);
    }

    fn end(self, status: Status) {
        let Operation { records, purpose, payload, .. } = self;
        let result = if status.is_error() { Err(status) } else { Ok(()) };
        records.completions.borrow_mut().push_back(Completion { purpose, result, payload });
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
    let free = operation.records.functions().ucp_request_free;
    operation.finish(Status(status));
    // SAFETY: the request is complete and is not used after this.
    unsafe { free(request) };
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
