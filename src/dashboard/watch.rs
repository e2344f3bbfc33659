//! What pages are told of a cluster, for a screen of this program.
//!
//! *Invariant:* there is one feed: a screen gets the messages that a page gets.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::feed::{Feed, Lanes, Message};
use super::measure::Figures;
use crate::ids::ClusterName;
use crate::supervise::{ClusterState, Record};

/// A piece of news of a cluster.
#[derive(Clone, Debug)]
pub enum Update {
    /// Its state; without the lanes of its connections, which are told apart.
    State(Box<ClusterState>),
    /// The lanes of its connections.
    Lanes(Lanes),
    /// What its processes, the GPUs and the NICs do.
    Figures(Box<Figures>),
    /// Something has happened.
    Event(Record),
    /// Its supervisor does not answer, and why.
    Silent(String),
    /// It has ended, and how.
    End(String),
    /// A cluster of this name was started again, or news were lost: what was told is void.
    Begin,
}

/// Follows a cluster, also through its end to the next one of its name.
#[derive(Debug)]
pub struct Watch {
    feed: Arc<Feed>,
    first: VecDeque<Message>,
    later: broadcast::Receiver<Message>,
}

#[derive(Deserialize)]
struct Words {
    text: String,
}

impl Watch {
    /// Begins to follow a cluster, with this time between two readings of the figures. Needs an
    /// event loop.
    pub fn open(name: &ClusterName, figures_every: Duration) -> Self {
        let feed = Arc::new(Feed::new(name.clone(), figures_every, Duration::ZERO));
        let (first, later) = feed.open();
        Self { feed, first: first.into(), later }
    }

    /// Whether more news are there already.
    pub fn has_more(&self) -> bool {
        !self.first.is_empty() || !self.later.is_empty()
    }

    /// The next piece of news; `None` if there will be none. Cancel-safe.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            let message = match self.first.pop_front() {
                Some(message) => message,
                None => match self.later.recv().await {
                    Ok(message) => message,
                    Err(RecvError::Lagged(_)) => {
                        let (first, later) = self.feed.open();
                        (self.first, self.later) = (first.into(), later);
                        return Some(Update::Begin);
                    }
                    Err(RecvError::Closed) => return None,
                },
            };
            if let Some(update) = Update::read(&message) {
                return Some(update);
            }
        }
    }
}

impl Update {
    /// What a message says; `None` if it is for pages alone.
    fn read(message: &Message) -> Option<Self> {
        let text = &*message.text;
        let words = || serde_json::from_str::<Words>(text).ok().map(|words| words.text);
        match message.kind {
            "state" => serde_json::from_str(text).ok().map(Update::State),
            "lanes" => serde_json::from_str(text).ok().map(Update::Lanes),
            "figures" => serde_json::from_str(text).ok().map(Update::Figures),
            "event" => serde_json::from_str(text).ok().map(Update::Event),
            "silent" => words().map(Update::Silent),
            "end" => words().map(Update::End),
            "begin" => Some(Update::Begin),
            _ => None,
        }
    }
}
