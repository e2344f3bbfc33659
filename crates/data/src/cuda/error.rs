//! Why a device operation failed, and what the user can do.
//!
//! *Invariant:* a message says what was asked for and what there is.

use super::hints;
use cuda_cluster_model::units::HumanBytes;

/// The name that every driver installs.
pub(super) const LIBCUDA: &str = "libcuda.so.1";

/// Why a device operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// The device's memory is used up.
    #[error("{device} has {free_bytes} bytes free, not {asked_bytes}{}", freed(*freed_bytes, mapped_by))]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        asked_bytes: usize,
        free_bytes: u64,
        /// Bytes that were freed, but that peers may still have mapped: as long as they have, they
        /// are not free.
        freed_bytes: u64,
        /// The names of these peers.
        mapped_by: Vec<String>,
    },
    /// The device has less free memory than the pool's initial size.
    #[error(
        "{device} has {} free, less than the pool's initial size of {}",
        HumanBytes(*free_bytes),
        HumanBytes(*asked_bytes)
    )]
    Pool {
        /// The device's name.
        device: String,
        /// The initial size.
        asked_bytes: u64,
        free_bytes: u64,
    },
    /// The driver's library, or one of its functions, cannot be found.
    #[error("cannot find {name}")]
    Driver {
        /// The file or the function.
        name: &'static str,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The driver refused a call.
    #[error("{call} failed: {reason} (CUDA error {code})")]
    Refused {
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// The driver's text for the error.
        reason: String,
    },
    /// A call that is not the driver's failed, or would have.
    #[error("{call} failed: {reason}")]
    Call { call: &'static str, reason: String },
    /// A kernel was given more or fewer values than it has parameters.
    #[error("the kernel {function} takes {}, {given} {} given", parameters(*takes),
        if *given == 1 { "was" } else { "were" })]
    ParameterCount {
        /// The kernel's name.
        function: String,
        takes: usize,
        given: usize,
    },
    /// A kernel was given a value of another size than its parameter's.
    #[error(
        "parameter {number} of the kernel {function} has {}, the value given has {}",
        bytes(*takes_bytes),
        bytes(*given_bytes)
    )]
    ParameterSize {
        /// The kernel's name.
        function: String,
        /// Counted from 1.
        number: usize,
        takes_bytes: usize,
        given_bytes: usize,
    },
    /// A simulated device was asked for something that only a GPU can do.
    #[error("{device} is not a GPU: it cannot run CUDA C++")]
    Simulated {
        /// The device's name.
        device: String,
    },
    /// A copy reaches beyond the end of a buffer.
    #[error("{bytes} bytes at {offset} are not within a buffer of {length} bytes")]
    Range {
        /// The offset of the copy.
        offset: usize,
        /// The length of the copy.
        bytes: usize,
        /// The buffer's length.
        length: usize,
    },
}

fn parameters(count: usize) -> String {
    if count == 1 { "1 parameter".to_owned() } else { format!("{count} parameters") }
}

fn bytes(count: usize) -> String {
    if count == 1 { "1 byte".to_owned() } else { format!("{count} bytes") }
}

/// What else a full device's memory may be taken by.
fn freed(freed_bytes: u64, mapped_by: &[String]) -> String {
    if freed_bytes == 0 {
        return String::new();
    }
    let peers = mapped_by.join(", ");
    format!("; {freed_bytes} more are freed, but {peers} may still have them mapped (UCX's cache)")
}

impl Error {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Pool { .. } => {
                Some("lower rmm.pool_size, or end what else uses the GPU".to_owned())
            }
            Error::Driver { name, .. } if *name == LIBCUDA => Some(hints::NO_LIBRARY.to_owned()),
            Error::Refused { code, .. } => hints::of(*code).map(str::to_owned),
            _ => None,
        }
    }
}
