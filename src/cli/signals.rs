//! Signals as a person sends them: the first asks, the second insists.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{Exit, Failure};
use crate::supervise::Escalation;

/// The signals that ask a foreground process to end.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    /// How many came.
    count: u32,
    /// The number of the first one.
    first: Option<u8>,
}

impl Signals {
    /// Listens from now on.
    pub(super) fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                let error = anyhow::Error::new(error).context("cannot listen for signals");
                Failure::new(Exit::Failed, error)
            })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
            count: 0,
            first: None,
        })
    }

    /// The number of the next one.
    pub(super) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hangup.recv() => 1,
        }
    }

    /// Counts one, and says what it asks for.
    pub(super) fn escalation(&mut self, number: u8) -> Escalation {
        self.count += 1;
        self.first.get_or_insert(number);
        Escalation::of_request(self.count)
    }

    /// How many came.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// The number of the first one, if one came.
    pub(super) fn first(&self) -> Option<u8> {
        self.first
    }
}
