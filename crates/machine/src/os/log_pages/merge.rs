//! The lines of several logs as one, in the order of their times.
//!
//! *Invariant:* lines of the same log keep their order; of those that came at the same time the
//! log that was named first has the first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::io;

use super::{Direction, Pages, Place, Stamp};

/// Reads several logs.
#[derive(Debug)]
pub struct Merged {
    logs: Vec<(String, Pages)>,
    direction: Direction,
    heap: BinaryHeap<Next>,
}

/// The next line of a log.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    stamp: Stamp,
    log: usize,
    direction: Direction,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = (self.stamp, self.log).cmp(&(other.stamp, other.log));
        match self.direction {
            Direction::Back => order,
            Direction::Forth => order.reverse(),
        }
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Merged {
    /// The lines of these logs, which are all read in this direction.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn new(logs: Vec<(String, Pages)>, direction: Direction) -> io::Result<Self> {
        let mut merged = Self { logs, direction, heap: BinaryHeap::new() };
        for log in 0..merged.logs.len() {
            merged.push(log)?;
        }
        Ok(merged)
    }

    fn push(&mut self, log: usize) -> io::Result<()> {
        let line = self.logs[log].1.line()?;
        let next = line.map(|line| Next { stamp: line.stamp, log, direction: self.direction });
        self.heap.extend(next);
        Ok(())
    }

    /// The log that has the next line, which is not passed: its name, and where to read it.
    pub fn peek(&mut self) -> Option<(&str, &mut Pages)> {
        let log = self.heap.peek()?.log;
        let (name, pages) = &mut self.logs[log];
        Some((name.as_str(), pages))
    }

    /// Goes on to the next line.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn pass(&mut self) -> io::Result<()> {
        if let Some(Next { log, .. }) = self.heap.pop() {
            self.logs[log].1.pass();
            self.push(log)?;
        }
        Ok(())
    }

    /// For each log what parts the lines that have been passed from the others.
    pub fn boundaries(&self) -> impl Iterator<Item = (&str, Place)> {
        self.logs.iter().map(|(name, pages)| (name.as_str(), pages.boundary()))
    }

    /// The logs of which lines are missing, as far as they have been read.
    pub fn missing(&self) -> impl Iterator<Item = &str> {
        self.logs.iter().filter(|(_, pages)| pages.misses()).map(|(name, _)| name.as_str())
    }
}
