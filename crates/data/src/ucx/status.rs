//! UCX's status codes as integers with names.
//!
//! Does not decide which status is an error.
//!
//! *Invariant:* every integer is a valid [`Status`], including codes of newer UCX versions.

use std::fmt;

/// `ucs_status_t`: a packed enum, one signed byte.
pub(super) type RawStatus = i8;
const _: () = assert!(size_of::<ucx1_sys::ucs_status_t>() == size_of::<RawStatus>());

/// A status code of UCX (`ucs_status_t`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub i8);

impl Status {
    /// `UCS_OK`.
    pub const OK: Status = Status(0);
    /// `UCS_INPROGRESS`.
    pub const IN_PROGRESS: Status = Status(1);
    /// `UCS_ERR_IO_ERROR`.
    pub const IO_ERROR: Status = Status(-3);
    /// `UCS_ERR_NO_MEMORY`.
    pub const NO_MEMORY: Status = Status(-4);
    /// `UCS_ERR_BUSY`: events are waiting, so the worker cannot be armed.
    pub const BUSY: Status = Status(-15);
    /// `UCS_ERR_CONNECTION_RESET`.
    pub const CONNECTION_RESET: Status = Status(-25);

    /// Whether it is a failure (negative, in UCX's convention).
    pub fn is_error(self) -> bool {
        self.0 < 0
    }

    pub(super) fn result(self, call: &'static str) -> Result<(), super::Error> {
        if self.is_error() { Err(super::Error::Call { call, status: self }) } else { Ok(()) }
    }
}

impl From<RawStatus> for Status {
    fn from(raw: RawStatus) -> Self {
        Status(raw)
    }
}

/// The codes of `ucs/type/status.h`, with the texts of UCX's own `ucs_status_string`.
const NAMES: [(i8, &str); 32] = [
    (0, "success"),
    (1, "operation in progress"),
    (-1, "no pending message"),
    (-2, "no resources are available to initiate the operation"),
    (-3, "input/output error"),
    (-4, "out of memory"),
    (-5, "invalid parameter"),
    (-6, "destination is unreachable"),
    (-7, "address not valid"),
    (-8, "function not implemented"),
    (-9, "message truncated"),
    (-10, "no progress"),
    (-11, "provided buffer is too small"),
    (-12, "no such element"),
    (-13, "failed to connect some of the requested endpoints"),
    (-14, "no such device"),
    (-15, "device is busy"),
    (-16, "request canceled"),
    (-17, "shared memory error"),
    (-18, "element already exists"),
    (-19, "index out of range"),
    (-20, "operation timed out"),
    (-21, "user-defined limit was reached"),
    (-22, "unsupported operation"),
    (-23, "operation rejected by remote peer"),
    (-24, "endpoint is not connected"),
    (-25, "connection reset by remote peer"),
    (-40, "first link failure"),
    (-59, "last link failure"),
    (-60, "first endpoint failure"),
    (-80, "endpoint timeout"),
    (-89, "last endpoint failure"),
];

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(code, _)| *code == self.0) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "UCX status {}", self.0),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({}: {self})", self.0)
    }
}
