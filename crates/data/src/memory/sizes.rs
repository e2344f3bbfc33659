//! How large a region is, and which blocks it serves.
//!
//! *Invariant:* a region is at least as large as its block, and has whole pages.

use std::io;

use super::pages::page_size;

/// Which region serves a block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sizes {
    /// Of few sizes, at most an eighth or a page larger than the block.
    Few,
    /// As large as the block in whole pages, or one that is kept and at most an eighth larger.
    Any,
}

impl Sizes {
    /// The size of a new region for so many bytes.
    pub(super) fn of(self, len: usize) -> io::Result<usize> {
        self.in_pages(len, page_size())
    }

    /// As [`Self::of`], where a page has so many bytes, a power of two.
    fn in_pages(self, len: usize, page: usize) -> io::Result<usize> {
        let step = match self {
            Sizes::Few => len.checked_next_power_of_two().map(|power| (power / 16).max(page)),
            Sizes::Any => Some(page),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_have_whole_pages_and_are_little_larger_than_asked_for() {
        // x86-64 has pages of 4 KiB alone, Arm has all three.
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for len in [64 << 10, (64 << 10) + 1, 100_000, (1 << 20) + 1, 200 << 20, (1 << 31) + 5]
            {
                for sizes in [Sizes::Few, Sizes::Any] {
                    let size = sizes.in_pages(len, page).unwrap();
                    assert!(size >= len && size.is_multiple_of(page), "{sizes:?} {page} {len}");
                    let most = if matches!(sizes, Sizes::Few) { (len / 8).max(page) } else { page };
                    assert!(size - len <= most, "{sizes:?} {page} {len}");
                }
            }
            assert!(Sizes::Few.in_pages(usize::MAX, page).is_err());
            assert!(Sizes::Any.in_pages(usize::MAX, page).is_err());
        }
    }
}
