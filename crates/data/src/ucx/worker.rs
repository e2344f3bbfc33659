//! UCX's worker: progress, wake-up, arriving messages, and what the callbacks recorded.
//!
//! Does not decide what a message means or when to sleep.
//!
//! *Invariant:* a worker is used by one thread (it is not `Send`), and no record is borrowed while
//! a function of UCX runs, because any of them may call back.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::Error;
use super::abi::{
    self, MessageCallback, Submitted, ucp_am_handler_param_t, ucp_am_recv_param_t, ucp_worker_h,
    ucp_worker_params_t, zeroed,
};
use super::address::WorkerAddress;
use super::context::UcpContext;
use super::memory::{Buffer, Payload};
use super::operation::{
    Completion, Data, EndpointFailure, HEADER_LIMIT, Kept, Operation, RawArrival, Records, received,
};
use super::status::{RawStatus, Status};
use super::wakeup::{Before, WakeupSockets};

/// The only active message id in use; headers distinguish the kinds of messages.
pub(super) const MESSAGE_ID: c_uint = 0;

/// Longest time that a dropped worker waits for its endpoints to close.
const CLOSING_TIME: Duration = Duration::from_secs(1);

/// A UCX worker and its event file descriptor. Each operation is started with a purpose `P`, which
/// comes back with its [`Completion`].
pub struct UcpWorker<P: 'static> {
    pub(super) inner: Rc<WorkerInner<P>>,
}

pub(super) struct WorkerInner<P: 'static> {
    pub(super) raw: ucp_worker_h,
    pub(super) records: Rc<Records<P>>,
    event: c_int,
    /// An error if UCX's sockets could not be closed to empty datagrams.
    wakeups: io::Result<WakeupSockets>,
}

impl<P> UcpWorker<P> {
    /// Opens a worker that receives messages.
    ///
    /// # Errors
    /// If UCX cannot open its transports or has no event file descriptor for them.
    #[doc(alias = "ucp_worker_create")]
    pub fn new(context: &UcpContext) -> Result<Self, Error> {
        let functions = &context.inner.library.functions;
        // SAFETY: a parameter structure of UCX; without fields it means the defaults, among them
        // single-threaded use, which `!Send` keeps.
        let params: ucp_worker_params_t = unsafe { zeroed() };
        let mut raw = std::ptr::null_mut();
        let before = Before::look();
        // SAFETY: a live context, valid parameters, a place for the result.
        let status = unsafe {
            (functions.ucp_worker_create)(context.inner.raw, &raw const params, &raw mut raw)
        };
        Status(status).result("ucp_worker_create")?;
        let wakeups = before.and_then(|before| WakeupSockets::guard(&before));
        let records = Rc::new(Records {
            context: Rc::clone(&context.inner),
            in_flight: Cell::new(0),
            completions: RefCell::default(),
            failures: RefCell::default(),
            arrivals: RefCell::default(),
            receives: RefCell::default(),
            endpoints: Cell::new(0),
            connections: RefCell::default(),
            open_endpoints: Cell::new(0),
            had_peers: Cell::new(false),
            exhausted: Cell::new(false),
        });
        // From here on, the worker is destroyed on every return.
        let mut inner = WorkerInner { raw, records, event: -1, wakeups };
        // SAFETY: a live worker and a place for the result.
        let status = unsafe { (functions.ucp_worker_get_efd)(raw, &raw mut inner.event) };
        Status(status).result("ucp_worker_get_efd")?;
        inner.listen()?;
        Ok(Self { inner: Rc::new(inner) })
    }

    /// The worker's address, for [`UcpWorker::connect`] in another process.
    ///
    /// # Errors
    /// If UCX cannot pack it.
    #[doc(alias = "ucp_worker_get_address")]
    pub fn address(&self) -> Result<WorkerAddress, Error> {
        let functions = self.inner.records.functions();
        let (mut address, mut length) = (std::ptr::null_mut(), 0usize);
        // SAFETY: a live worker and two places for the result.
        let status = unsafe {
            (functions.ucp_worker_get_address)(self.inner.raw, &raw mut address, &raw mut length)
        };
        Status(status).result("ucp_worker_get_address")?;
        // SAFETY: UCX says that the address has this many bytes; they are copied before release.
        let bytes =
            unsafe { std::slice::from_raw_parts(address.cast::<u8>().cast_const(), length) }
                .to_vec();
        // SAFETY: the address came from this worker and is not used after this.
        unsafe { (functions.ucp_worker_release_address)(self.inner.raw, address) };
        Ok(WorkerAddress::packed(bytes))
    }

