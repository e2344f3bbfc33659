//! How much memory a process may hold for later: so many bytes, and less when the process as a
//! whole has nearly as much as it may have.
//!
//! *Invariant:* nothing here is memory that somebody uses, so that all of it can be given back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// After so many bytes, a process looks again how much it has. Asking the kernel takes about as
/// long as copying some KiB.
const LOOK: usize = 1 << 20;

/// What a process may hold. It may change at any time.
pub struct Limits {
    keep: AtomicUsize,
    /// The resident memory of the whole process from which on nothing is held; [`usize::MAX`] if
    /// that is not limited.
    process: AtomicUsize,
    /// Bytes taken and given back since it last looked.
    moved: AtomicUsize,
    resident: Box<dyn Fn() -> usize + Send + Sync>,
}

impl Limits {
    /// So many bytes, in a process without a limit.
    pub fn new(keep: usize) -> Arc<Self> {
        Self::within(keep, usize::MAX, resident())
    }

    /// So many bytes, less where the process has more than `process` of what `resident` says.
    pub fn within(
        keep: usize,
        process: usize,
        resident: impl Fn() -> usize + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (keep, process) = (AtomicUsize::new(keep), AtomicUsize::new(process));
        let (moved, resident) = (AtomicUsize::new(0), Box::new(resident));
        Arc::new(Self { keep, process, moved, resident })
    }

    /// Changes what may be held.
    pub fn set(&self, keep: usize, process: usize) {
        self.keep.store(keep, Ordering::Relaxed);
        self.process.store(process, Ordering::Relaxed);
    }

    /// Most bytes that may be held.
    pub fn keep(&self) -> usize {
        self.keep.load(Ordering::Relaxed)
    }

    /// Whether the process has a limit.
    pub fn bounds_process(&self) -> bool {
        self.process.load(Ordering::Relaxed) != usize::MAX
    }

    /// Bytes that the process has too many, with `more` that it is about to take.
    pub fn excess(&self, more: usize) -> usize {
        if !self.bounds_process() {
            return 0;
        }
        self.moved.store(0, Ordering::Relaxed);
        let has = (self.resident)().saturating_add(more);
        has.saturating_sub(self.process.load(Ordering::Relaxed))
    }

    /// As [`Self::excess`] when `moved` bytes were taken or given back; after few bytes, it does
    /// not look.
    pub fn excess_after(&self, moved: usize, more: usize) -> usize {
        let sum = self.moved.fetch_add(moved, Ordering::Relaxed).saturating_add(moved);
        if sum < LOOK { 0 } else { self.excess(more) }
    }
}

impl std::fmt::Debug for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { keep, process, .. } = self;
        f.debug_struct("Limits").field("keep", keep).field("process", process).finish()
    }
}

/// Tells the resident memory of this process, in bytes. Where the system does not tell, it counts
/// as too much.
fn resident() -> impl Fn() -> usize + Send + Sync {
    let file = File::open("/proc/self/statm");
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    let page = page.ok().flatten().and_then(|size| usize::try_from(size).ok());
    let pages = move || {
        let mut bytes = [0; 128];
        let read = file.as_ref().ok()?.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(&bytes[..read]).ok()?;
        text.split(' ').nth(1)?.parse::<usize>().ok()?.checked_mul(page?)
    };
    move || pages().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no procfs")]
    fn the_resident_memory_of_a_process_has_what_it_has_touched() {
        let resident = resident();
        let before = resident();
        // So much that what other tests give back meanwhile does not count.
        let touched = vec![1_u8; 512 << 20];
        let after = resident();
        assert!(after >= before + (256 << 20), "{before} {after} {}", touched.len());
    }
}
