//! The data plane: buffers between workers over UCX.
//!
//! A [`Plane`] is the handle of the one thread that owns this process's UCX worker. Objects are put
//! under a name and fetched by peers; both sides own their buffers, and a fetched buffer comes back
//! with its future. Dropping the future gives the transfer up: bytes that are on their way land in
//! memory that is kept until UCX is done with it.
//!
//! `handle` is that handle, `inbox` what the thread is told and what it reports, `owner` the
//! thread. It carries out what `core` (which peers are connected), `transfer` (objects) and
//! `measure` decide; `patience` says how long it looks before it sleeps.
//!
//! Does not talk to the scheduler; [`super::worker`] does, and passes on what it hears.
//!
//! *Invariant:* UCX is called by its own thread only, and that thread waits for nobody.

mod core;
mod handle;
mod inbox;
mod measure;
mod owner;
mod patience;
mod transfer;

pub use handle::{Plane, Transfer};
pub use inbox::{BYTES_IN_FLIGHT, Opening, Report};
pub use transfer::{Fetched, Target, TransferError};
