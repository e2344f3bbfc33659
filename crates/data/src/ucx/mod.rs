//! A safe, small layer over UCX (libucp), which is opened at run time.
//!
//! Does not know clusters or names; it moves bytes between worker addresses. `ucx1-sys` provides
//! only UCX's types and constants: the functions are looked up in the library when it is opened, so
//! that programs which never use UCX run without it, and any libucp from 1.12 on will do.
//!
//! The objects are UCX's own ([`UcpContext`], [`UcpWorker`], [`UcpEndpoint`]) and stay on one
//! thread. An operation owns its memory from the call until its [`Completion`], so no drop by the
//! caller can leave UCX with a dangling pointer. UCX's callbacks only record; [`thread`] has
//! them handled between two calls of [`UcpWorker::progress`].
//!
//! *Invariant:* memory that UCX may touch is owned by its operation until UCX's completion
//! callback.
#![allow(unsafe_code)]

mod abi;
mod address;
mod context;
mod endpoint;
pub mod environment;
mod lanes;
mod library;
mod memory;
mod operation;
mod polling;
mod sleep;
mod status;
pub mod thread;
mod wakeup;
mod worker;

use std::path::PathBuf;

pub use address::WorkerAddress;
pub use context::{Setting, UcpContext};
pub use endpoint::UcpEndpoint;
pub use lanes::{parse as parse_lanes, parse_device_protocol, transports as lane_transports};
pub use library::{LIBRARY_VARIABLE, Library, Version};
pub use memory::{Buffer, Payload};
pub use operation::{Completion, EndpointFailure, EndpointId, HEADER_LIMIT, Protocol};
pub use sleep::{Sleeper, Waker};
pub use status::Status;
pub use wakeup::try_guard as try_guarding_wakeups;
pub use worker::{Arrival, UcpWorker};

/// Why an operation of UCX failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No libucp could be opened.
    #[error("cannot open UCX's library {}", name.display())]
    Open {
        /// The file name or path that was tried.
        name: PathBuf,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The library lacks a function.
    #[error("UCX's library {} has no function {function}", name.display())]
    Function {
        /// The file name or path of the library.
        name: PathBuf,
        function: &'static str,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The library is older than this program needs.
    #[error("UCX {found} in {} is older than {}", name.display(), library::OLDEST)]
    TooOld {
        /// The file name or path of the library.
        name: PathBuf,
        found: Version,
    },
    /// A call of UCX failed.
    #[error("UCX's {call} failed: {status}")]
    Call {
        /// The C function.
        call: &'static str,
        /// The status it returned.
        status: Status,
    },
    /// UCX does not accept a setting.
    #[error("UCX refuses UCX_{name}={value}: {status}")]
    Setting {
        /// The name without `UCX_`.
        name: String,
        value: String,
        /// What UCX returned.
        status: Status,
    },
    /// A worker address that was not sealed by this program with this key.
    #[error("a worker address of {bytes} bytes does not carry the expected seal")]
    Address { bytes: usize },
    /// A peer was killed while it wrote to the queue for messages in shared memory, which blocks
    /// it.
    #[error(
        "a peer was killed while it wrote into this process's queue, which blocks the queue for good"
    )]
    Stuck,
    /// UCX cannot distinguish any more connections to one peer.
    #[error(
        "this process has connected to one and the same peer {connections} times, the most that \
         UCX tells apart"
    )]
    Exhausted {
        /// How often.
        connections: u16,
    },
    /// A header is longer than messages may have.
    #[error("a message header of {bytes} bytes is longer than {HEADER_LIMIT}")]
    Header { bytes: usize },
    /// A message does not fit into the buffer for it.
    #[error("a message of {message} bytes does not fit a buffer of {buffer} bytes")]
    Size {
        /// Bytes sent.
        message: usize,
        /// Bytes of room.
        buffer: usize,
    },
    /// The environment was to be changed too late.
    #[error("this process has {threads} threads, too many to change its environment")]
    Threads { threads: usize },
    /// The operating system refused something that the event loop needs.
    #[error("cannot {action}")]
    System { action: &'static str, source: std::io::Error },
}

impl Error {
    /// The error and its hint in one sentence, for who only passes it on.
    pub fn in_words(&self) -> String {
        match self.hint() {
            Some(hint) => format!("{self}; hint: {hint}"),
            None => self.to_string(),
        }
    }

    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Open { .. } => Some(format!(
                "install UCX (Debian and Ubuntu: apt-get install libucx0; PyPI: libucx-cu13, with \
                 'ucx.library: auto'), or name its libucp.so.0 in {LIBRARY_VARIABLE}"
            )),
            Error::Function { .. } | Error::TooOld { .. } => Some(format!(
                "name a libucp.so.0 of UCX {} or later in {LIBRARY_VARIABLE}",
                library::OLDEST
            )),
            Error::Exhausted { .. } => Some(
                "a process that starts anew counts from 0; the log says why connections broke so \
                 often"
                    .to_owned(),
            ),
            Error::Setting { name, .. } => Some(format!("look at `ucx_info -c` for UCX_{name}")),
            _ => None,
        }
    }
}
