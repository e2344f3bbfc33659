//! The frames that wait for one connection, and what happens if it does not read them.
//!
//! Above [`READ_BELOW`] waiting bytes nothing more is read from the connection, so that it cannot
//! ask for more; above [`MOST`] it is dropped.
//!
//! *Invariant:* at most [`MOST`] bytes and one frame wait for a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, mpsc};

use crate::error::ConversationError;

/// A connection is read only while fewer bytes than this wait for it.
const READ_BELOW: usize = 4 << 20;

/// Waiting bytes at which a connection is dropped.
const MOST: usize = 256 << 20;

#[derive(Default)]
struct Fill {
    bytes: AtomicUsize,
    is_overfull: AtomicBool,
    /// Frames have been written, or there are too many.
    changed: Notify,
}

/// Takes frames for a connection. When it is dropped, the connection ends.
pub(super) struct Outbox {
    frames: mpsc::UnboundedSender<Vec<u8>>,
    fill: Arc<Fill>,
}

/// Writes the frames to the connection.
pub(super) struct Frames {
    frames: mpsc::UnboundedReceiver<Vec<u8>>,
    fill: Arc<Fill>,
}

/// Knows how many bytes wait.
pub(super) struct Gauge(Arc<Fill>);

pub(super) fn outbox() -> (Outbox, Frames, Gauge) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let fill = Arc::new(Fill::default());
    let frames = Frames { frames: receiver, fill: Arc::clone(&fill) };
    (Outbox { frames: sender, fill: Arc::clone(&fill) }, frames, Gauge(fill))
}

impl Outbox {
    /// Adds a frame. If the connection has ended, or is about to be dropped, the frame is lost.
    pub(super) fn post(&self, frame: Vec<u8>) {
        if self.fill.is_overfull.load(Ordering::Relaxed) {
            return;
        }
        let waiting = self.fill.bytes.fetch_add(frame.len(), Ordering::Relaxed) + frame.len();
        if waiting > MOST {
            self.fill.is_overfull.store(true, Ordering::Relaxed);
            self.fill.changed.notify_waiters();
        }
        let _ = self.frames.send(frame);
    }
}

impl Gauge {
    /// Waits until the connection has read enough of what was sent.
    pub(super) async fn drained(&self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.bytes.load(Ordering::Relaxed) < READ_BELOW {
                return;
            }
            changed.await;
        }
    }
}

impl Frames {
    /// Writes until the connection ends, or does not read for too long.
    pub(super) async fn write_to(
        self,
        mut writer: OwnedWriteHalf,
    ) -> Result<(), ConversationError> {
        let Frames { mut frames, fill } = self;
        let writing = async {
            while let Some(frame) = frames.recv().await {
                writer.write_all(&frame).await?;
                fill.bytes.fetch_sub(frame.len(), Ordering::Relaxed);
                fill.changed.notify_waiters();
            }
            Ok(())
        };
        tokio::select! {
            written = writing => written,
            () = overfull(&fill) => Err(ConversationError::NotRead),
        }
    }
}

async fn overfull(fill: &Fill) {
    loop {
        let changed = fill.changed.notified();
        if fill.is_overfull.load(Ordering::Relaxed) {
            return;
        }
        changed.await;
    }
}
