//! Writers of a topology's text forms.
//!
//! Returns text; does not print, and knows no terminal.
//!
//! *Invariant:* the same topology gives the same text, byte for byte.

mod dot;
mod hierarchy;
mod matrix;
mod nccl;
mod svg;
mod tree;
mod yaml;

pub use nccl::NcclFormError;
