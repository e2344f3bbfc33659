//! The data plane: buffers between workers over UCX.
//!
//! A [`Plane`] is the handle of the one thread that owns this process's UCX worker. Objects are put
//! under a name and fetched by peers; both sides own their buffers, and the future returns the
//! fetched buffer. Dropping the future cancels the transfer: bytes in flight land in memory that
//! is kept until UCX is done with it.
//!
//! `handle` is that handle, `commands` has what the thread is told and reports, `owner` what it
//! does: what `core` (which peers are connected), `transfer` (objects) and `measure` decide. The
//! thread itself is [`cuda_cluster_data::ucx::thread`].
//!
//! Does not talk to the scheduler; [`super::worker`] does, and passes messages on.
//!
//! *Invariant:* UCX is called by its own thread only, and that thread never blocks on others.

mod commands;
mod core;
mod handle;
mod measure;
mod owner;
mod transfer;

pub use commands::{BYTES_IN_FLIGHT, Opening, Report};
pub use handle::{Plane, Transfer};
pub use transfer::{Fetched, Target, TransferError};