    /// Lets UCX make progress once. Returns whether there was anything to do.
    #[doc(alias = "ucp_worker_progress")]
    pub fn progress(&self) -> bool {
        self.inner.progress()
    }

    /// The file descriptor that becomes readable when an armed worker has something to do.
    #[doc(alias = "ucp_worker_get_efd")]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps the descriptor open as long as the worker, which `self` holds.
        unsafe { BorrowedFd::borrow_raw(self.inner.event) }
    }

    /// Prepares the event file descriptor for sleep. `false` means that something has happened, and
    /// progress is needed first.
    ///
    /// # Errors
    /// If UCX cannot arm one of its transports.
    #[doc(alias = "ucp_worker_arm")]
    pub fn arm(&self) -> Result<bool, Error> {
        if !self.inner.records.receives.borrow().is_empty() {
            return Ok(false);
        }
        // SAFETY: a live worker with the wake-up feature.
        let status =
            Status(unsafe { (self.inner.records.functions().ucp_worker_arm)(self.inner.raw) });
        // A reset is an empty datagram, which nobody but a stranger sends (`wakeup`).
        if [Status::BUSY, Status::CONNECTION_RESET].contains(&status) {
            return Ok(false);
        }
        status.result("ucp_worker_arm").map(|()| true)
    }

    /// Whether peers, or strangers, have woken this worker since the last call and UCX has not
    /// noticed yet.
    pub(super) fn was_woken(&self) -> bool {
        self.inner.wakeups.as_ref().is_ok_and(WakeupSockets::look)
    }

    /// A warning, if other users of this machine can end this process.
    pub fn exposed(&self) -> Option<String> {
        let error = self.inner.wakeups.as_ref().err()?;
        Some(format!(
            "other users of this machine can end this process by an empty datagram to UCX: {error}"
        ))
    }

    /// The next operation that ended.
    pub fn next_completion(&self) -> Option<Completion<P>> {
        self.inner.records.completions.borrow_mut().pop_front()
    }

    /// The next endpoint that failed.
    pub fn next_failure(&self) -> Option<EndpointFailure> {
        self.inner.records.failures.borrow_mut().pop_front()
    }

    /// The next message that arrived.
    pub fn next_arrival(&self) -> Option<Arrival<P>> {
        let raw = self.inner.records.arrivals.borrow_mut().pop_front()?;
        Some(Arrival { worker: Rc::clone(&self.inner), raw })
    }

    /// Whether it can be used on.
    ///
    /// # Errors
    /// If it was to connect to one peer more often than UCX can tell apart.
    pub(super) fn can_go_on(&self) -> Result<(), Error> {
        match self.inner.records.exhausted.get() {
            true => Err(Error::Exhausted { connections: u16::MAX }),
            false => Ok(()),
        }
    }

    /// Operations that have not ended.
    pub fn operations_in_flight(&self) -> usize {
        let records = &self.inner.records;
        records.in_flight.get() + records.receives.borrow().len()
    }
}

impl<P> fmt::Debug for UcpWorker<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcpWorker").field("in_flight", &self.operations_in_flight()).finish()
    }
}

impl<P> WorkerInner<P> {
    fn progress(&self) -> bool {
        let began = self.begin_receives();
        // SAFETY: a live worker on its own thread.
        let worked = unsafe { (self.records.functions().ucp_worker_progress)(self.raw) != 0 };
        began || worked
    }

    /// Has UCX fetch the data of started receives. A copy displaces everything in the caches, so
    /// work that can be done for several messages together is done before the first copy and after
    /// the last.
    fn begin_receives(&self) -> bool {
        let mut any = false;
        loop {
            let next = self.records.receives.borrow_mut().pop_front();
            let Some(operation) = next else { return any };
            self.fetch(operation);
            any = true;
        }
    }

