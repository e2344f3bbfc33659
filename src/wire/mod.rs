//! Messages between processes, as values with an encoding.
//!
//! Sends nothing; the engines and the supervisor do.
//!
//! *Invariant:* no input makes a decoder panic or allocate more than its input's size warrants.

pub mod native;
pub mod peer;
pub mod secret;
pub mod status;
pub mod tasks;
