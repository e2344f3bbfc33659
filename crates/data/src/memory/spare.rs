//! Freed host memory of this process, kept for a while for the next allocation.
//!
//! A worker keeps freeing and allocating pieces of one size, as most programs do.
//!
//! *Invariant:* nothing is kept until [`keep_up_to`] says how much.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use super::limits::Limits;
use super::pool::{Block, Pool};

static LIMITS: LazyLock<Arc<Limits>> = LazyLock::new(|| Limits::new(0));
static POOL: LazyLock<Arc<Pool>> = LazyLock::new(|| Pool::exact(&LIMITS));

/// Sets how much this process keeps, in bytes, and frees the rest.
///
/// # Errors
/// If no thread can be started to free idle memory; then nothing is kept.
pub fn keep_up_to(bytes: usize) -> io::Result<()> {
    let (wake, woken) = sync_channel(1);
    let thread = std::thread::Builder::new().name("spare memory".to_owned());
    thread.spawn(move || give_back_idle(&woken))?;
    POOL.wake_with(move || {
        // If it is full, the thread is to look already.
        let _ = wake.try_send(());
    });
    LIMITS.set(bytes, usize::MAX);
    POOL.free_up(0);
    Ok(())
}

/// Bytes that are kept now.
pub fn kept() -> usize {
    POOL.kept()
}

/// Returns memory to the kernel until no more than this many bytes are kept.
pub fn give_back_above(bytes: usize) {
    POOL.shrink(bytes);
}

/// Pages for `bytes`. They may contain old data.
pub(super) fn take(bytes: usize) -> Option<Block> {
    POOL.take(bytes).ok()
}

/// Frees idle memory. Sleeps without a time limit while nothing is kept. Ends if another thread
/// does that.
fn give_back_idle(woken: &Receiver<()>) {
    loop {
        match POOL.trim(Instant::now()) {
            Some(next) => {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            None if woken.recv().is_err() => return,
            None => {}
        }
    }
}