    /// Has UCX fetch data that is still at the sender, and return its descriptor.
    fn fetch(&self, mut operation: Box<Operation<P>>) {
        let Kept::Descriptor(descriptor, length) = operation.kept else {
            // There is nothing to fetch.
            return operation.end(Status::OK);
        };
        let (target, memory_type) = match operation.target(length) {
            Ok(Some(buffer)) => (buffer.pointer_mut(), Some(buffer.memory_type())),
            Ok(None) => (std::ptr::null_mut(), None),
            Err(status) => {
                self.release(&Data::Remote { descriptor, length });
                return operation.end(status);
            }
        };
        operation.submit(|operation| {
            // SAFETY: a parameter structure of UCX.
            let mut param: abi::ucp_request_param_t = unsafe { zeroed() };
            param.op_attr_mask = ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_CALLBACK as u32
                | ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_USER_DATA as u32;
            param.cb.recv_am = abi::as_declared!(
                received::<P>,
                abi::ReceiveCallback,
                ucx1_sys::ucp_am_recv_data_nbx_callback_t
            );
            param.user_data = operation.cast();
            if let Some(memory_type) = memory_type {
                param.op_attr_mask |= ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_MEMORY_TYPE as u32;
                param.memory_type = memory_type;
            }
            // SAFETY: a live worker; the descriptor is one that UCX let us keep and is used once;
            // the buffer has room for `length` bytes and belongs to the operation.
            Submitted::from(unsafe {
                (self.records.functions().ucp_am_recv_data_nbx)(
                    self.raw,
                    descriptor,
                    target,
                    length,
                    &raw const param,
                )
            })
        });
    }

    /// Sets the handler of active messages.
    fn listen(&self) -> Result<(), Error> {
        use ucx1_sys::ucp_am_handler_param_field as field;
        // SAFETY: a parameter structure of UCX.
        let mut params: ucp_am_handler_param_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            field::UCP_AM_HANDLER_PARAM_FIELD_ID.0
                | field::UCP_AM_HANDLER_PARAM_FIELD_FLAGS.0
                | field::UCP_AM_HANDLER_PARAM_FIELD_CB.0
                | field::UCP_AM_HANDLER_PARAM_FIELD_ARG.0,
        );
        params.id = MESSAGE_ID;
        params.flags = ucx1_sys::ucp_am_cb_flags::UCP_AM_FLAG_WHOLE_MSG.0;
        params.cb =
            abi::as_declared!(arrived::<P>, MessageCallback, ucx1_sys::ucp_am_recv_callback_t);
        params.arg = Rc::as_ptr(&self.records).cast_mut().cast();
        // SAFETY: a live worker; `arrived` expects the records, which live until after the worker
        // is destroyed.
        let status = unsafe {
            (self.records.functions().ucp_worker_set_am_recv_handler)(self.raw, &raw const params)
        };
        Status(status).result("ucp_worker_set_am_recv_handler")
    }

    fn release(&self, data: &Data) {
        if let Data::Held { descriptor, .. } | Data::Remote { descriptor, .. } = *data {
            // SAFETY: the descriptor was kept by returning `UCS_INPROGRESS` from the callback, and
            // is given back once, here or by a receive.
            unsafe { (self.records.functions().ucp_am_data_release)(self.raw, descriptor) };
        }
    }
}

impl<P> Drop for WorkerInner<P> {
    fn drop(&mut self) {
        for operation in self.records.receives.take() {
            if let Kept::Descriptor(descriptor, length) = operation.kept {
                self.release(&Data::Remote { descriptor, length });
            }
        }
        // No endpoint handle is left (each holds the worker), but UCX may still be closing some.
        let start = Instant::now();
        while (self.records.open_endpoints.get() > 0 || self.records.in_flight.get() > 0)
            && start.elapsed() < CLOSING_TIME
        {
            self.progress();
        }
        // Each holds a reference to the records that contain it.
        drop(self.records.completions.take());
        for raw in self.records.arrivals.take() {
            self.release(&raw.data);
        }
        if self.records.had_peers.get() {
            // A copy between processes may still be queued below an endpoint that was closed
            // forcibly, and UCX 1.12 and 1.13 abort the process when they find that in
            // `ucp_worker_destroy` (`uct_cma_ep`, `ucs_arbiter_group_is_empty`). No call reports
            // whether there is one, so the worker is kept until the process ends, which is as long
            // as our processes need theirs anyway. The kernel then frees its shared memory: the
            // segments are marked for that when they are created.
            std::mem::forget(Rc::clone(&self.records));
            return;
        }
        // SAFETY: nothing refers to the worker any more.
        unsafe { (self.records.functions().ucp_worker_destroy)(self.raw) };
    }
}

