//! UCX's endpoint: the connection to one peer.
//!
//! Does not reconnect, and does not know what it sends.
//!
//! *Invariant:* an endpoint handles its peer's failure, because only such endpoints may be closed
//! forcibly; every handle's endpoint is closed once.

use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;

use super::Error;
use super::abi::{
    self, ErrorCallback, SendCallback, Submitted, ucp_ep_h, ucp_ep_params_t, ucp_request_param_t,
    zeroed,
};
use super::address::WorkerAddress;
use super::context::printed;
use super::lanes;
use super::memory::Payload;
use super::operation::{
    EndpointFailure, EndpointId, HEADER_LIMIT, Kept, Operation, Protocol, Records, sent,
};
use super::status::{RawStatus, Status};
use super::worker::{MESSAGE_ID, UcpWorker, WorkerInner};

/// The connection to a peer's worker. Dropping it cancels what is in flight and closes it at once.
pub struct UcpEndpoint<P: 'static> {
    worker: Rc<WorkerInner<P>>,
    raw: ucp_ep_h,
    id: EndpointId,
    /// The argument of UCX's callbacks; freed when UCX has closed the endpoint.
    link: *mut Link<P>,
}

/// The state that the callbacks of an endpoint use.
struct Link<P> {
    records: Rc<Records<P>>,
    id: EndpointId,
}

impl<P> UcpWorker<P> {
    /// Begins to connect to another worker; messages may be sent immediately.
    ///
    /// # Errors
    /// If no transport reaches the address, or this worker has connected to it as often as UCX can
    /// tell apart.
    #[doc(alias = "ucp_ep_create")]
    pub fn connect(&self, address: &WorkerAddress) -> Result<UcpEndpoint<P>, Error> {
        use ucx1_sys::ucp_ep_params_field as field;
        let records = &self.inner.records;
        let counted = records.connections.borrow_mut().count(address.bytes());
        counted.inspect_err(|_| records.exhausted.set(true))?;
        let id = EndpointId(records.endpoints.get() + 1);
        let link = Box::into_raw(Box::new(Link { records: Rc::clone(records), id }));
        // SAFETY: a parameter structure of UCX.
        let mut params: ucp_ep_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            field::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS.0
                | field::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE.0
                | field::UCP_EP_PARAM_FIELD_ERR_HANDLER.0,
        );
        params.address = address.bytes().as_ptr().cast();
        params.err_mode = ucx1_sys::ucp_err_handling_mode_t::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb =
            abi::as_declared!(failed::<P>, ErrorCallback, ucx1_sys::ucp_err_handler_cb_t);
        params.err_handler.arg = link.cast();
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live worker; an address that a worker of UCX wrote, as the seal proves;
        // `failed` expects the link.
        let status = unsafe {
            (records.functions().ucp_ep_create)(self.inner.raw, &raw const params, &raw mut raw)
        };
        if let Err(error) = Status(status).result("ucp_ep_create") {
            // SAFETY: UCX made no endpoint, so nobody else knows the link.
            drop(unsafe { Box::from_raw(link) });
            return Err(error);
        }
        records.endpoints.set(id.0);
        records.had_peers.set(true);
        records.open_endpoints.set(records.open_endpoints.get() + 1);
        Ok(UcpEndpoint { worker: Rc::clone(&self.inner), raw, id, link })
    }
}

impl<P> UcpEndpoint<P> {
    /// The endpoint's identifier in [`EndpointFailure`].
    pub fn id(&self) -> EndpointId {
        self.id
    }

    /// Sends a message. Its payload comes back with the completion.
    ///
    /// # Errors
    /// If the header is too long; other errors are reported by the completion.
    #[doc(alias = "ucp_am_send_nbx")]
    pub fn send(
        &self,
        header: &[u8],
        payload: Payload,
        protocol: Protocol,
        purpose: P,
    ) -> Result<(), Error> {
        if header.len() > HEADER_LIMIT {
            return Err(Error::Header { bytes: header.len() });
        }
        let records = &self.worker.records;
        let mut operation =
            Operation::new(records, purpose, payload, Kept::Header([0; HEADER_LIMIT]));
        if let Kept::Header(kept) = &mut operation.kept {
            kept[..header.len()].copy_from_slice(header);
        }
        let (address, bytes, memory_type) = match operation.source() {
            Ok(Some(buffer)) => (buffer.pointer(), buffer.len(), Some(buffer.memory_type())),
            Ok(None) => (std::ptr::null(), 0, None),
            Err(status) => {
                operation.end(status);
                return Ok(());
            }
        };
        operation.submit(|operation| {
            let mut param = request(operation);
            param.op_attr_mask |= ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
            param.flags = protocol.flags();
            if let Some(memory_type) = memory_type {
                param.op_attr_mask |= ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_MEMORY_TYPE as u32;
                param.memory_type = memory_type;
            }
            // SAFETY: a live endpoint; header and payload belong to the operation, whose address is
            // stable and which lives until its callback.
            Submitted::from(unsafe {
                (self.functions().ucp_am_send_nbx)(
                    self.raw,
                    MESSAGE_ID,
                    (*operation).header().as_ptr().cast(),
                    header.len(),
                    address,
                    bytes,
                    &raw const param,
                )
            })
        });
        Ok(())
    }

