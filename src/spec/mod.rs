//! What the user asked for: the YAML spec, version 1, and the flags that override it.
//!
//! Does not look at a machine and decides nothing.
//!
//! *Invariant:* a [`ClusterSpec`] that was read has no unknown keys and no contradictions.
