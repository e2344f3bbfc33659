//! What ends with a piece of memory.
//!
//! *Invariant:* it is dropped after the memory is free.

use std::any::Any;

/// A value of the caller's that is dropped when a piece of memory is freed.
pub type Lease = Box<dyn Any + Send + Sync>;
