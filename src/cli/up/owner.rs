//! Another program that owns an `up`: the cluster ends with it.
//!
//! *Invariant:* the end is noticed however the program ends, also when processes that it forked
//! hold its end of standard input open.

use std::io;

use tokio::sync::oneshot;

use crate::cli::failure::{Exit, Failure};
use crate::os::pidfd;

/// Whoever owns the cluster; nobody is there for ever.
pub(super) struct Owner(Option<(u32, oneshot::Receiver<()>)>);

impl Owner {
    /// Watches the process of that number, and standard input.
    pub(super) fn watch(pid: Option<u32>) -> Result<Self, Failure> {
        let Some(pid) = pid else { return Ok(Self(None)) };
        let (sender, closed) = oneshot::channel();
        // Of its own, because nothing ends a read: the thread goes with this process.
        let thread = std::thread::Builder::new().name("owner".to_owned());
        let watching = thread.spawn(move || {
            // What the owner writes has no meaning; that it cannot be read is the end, too.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let _ = sender.send(());
        });
        watching.map_err(|error| Failure::new(Exit::Failed, error))?;
        Ok(Self(Some((pid, closed))))
    }

    /// Waits for its end, which comes once. Dropping the future loses nothing.
    pub(super) async fn gone(&mut self) {
        let Some((pid, closed)) = &mut self.0 else { return std::future::pending().await };
        tokio::select! {
            () = pidfd::ended(*pid) => {}
            _ = closed => {}
        }
        self.0 = None;
    }
}
