//! The output of processes: a thread per stream writes it to the log, and to a copy if there is to
//! be one, and passes it on to the starter of a run.
//!
//! Output for the starter goes through a queue with a limit per stream, and then through one thread
//! into one pipe. So a stalled reader blocks the ranks, as a pipe does, but neither the guardian
//! nor the supervisor. When a process has ended, the rest of its output (what its pipe holds) is
//! read at once, so that its end and its last lines are known even if the reader is slow.
//!
//! *Invariant:* all bytes of a stream reach the log and the reader in the order in which they were
//! written, unless the reader has gone or was given up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::copy::Copy;
use crate::os::log_file::LogWriter;
use cuda_cluster_wire::output::{LIMIT, LineBuffer, Source, encode};
use cuda_cluster_wire::process::Key;

/// Bytes of a stream that may wait for the reader before the process blocks.
const QUEUED: usize = 256 << 10;

/// Longer lines are split if two streams share a log.
const LONGEST_LINE: usize = 64 << 10;

/// What happens to a stream of a process.
#[derive(Debug)]
pub(super) enum Happening {
    /// It has ended.
    Ended,
    /// Its copy is not written any more.
    NotCopied { path: PathBuf, reason: String },
}

/// Notifies the guardian's loop of what happens to the streams of processes.
#[derive(Debug)]
pub(super) struct Ends {
    sender: Sender<(Key, Happening)>,
    receiver: Receiver<(Key, Happening)>,
    /// Wakes the loop when the channel has a message.
    wake: Arc<io::PipeWriter>,
    woken: PipeReader,
}

impl Ends {
    pub(super) fn new() -> io::Result<Self> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (woken, wake) = io::pipe()?;
        Ok(Self { sender, receiver, wake: Arc::new(wake), woken })
    }

    /// Readable when something may have happened.
    pub(super) fn readable(&self) -> &PipeReader {
        &self.woken
    }

    /// Discards the bytes that woke the loop; the message is in the channel.
    pub(super) fn rearm(&mut self) {
        let mut bytes = [0; 64];
        let _ = self.woken.read(&mut bytes);
    }

    /// What has happened next.
    pub(super) fn next(&self) -> Option<(Key, Happening)> {
        self.receiver.try_recv().ok()
    }

    /// Waits until `by` for the next to happen.
    pub(super) fn next_by(&self, by: Instant) -> Option<(Key, Happening)> {
        self.receiver.recv_timeout(by.saturating_duration_since(Instant::now())).ok()
    }
}

/// One stream of a process.
pub(super) struct Output {
    pub(super) key: Key,
    /// The process's name.
    pub(super) name: String,
    pub(super) pipe: PipeReader,
    pub(super) log: Arc<Mutex<LogWriter>>,
    /// Whether another stream shares the log, so that whole lines must be written.
    pub(super) shares_log: bool,
    /// The file that also gets it.
    pub(super) copy: Option<Copy>,
    /// Where to deliver it, and as which source.
    pub(super) delivery: Option<(Arc<Delivery>, Source)>,
}

impl Output {
    /// Starts the stream's thread, which ends with the stream.
    pub(super) fn follow(self, ends: &Ends) -> io::Result<()> {
        let (sender, wake) = (ends.sender.clone(), Arc::clone(&ends.wake));
        let name = self.name.chars().take(15).collect();
        let work = move || {
            let key = self.key;
            let tell = |happening| {
                // The receiver is gone only when the guardian is ending.
                let _ = sender.send((key, happening));
                let _ = (&*wake).write(&[0]);
            };
            self.pass_on(&tell);
            tell(Happening::Ended);
        };
        std::thread::Builder::new().name(name).stack_size(128 << 10).spawn(work)?;
        Ok(())
    }

    fn pass_on(mut self, tell: &dyn Fn(Happening)) {
        let mut copy = self.copy.take();
        let mut copy = move |bytes: &[u8]| {
            if let Some(copy) = &mut copy
                && let Err(reason) = copy.write(bytes)
            {
                tell(Happening::NotCopied { path: copy.path().to_owned(), reason });
            }
        };
        copy(&[]);
        let log = |bytes: &[u8]| {
            let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.append(bytes, SystemTime::now());
        };
        let mut lines = LineBuffer::new(b"\n", LONGEST_LINE);
        let mut buffer = vec![0; LIMIT.min(16 << 10)];
        while let Ok(length @ 1..) = self.pipe.read(&mut buffer) {
            let bytes = &buffer[..length];
            if self.shares_log {
                log(&lines.feed(bytes))
            } else {
                log(bytes)
            }
            copy(bytes);
            if let Some((delivery, source)) = &self.delivery {
                delivery.put(self.key, *source, bytes);
            }
        }
        log(&lines.finish());
        self.log.lock().unwrap_or_else(PoisonError::into_inner).end(SystemTime::now());
        if let Some((delivery, source)) = &self.delivery {
            delivery.put(self.key, *source, &[]);
        }
    }
}

/// Delivers the ranks' output, frame by frame.
#[derive(Debug)]
pub(super) struct Delivery {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<(Source, Vec<u8>)>,
    /// Queued bytes, by stream.
    waiting: BTreeMap<Source, usize>,
    /// Processes that have ended: their pipes are read without waiting for the reader.
    ended: BTreeSet<Key>,
    /// Whether the reader has gone.
    closed: bool,
    /// Whether no more output will be added.
    complete: bool,
    /// Whether everything has been delivered, or the reader has gone.
    done: bool,
    /// Number of delivered frames.
    taken: u64,
}

