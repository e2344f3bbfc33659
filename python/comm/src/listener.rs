//! A socket that accepts connections, and those whose greeting is over.
//!
//! *Invariant:* the event loop sees connections only after both ends have proven what they must.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::completions::Completions;
use crate::connection::Connection;
use crate::engine::{Engine, Settings};

/// A socket that listens.
#[derive(Debug)]
pub struct Listener {
    id: u64,
    socket: OwnedFd,
    pub(crate) settings: Settings,
    pub(crate) completions: Arc<Completions>,
    engine: &'static Engine,
    accepted: Mutex<Accepted>,
}

#[derive(Debug, Default)]
struct Accepted {
    waiting: VecDeque<Arc<Connection>>,
    closed: bool,
    /// Hosts that were not let in and why, each once.
    refused: BTreeSet<(String, String)>,
    /// Those of them that the event loop does not know.
    untold: Vec<(String, String)>,
}

/// Most refusals that are told of: anybody can cause them.
const TOLD: usize = 16;

impl Listener {
    pub(crate) fn new(
        id: u64,
        socket: OwnedFd,
        settings: Settings,
        completions: Arc<Completions>,
        engine: &'static Engine,
    ) -> Self {
        Self { id, socket, settings, completions, engine, accepted: Mutex::default() }
    }

    /// The number of its event: connections are there.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Takes the connections that have been accepted.
    pub fn accept(&self) -> Vec<Arc<Connection>> {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.waiting.drain(..).collect()
    }

    /// Takes the hosts that were not let in for the first time, and why.
    pub fn refused(&self) -> Vec<(String, String)> {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut accepted.untold)
    }

    /// A peer that was not let in.
    pub(crate) fn refuse(&self, host: &str, why: &str) {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = (host.to_owned(), why.to_owned());
        if accepted.refused.len() < TOLD && accepted.refused.insert(refusal.clone()) {
            accepted.untold.push(refusal);
            self.completions.push(self.id);
        }
    }

    /// Accepts no more, and ends connections that nobody has taken.
    pub fn close(&self) {
        if !self.engine.is_alive_here() {
            return;
        }
        let waiting = {
            let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
            accepted.closed = true;
            std::mem::take(&mut accepted.waiting)
        };
        for connection in waiting {
            connection.abort();
        }
        self.engine.remove_listener(self.id);
    }

    /// A connection whose greeting is over.
    pub(crate) fn add(&self, connection: Arc<Connection>) {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        if accepted.closed {
            drop(accepted);
            return connection.abort();
        }
        accepted.waiting.push_back(connection);
        if accepted.waiting.len() == 1 {
            self.completions.push(self.id);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
