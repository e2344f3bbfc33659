//! Objects that workers read where a peer of the same machine has them: nothing is copied.
//!
//! [`show`] serves a peer that reads objects of this worker, and [`Views`] reads those of peers. An
//! object is a *view* there as long as anything in that process refers to it. The owner keeps the
//! bytes as they are meanwhile; if it needs the memory, the peer takes a copy, and the owner gives
//! its pages back to the system instead of writing to them.
//!
//! Does not know why an object is fetched, and has no access rules: every worker that knows the
//! secret may read every object.
//!
//! *Invariant:* the bytes of a view never change: its owner writes to its pages again only after
//! the peer has said that the view has ended, or has itself ended.

mod owner;
mod viewer;

pub(super) use owner::show;
pub(super) use viewer::Views;

/// A socket takes the descriptor with a byte.
const CARRIER: [u8; 1] = [0];