/// UCX's callback for an arriving message.
///
/// # Safety
/// `arg` must point to the worker's [`Records`], with the same `P`; the other arguments are as UCX
/// documents them.
unsafe extern "C" fn arrived<P>(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> RawStatus {
    use ucx1_sys::ucp_am_recv_attr_t as attribute;
    // SAFETY: the caller's promise; records are only used through shared references.
    let records = unsafe { &*arg.cast_const().cast::<Records<P>>() };
    records.had_peers.set(true);
    let header = match header_length {
        0 => &[],
        // None of our processes sent it. The owner learns that too, from an empty header.
        _ if header_length > HEADER_LIMIT => {
            records.arrived(&[], Data::Nothing);
            return Status::OK.0;
        }
        // SAFETY: UCX gives `header_length` readable bytes for the time of the callback.
        _ => unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_length) },
    };
    // SAFETY: UCX gives a valid parameter structure.
    let attributes = unsafe { (*param).recv_attr };
    let is = |flag: attribute| attributes & flag as u64 != 0;
    if is(attribute::UCP_AM_RECV_ATTR_FLAG_RNDV) {
        records.arrived(header, Data::Remote { descriptor: data, length });
        return Status::IN_PROGRESS.0;
    }
    if is(attribute::UCP_AM_RECV_ATTR_FLAG_DATA) && length > 0 {
        records.arrived(header, Data::Held { descriptor: data, length });
        return Status::IN_PROGRESS.0;
    }
    let bytes = match length {
        0 => &[],
        // SAFETY: UCX gives `length` readable bytes for the time of the callback.
        _ => unsafe { std::slice::from_raw_parts(data.cast::<u8>().cast_const(), length) },
    };
    records.arrived(header, Data::Copied(SmallVec::from_slice(bytes)));
    Status::OK.0
}

/// A message that has arrived. Dropping it discards data that is still at the sender.
pub struct Arrival<P: 'static> {
    worker: Rc<WorkerInner<P>>,
    raw: Box<RawArrival>,
}

impl<P> Arrival<P> {
    /// The message's header.
    pub fn header(&self) -> &[u8] {
        &self.raw.header[..self.raw.header_length]
    }

    /// The length of its data, in bytes.
    pub fn len(&self) -> usize {
        match &self.raw.data {
            Data::Copied(bytes) => bytes.len(),
            Data::Held { length, .. } | Data::Remote { length, .. } => *length,
            Data::Nothing => 0,
        }
    }

    /// Whether it has no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The data, unless it is still at the sender.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.raw.data {
            Data::Copied(bytes) => Some(bytes),
            // SAFETY: UCX keeps the descriptor's bytes until it is given back, which takes `self`.
            Data::Held { descriptor, length } => Some(unsafe {
                std::slice::from_raw_parts(descriptor.cast::<u8>().cast_const(), *length)
            }),
            Data::Nothing => Some(&[]),
            Data::Remote { .. } => None,
        }
    }

    /// Receives the data into the beginning of `buffer`, which the completion returns. Data that is
    /// still at the sender is fetched by the next [`UcpWorker::progress`].
    ///
    /// # Errors
    /// If the buffer is too small; then both the buffer and the message are lost.
    #[doc(alias = "ucp_am_recv_data_nbx")]
    pub fn receive(mut self, buffer: impl Into<Box<Buffer>>, purpose: P) -> Result<(), Error> {
        let buffer = buffer.into();
        let (message, room) = (self.len(), buffer.len());
        if message > room {
            return Err(Error::Size { message, buffer: room });
        }
        let records = &self.worker.records;
        let payload = Payload::Owned(buffer);
        match self.raw.data {
            Data::Remote { descriptor, length } if length > 0 => {
                self.raw.data = Data::Nothing;
                let kept = Kept::Descriptor(descriptor, length);
                let operation = Operation::new(records, purpose, payload, kept);
                records.receives.borrow_mut().push_back(operation);
            }
            // UCX's own call is not used: that of 1.21 also frees the descriptor, that of a message
            // in several fragments in the wrong place (openucx/ucx#11468), and that of an empty
            // rendezvous message not at all.
            _ => {
                let operation = Operation::new(records, purpose, payload, Kept::Nothing);
                operation.fill(self.bytes().unwrap_or_default());
            }
        }
        Ok(())
    }
}

impl<P> Drop for Arrival<P> {
    fn drop(&mut self) {
        self.worker.release(&self.raw.data);
    }
}

impl<P> fmt::Debug for Arrival<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").field("header", &self.header()).field("len", &self.len()).finish()
    }
}
