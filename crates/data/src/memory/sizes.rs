//! How large a region is, and which blocks it serves.
//!
//! *Invariant:* a region is at least as large as its block.

use std::io;

use super::pages::PAGE;

/// Which region serves a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sizes {
    /// Of few sizes, at most an eighth larger than the block.
    Few,
    /// As large as the block, or one that is kept and at most an eighth larger.
    Any,
}

impl Sizes {
    /// The size of a new region for so many bytes.
    pub(super) fn of(self, len: usize) -> io::Result<usize> {
        let step = match self {
            Sizes::Few => len.checked_next_power_of_two().map(|power| (power / 16).max(PAGE)),
            Sizes::Any => Some(PAGE),
        };
        let size = step.and_then(|step| len.checked_next_multiple_of(step));
        size.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// The largest region that serves instead of one of this size.
    pub(super) fn most(self, size: usize) -> usize {
        match self {
            Sizes::Few => size,
            Sizes::Any => size.saturating_add(size / 8),
        }
    }
}
