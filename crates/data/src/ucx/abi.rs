//! The boundary to C: UCX's functions as a table of pointers, enums as integers.
//!
//! Does not open the library and calls nothing.
//!
//! *Invariant:* no Rust enum comes in from C. `ucx1-sys` maps C enums to Rust enums, for
//! which a code from a newer UCX would be undefined behaviour; every function and callback that
//! returns or takes a status is therefore declared here with [`RawStatus`].

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

pub(super) use ucx1_sys::{
    ucp_address_t, ucp_am_handler_param_t, ucp_am_recv_param_t, ucp_config_t, ucp_context_attr_t,
    ucp_context_h, ucp_ep_h, ucp_ep_params_t, ucp_params_t, ucp_request_param_t, ucp_worker_h,
    ucp_worker_params_t,
};

use super::status::{RawStatus, Status};
use crate::functions::functions;

/// `ucs_status_ptr_t`: null (done), a pointer to a request, or an encoded status.
pub(super) type StatusPointer = *mut c_void;

/// `UCS_ERR_LAST`: pointers at or above it, as unsigned numbers, are statuses.
const LAST_ERROR: isize = -100;

/// The meaning of a `ucs_status_ptr_t`.
pub(super) enum Submitted {
    /// Completed immediately; no callback follows.
    Done,
    /// The callback follows.
    Pending,
    /// Refused; no callback follows.
    Refused(Status),
}

impl From<StatusPointer> for Submitted {
    fn from(pointer: StatusPointer) -> Self {
        let code = pointer.addr().cast_signed();
        if code == 0 {
            Submitted::Done
        } else if (LAST_ERROR..0).contains(&code) {
            Submitted::Refused(Status(i8::try_from(code).unwrap_or(i8::MIN)))
        } else {
            Submitted::Pending
        }
    }
}

pub(super) type SendCallback = unsafe extern "C" fn(*mut c_void, RawStatus, *mut c_void);
pub(super) type ReceiveCallback = unsafe extern "C" fn(*mut c_void, RawStatus, usize, *mut c_void);
pub(super) type ErrorCallback = unsafe extern "C" fn(*mut c_void, ucp_ep_h, RawStatus);
pub(super) type MessageCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ucp_am_recv_param_t,
) -> RawStatus;

/// Gives a callback the type that `ucx1-sys` has for it.
///
/// The types differ only in `i8` against a one-byte Rust enum, which C passes alike.
macro_rules! as_declared {
    ($callback:expr, $ours:ty, $theirs:ty) => {{
        let ours: $ours = $callback;
        // SAFETY: both are pointers to C functions with the same machine-level signature; UCX, not
        // Rust, calls the result.
        unsafe { std::mem::transmute::<$ours, $theirs>(ours) }
    }};
}
pub(super) use as_declared;

/// A parameter structure with every field zero, as its `field_mask` allows.
///
/// # Safety
/// `T` must be a C structure of UCX for which all-zero bytes are valid.
pub(super) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller's promise. UCX's enums in these structures all have a variant of value 0.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

functions! {
    /// UCX's functions, as found in one library.
    pub(super) struct Functions;
    fn ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
    fn ucp_config_read(*const c_char, *const c_char, *mut *mut ucp_config_t) -> RawStatus;
    fn ucp_config_modify(*mut ucp_config_t, *const c_char, *const c_char) -> RawStatus;
    fn ucp_config_release(*mut ucp_config_t);
    fn ucp_init_version(
        c_uint, c_uint, *const ucp_params_t, *const ucp_config_t, *mut ucp_context_h,
    ) -> RawStatus;
    fn ucp_context_query(ucp_context_h, *mut ucp_context_attr_t) -> RawStatus;
    fn ucp_context_print_info(ucp_context_h, *mut libc::FILE);
    fn ucp_cleanup(ucp_context_h);
    fn ucp_worker_create(
        ucp_context_h, *const ucp_worker_params_t, *mut ucp_worker_h,
    ) -> RawStatus;
    fn ucp_worker_destroy(ucp_worker_h);
    fn ucp_worker_get_address(ucp_worker_h, *mut *mut ucp_address_t, *mut usize) -> RawStatus;
    fn ucp_worker_release_address(ucp_worker_h, *mut ucp_address_t);
    fn ucp_worker_get_efd(ucp_worker_h, *mut c_int) -> RawStatus;
    fn ucp_worker_arm(ucp_worker_h) -> RawStatus;
    fn ucp_worker_progress(ucp_worker_h) -> c_uint;
    fn ucp_worker_set_am_recv_handler(ucp_worker_h, *const ucp_am_handler_param_t) -> RawStatus;
    fn ucp_ep_create(ucp_worker_h, *const ucp_ep_params_t, *mut ucp_ep_h) -> RawStatus;
    fn ucp_ep_close_nbx(ucp_ep_h, *const ucp_request_param_t) -> StatusPointer;
    fn ucp_ep_flush_nbx(ucp_ep_h, *const ucp_request_param_t) -> StatusPointer;
    fn ucp_ep_print_info(ucp_ep_h, *mut libc::FILE);
    fn ucp_am_send_nbx(
        ucp_ep_h, c_uint, *const c_void, usize, *const c_void, usize, *const ucp_request_param_t,
    ) -> StatusPointer;
    fn ucp_am_recv_data_nbx(
        ucp_worker_h, *mut c_void, *mut c_void, usize, *const ucp_request_param_t,
    ) -> StatusPointer;
    fn ucp_am_data_release(ucp_worker_h, *mut c_void);
    fn ucp_request_free(*mut c_void);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_pointer_is_null_a_request_or_an_error() {
        assert!(matches!(Submitted::from(std::ptr::null_mut()), Submitted::Done));
        let request = std::ptr::without_provenance_mut::<c_void>(0x7f00_0000_1000);
        assert!(matches!(Submitted::from(request), Submitted::Pending));
        let refused = std::ptr::without_provenance_mut::<c_void>((-25isize).cast_unsigned());
        assert!(matches!(Submitted::from(refused), Submitted::Refused(status) if status.0 == -25));
    }
}
