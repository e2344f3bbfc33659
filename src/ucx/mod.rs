//! A safe, small layer over UCX (libucp), which is opened at run time.
//!
//! Does not know clusters or names; it moves bytes between worker addresses.
//!
//! *Invariant:* memory that UCX may touch is owned by its operation until UCX's completion
//! callback.