impl Delivery {
    /// Starts a thread that writes to `pipe`.
    pub(super) fn begin(pipe: OwnedFd) -> io::Result<Arc<Self>> {
        let delivery = Arc::new(Self { queue: Mutex::default(), changed: Condvar::new() });
        let own = Arc::clone(&delivery);
        let mut pipe = File::from(pipe);
        std::thread::Builder::new()
            .name("delivery".to_owned())
            .stack_size(128 << 10)
            .spawn(move || own.hand_on(&mut pipe))?;
        Ok(delivery)
    }

    /// Queues bytes of a stream; blocks while the queue is full.
    fn put(&self, key: Key, source: Source, bytes: &[u8]) {
        let full = |queue: &mut Queue| {
            let waiting = queue.waiting.get(&source).copied().unwrap_or(0);
            waiting >= QUEUED && !queue.closed && !queue.ended.contains(&key)
        };
        let mut queue = self.changed.wait_while(self.locked(), full);
        let queue = queue.as_deref_mut().unwrap_or_else(|poisoned| poisoned.get_mut());
        if !queue.closed {
            *queue.waiting.entry(source).or_default() += bytes.len();
            queue.frames.push_back((source, bytes.to_vec()));
        }
        self.changed.notify_all();
    }

    /// Marks a process as ended: the rest of its output is limited, and is queued without waiting.
    pub(super) fn let_through(&self, key: Key) {
        self.locked().ended.insert(key);
        self.changed.notify_all();
    }

    /// Marks the end of all output.
    pub(super) fn complete(&self) {
        self.locked().complete = true;
        self.changed.notify_all();
    }

    /// Waits at most this long until everything is delivered; returns whether it is, and how much.
    pub(super) fn wait(&self, at_most: Duration) -> (bool, u64) {
        let (queue, _) = self
            .changed
            .wait_timeout_while(self.locked(), at_most, |queue| !queue.done)
            .unwrap_or_else(PoisonError::into_inner);
        (queue.done, queue.taken)
    }

    /// Writes queued output until all is written.
    fn hand_on(&self, pipe: &mut File) {
        loop {
            let idle = |queue: &mut Queue| queue.frames.is_empty() && !queue.complete;
            let waited = self.changed.wait_while(self.locked(), idle);
            let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
            let Some((source, bytes)) = queue.frames.pop_front() else {
                queue.done = true;
                self.changed.notify_all();
                return;
            };
            drop(queue);
            // The reader may be slow, so the lock is not held while writing.
            let written = pipe.write_all(&encode(source, &bytes));
            let mut queue = self.locked();
            queue.taken += 1;
            let left = queue.waiting.entry(source).or_default();
            *left = left.saturating_sub(bytes.len());
            if written.is_err() {
                queue.closed = true;
                queue.frames.clear();
                queue.waiting.clear();
            }
            self.changed.notify_all();
        }
    }

    fn locked(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_wire::output::{Stream, read};

    const SOURCE: Source = Source { rank: 1, stream: Stream::Output };

    fn all(reader: &mut PipeReader) -> Vec<u8> {
        let (mut bytes, mut seen) = (Vec::new(), Vec::new());
        while let Some(source) = read(reader, &mut bytes).expect("frames") {
            assert_eq!(source, SOURCE);
            seen.extend_from_slice(&bytes);
        }
        seen
    }

    #[test]
    fn a_reader_that_stalls_holds_up_the_writer_and_loses_nothing() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let delivery = Delivery::begin(writer.into()).expect("a thread");
        let chunk: Vec<u8> = (0..=255).cycle().take(LIMIT).collect();
        let writing = {
            let (delivery, chunk) = (Arc::clone(&delivery), chunk.clone());
            std::thread::spawn(move || {
                for _ in 0..64 {
                    delivery.put(Key(1), SOURCE, &chunk);
                }
                delivery.complete();
            })
        };
        let (done, _) = delivery.wait(Duration::from_millis(100));
        assert!(!done && !writing.is_finished(), "4 MiB do not fit into the queue");
        assert!(delivery.locked().waiting[&SOURCE] <= QUEUED + LIMIT);
        assert_eq!(all(&mut reader), chunk.repeat(64));
        writing.join().expect("it ends");
        assert!(delivery.wait(Duration::from_secs(60)).0);
    }

    #[test]
    fn what_a_dead_process_left_is_taken_at_once() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let delivery = Delivery::begin(writer.into()).expect("a thread");
        delivery.let_through(Key(1));
        // Were it to wait, it would wait for ever: nobody reads yet.
        for _ in 0..64 {
            delivery.put(Key(1), SOURCE, &[7; LIMIT]);
        }
        delivery.complete();
        assert_eq!(all(&mut reader).len(), 64 * LIMIT);
    }

    #[test]
    fn without_a_reader_nobody_waits() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let delivery = Delivery::begin(writer.into()).expect("a thread");
        drop(reader);
        for _ in 0..64 {
            delivery.put(Key(1), SOURCE, &[7; LIMIT]);
        }
        delivery.complete();
        assert!(delivery.wait(Duration::from_secs(60)).0);
    }
}
