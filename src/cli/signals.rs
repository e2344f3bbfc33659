//! Signals from the user: the first asks the cluster to stop, the second kills it. Batch systems
//! send SIGTERM twice for one request.

use std::time::Instant;

use nix::sys::signal::Signal::{SIGHUP, SIGTERM};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{Exit, Failure};
use crate::os::process::ignores;
use crate::supervise::{Escalation, Requests};

/// The signals that ask a foreground process to end.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Unless it was ignored when this process started: under nohup(1) a cluster outlives its
    /// terminal.
    hangup: Option<Signal>,
    requests: Requests,
    /// The first signal's number.
    first: Option<u8>,
}

impl Signals {
    /// Starts to listen.
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
            hangup: match ignores(SIGHUP) {
                true => None,
                false => Some(listen(SignalKind::hangup())?),
            },
            requests: Requests::default(),
            first: None,
        })
    }

    /// Waits for the next signal and returns its number.
    pub(super) async fn next(&mut self) -> u8 {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = hangup => 1,
        }
    }

    /// Counts a signal, and returns what it asks for; `None` if it repeats the last one.
    pub(super) fn escalation(&mut self, number: u8) -> Option<Escalation> {
        let is_terminate = i32::from(number) == SIGTERM as i32;
        let asked = self.requests.hear(is_terminate, Instant::now())?;
        self.first.get_or_insert(number);
        Some(asked)
    }

    /// Number of signals so far.
    pub(super) fn count(&self) -> u32 {
        self.requests.count()
    }

    /// The first signal's number, if there was a signal.
    pub(super) fn first(&self) -> Option<u8> {
        self.first
    }
}
