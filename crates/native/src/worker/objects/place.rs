//! Where an object can be.

use std::fmt;

/// A tier of memory, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Device memory.
    Device,
    /// Host memory.
    Host,
    /// A file.
    Disk,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Place::Device => "device memory",
            Place::Host => "host memory",
            Place::Disk => "disk",
        })
    }
}
