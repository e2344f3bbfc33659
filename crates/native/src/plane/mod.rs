//! The data plane: buffers between workers over UCX.
//!
//! A [`Plane`] is the handle of the one thread that owns this process's UCX worker. Objects are put
//! under a name and fetched by peers; both sides own their buffers, and the future returns the
//! fetched buffer. Dropping the future cancels the transfer: bytes in flight land in memory that
//! is kept until UCX is done with it.
//!
//! `handle` is that handle, `inbox` has the thread's commands and reports, `owner` is the thread.
//! It carries out what `core` (which peers are connected), `transfer` (objects) and `measure`
//! decide; `polling` decides how long it polls before it sleeps.
//!
//! Does not talk to the scheduler; [`super::worker`] does, and passes messages on.
//!
//! *Invariant:* UCX is called by its own thread only, and that thread never blocks on others.

mod core;
mod handle;
mod inbox;
mod measure;
mod owner;
mod polling;
mod transfer;

pub use handle::{Plane, Transfer};
pub use inbox::{BYTES_IN_FLIGHT, Opening, Report};
pub use transfer::{Fetched, Target, TransferError};