    /// Completes when everything sent before is delivered.
    #[doc(alias = "ucp_ep_flush_nbx")]
    pub fn flush(&self, purpose: P) {
        let records = &self.worker.records;
        let operation = Operation::new(records, purpose, Payload::Empty, Kept::Nothing);
        operation.submit(|operation| {
            let param = request(operation);
            // SAFETY: a live endpoint and a valid parameter structure.
            Submitted::from(unsafe {
                (self.functions().ucp_ep_flush_nbx)(self.raw, &raw const param)
            })
        });
    }

    /// The lanes that carry its data, as `transport/device`, in UCX's order. They are final once a
    /// message has gone each way.
    ///
    /// # Errors
    /// If the system has no memory for the text.
    #[doc(alias = "ucp_ep_print_info")]
    pub fn lanes(&self) -> Result<Vec<String>, Error> {
        self.description().map(|text| lanes::parse(&text))
    }

    /// UCX's own description of the endpoint: lanes, and from 1.16 on protocols by message size.
    ///
    /// # Errors
    /// If the system has no memory for the text.
    pub fn description(&self) -> Result<String, Error> {
        // SAFETY: a live endpoint and the stream that `printed` opened.
        printed(|stream| unsafe { (self.functions().ucp_ep_print_info)(self.raw, stream) })
    }

    fn functions(&self) -> &abi::Functions {
        self.worker.records.functions()
    }
}

impl<P> Drop for UcpEndpoint<P> {
    #[doc(alias = "ucp_ep_close_nbx")]
    fn drop(&mut self) {
        // SAFETY: a parameter structure of UCX.
        let mut param: ucp_request_param_t = unsafe { zeroed() };
        param.op_attr_mask = ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_CALLBACK as u32
            | ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_USER_DATA as u32
            | ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS as u32;
        param.flags = ucx1_sys::ucp_ep_close_flags_t::UCP_EP_CLOSE_FLAG_FORCE.0;
        param.cb.send =
            abi::as_declared!(closed::<P>, SendCallback, ucx1_sys::ucp_send_nbx_callback_t);
        param.user_data = self.link.cast();
        // SAFETY: a live endpoint with error handling, which may be closed by force; the handle is
        // gone after this. UCX ends the operations in flight through their callbacks.
        let submitted = Submitted::from(unsafe {
            (self.functions().ucp_ep_close_nbx)(self.raw, &raw const param)
        });
        match submitted {
            Submitted::Pending => {}
            Submitted::Done | Submitted::Refused(_) => {
                // SAFETY: UCX calls nothing for this endpoint any more.
                unsafe { forget(self.link) };
            }
        }
    }
}

impl<P> fmt::Debug for UcpEndpoint<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcpEndpoint").field("id", &self.id).finish()
    }
}

/// The parameters of a request that ends in [`sent`].
fn request<P>(operation: *mut Operation<P>) -> ucp_request_param_t {
    // SAFETY: a parameter structure of UCX.
    let mut param: ucp_request_param_t = unsafe { zeroed() };
    param.op_attr_mask = ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_CALLBACK as u32
        | ucx1_sys::ucp_op_attr_t::UCP_OP_ATTR_FIELD_USER_DATA as u32;
    param.cb.send = abi::as_declared!(sent::<P>, SendCallback, ucx1_sys::ucp_send_nbx_callback_t);
    param.user_data = operation.cast();
    param
}

/// UCX's callback for an endpoint that it has given up.
///
/// # Safety
/// `arg` must point to the endpoint's [`Link`].
unsafe extern "C" fn failed<P>(arg: *mut c_void, _endpoint: ucp_ep_h, status: RawStatus) {
    // SAFETY: the caller's promise; the link lives until the endpoint is closed.
    let link = unsafe { &*arg.cast_const().cast::<Link<P>>() };
    let failure = EndpointFailure { endpoint: link.id, status: Status(status) };
    link.records.failures.borrow_mut().push_back(failure);
}

/// UCX's callback when an endpoint is closed.
///
/// # Safety
/// `user_data` must be the endpoint's [`Link`], and this its last callback.
unsafe extern "C" fn closed<P>(request: *mut c_void, _status: RawStatus, user_data: *mut c_void) {
    let link = user_data.cast::<Link<P>>();
    // SAFETY: the link is still there; only the function table is taken from it.
    let free = unsafe { (*link).records.functions().ucp_request_free };
    // SAFETY: the caller's promise.
    unsafe { forget(link) };
    // SAFETY: the request is complete and is not used after this.
    unsafe { free(request) };
}

/// Frees the link of an endpoint that UCX has closed.
///
/// # Safety
/// `link` must come from [`UcpWorker::connect`], and must not be used after this.
unsafe fn forget<P>(link: *mut Link<P>) {
    // SAFETY: the caller's promise.
    let link = unsafe { Box::from_raw(link) };
    let open = &link.records.open_endpoints;
    open.set(open.get().saturating_sub(1));
}
