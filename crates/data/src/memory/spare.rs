//! Memory of this process that is kept for a while for its next use: freed host memory for the next
//! allocation, and page tables of peers' memory for the next look at it.
//!
//! A worker keeps freeing and allocating pieces of one size, as most programs do.
//!
//! *Invariant:* nothing is kept, and nothing shared, until [`keep_up_to`] says how much.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use super::limits::Limits;
use super::pages::page_size;
use super::pool::{Block, Pool};
use super::view::{Viewed, Views};

static LIMITS: LazyLock<Arc<Limits>> = LazyLock::new(|| Limits::new(0));
static POOL: LazyLock<Arc<Pool>> = LazyLock::new(|| Pool::exact(&LIMITS));
static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

/// Sets how much this process keeps, in bytes, and frees the rest.
///
/// # Errors
/// If no thread can be started to free idle memory; then nothing is kept.
pub fn keep_up_to(bytes: usize) -> io::Result<()> {
    let (wake, woken) = sync_channel(1);
    let thread = std::thread::Builder::new().name("spare memory".to_owned());
    thread.spawn(move || give_back_idle(&woken))?;
    let of_views = wake.clone();
    // If the channel is full, the thread is to look already.
    POOL.wake_with(move || _ = wake.try_send(()));
    VIEWS.wake_with(move || _ = of_views.try_send(()));
    LIMITS.set(bytes, usize::MAX);
    POOL.free_up(0);
    Ok(())
}

/// Bytes that are kept now.
pub fn kept() -> usize {
    POOL.kept() + VIEWS.idle()
}

/// Bytes of peers' memory that are viewed or kept and not resident, because nobody has read them
/// yet, in a process of whose resident bytes so many are shared with files and other processes.
pub fn unread(shared: usize) -> usize {
    (VIEWS.used() + VIEWS.idle()).saturating_sub(shared.saturating_sub(POOL.shared()))
}

/// Returns memory to the kernel until no more than this many bytes are kept.
pub fn give_back_above(bytes: usize) {
    VIEWS.shrink(bytes.saturating_sub(POOL.kept()));
    POOL.shrink(bytes.saturating_sub(VIEWS.idle()));
}

/// The arena that a peer has sent, for reading.
///
/// # Errors
/// If its file may shrink, or cannot be mapped.
pub fn view(file: OwnedFd) -> io::Result<Arc<Viewed>> {
    VIEWS.map(file)
}

/// Pages for `bytes`. They may contain old data.
pub(super) fn take(bytes: usize) -> Option<Block> {
    POOL.take(bytes).ok()
}

/// As [`take`], where peers may read it, if that is possible within what may be kept.
pub(super) fn take_shareable(bytes: usize) -> Option<Block> {
    // A reader maps whole pages.
    let whole = bytes.checked_next_multiple_of(page_size())?;
    let mut block = POOL.take_shared_first(whole).ok()?;
    block.cut(bytes);
    Some(block)
}

/// Frees idle memory. Sleeps without a time limit while nothing is kept. Ends if another thread
/// does that.
fn give_back_idle(woken: &Receiver<()>) {
    loop {
        let now = Instant::now();
        let next = POOL.trim(now).into_iter().chain(VIEWS.trim(now)).min();
        match next {
            Some(next) => {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            None if woken.recv().is_err() => return,
            None => {}
        }
    }
}
