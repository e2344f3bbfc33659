//! Frames on their way to one connection, and what happens when it does not read them.
//!
//! Above [`HEARD_BELOW`] waiting bytes nothing more is read from the connection, so that it cannot
//! ask for more; beyond [`MOST`] it is dropped.
//!
//! *Invariant:* the frames that wait for a connection are at most [`MOST`] bytes and one frame.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, mpsc};

use crate::engine::native::error::ConversationError;

/// Waiting bytes at which a connection is not listened to any more.
const HEARD_BELOW: usize = 4 << 20;

/// Waiting bytes at which a connection is dropped.
const MOST: usize = 256 << 20;

#[derive(Default)]
struct Fill {
    bytes: AtomicUsize,
    is_overfull: AtomicBool,
    /// Frames have been written, or there are too many.
    changed: Notify,
}

/// Where frames for a connection are put. When it is dropped, the connection ends.
pub(super) struct Outbox {
    frames: mpsc::UnboundedSender<Vec<u8>>,
    fill: Arc<Fill>,
}

/// Where they come out.
pub(super) struct Frames {
    frames: mpsc::UnboundedReceiver<Vec<u8>>,
    fill: Arc<Fill>,
}

/// Knows how many there are.
pub(super) struct Gauge(Arc<Fill>);

pub(super) fn outbox() -> (Outbox, Frames, Gauge) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let fill = Arc::new(Fill::default());
    let frames = Frames { frames: receiver, fill: Arc::clone(&fill) };
    (Outbox { frames: sender, fill: Arc::clone(&fill) }, frames, Gauge(fill))
}

impl Outbox {
    /// Puts a frame in. One for a connection that has ended, or is about to be dropped, is lost.
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
    /// Waits until the connection has read enough of what was posted.
    pub(super) async fn drained(&self) {
        loop {
            let changed = self.0.changed.notified();
            if self.0.bytes.load(Ordering::Relaxed) < HEARD_BELOW {
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
