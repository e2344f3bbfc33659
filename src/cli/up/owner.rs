//! Another program that owns an `up`: the cluster ends with it.
//!
//! *Invariant:* the end is noticed however the program ends, also when processes that it forked
//! hold its end of standard input open.

use std::io::{self, BufRead as _, Read as _};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::cli::failure::{Exit, Failure};
use crate::os::pidfd;

/// Most bytes that are read at once.
const PIECE: u64 = 4096;

/// Whoever owns the cluster; nobody is there for ever.
pub(super) struct Owner {
    watched: Option<(Option<u32>, oneshot::Receiver<()>)>,
    has_gone: bool,
}

impl Owner {
    /// Watches the process of that number, and standard input.
    pub(super) fn watch(pid: Option<u32>) -> Result<Self, Failure> {
        let Some(pid) = pid else { return Ok(Self { watched: None, has_gone: false }) };
        // What the owner writes has no meaning.
        let closed = until_closed(|_| ())?;
        Ok(Self { watched: Some((Some(pid), closed)), has_gone: false })
    }

    /// Watches standard input alone, of which each line is given to `heard`: the owner is on
    /// another machine.
    pub(super) fn elsewhere(heard: impl Fn(&[u8]) + Send + 'static) -> Result<Self, Failure> {
        Ok(Self { watched: Some((None, until_closed(heard)?)), has_gone: false })
    }

    /// Waits for its end, which comes once. Dropping the future loses nothing.
    pub(super) async fn gone(&mut self) {
        let Some((pid, closed)) = &mut self.watched else { return std::future::pending().await };
        tokio::select! {
            () = ended(*pid) => {}
            _ = closed => {}
        }
        self.watched = None;
        self.has_gone = true;
    }

    /// Whether it has gone, or goes in this time.
    pub(super) async fn goes_within(&mut self, time: Duration) -> bool {
        self.has_gone || tokio::time::timeout(time, self.gone()).await.is_ok()
    }
}

async fn ended(pid: Option<u32>) {
    match pid {
        Some(pid) => pidfd::ended(pid).await,
        None => std::future::pending().await,
    }
}

/// Reads standard input to its end, in pieces that end with a line feed or are full.
fn until_closed(heard: impl Fn(&[u8]) + Send + 'static) -> Result<oneshot::Receiver<()>, Failure> {
    let (sender, closed) = oneshot::channel();
    // Of its own, because nothing ends a read: the thread goes with this process.
    let thread = std::thread::Builder::new().name("owner".to_owned());
    let watching = thread.spawn(move || {
        let mut piece = Vec::new();
        loop {
            piece.clear();
            let read = io::stdin().lock().take(PIECE).read_until(b'\n', &mut piece);
            // That it cannot be read is the end, too.
            if !matches!(read, Ok(1..)) {
                break;
            }
            heard(&piece);
        }
        let _ = sender.send(());
    });
    watching.map_err(|error| Failure::new(Exit::Failed, error))?;
    Ok(closed)
}
