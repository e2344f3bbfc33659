//! Streams and events: work in order, done at once or later by another thread.
//!
//! *Invariant:* the work of a stream is done in the order in which it was given.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::time::Duration;

use crate::codes::{Answer, INVALID_HANDLE};
use crate::driver::Driver;

/// `CUstreamCallback`.
pub type Callback = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void);

/// The stream that is always there: `NULL`, `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`. It waits for
/// all blocking streams, and is waited for.
pub const DEFAULT: usize = 0;

pub enum Work {
    /// Between places that the driver reaches.
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// From memory that the program may write again: its bytes as they were.
    Write {
        to: usize,
        bytes: Vec<u8>,
    },
    Fill {
        to: usize,
        bytes: usize,
        value: u8,
    },
    /// Until another stream has done so much.
    Wait {
        stream: usize,
        ticket: u64,
    },
    Call {
        function: Callback,
        user: usize,
    },
    Kernel(Box<dyn FnOnce() + Send>),
}

impl Work {
    /// Does it; `stream` is for who is called back.
    pub fn run(self, stream: usize) {
        match self {
            // SAFETY: both ranges were checked when the work was given, as far as they are device
            // memory; for the host's the caller promised.
            Work::Copy { to, from, bytes } => unsafe {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                std::ptr::copy(std::ptr::with_exposed_provenance(from), to, bytes);
            },
            // SAFETY: as above.
            Work::Write { to, bytes } => unsafe {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            },
            // SAFETY: as above.
            Work::Fill { to, bytes, value } => unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>(to).write_bytes(value, bytes);
            },
            Work::Wait { .. } => {}
            Work::Kernel(run) => run(),
            // SAFETY: the caller promised a function of this type and its argument.
            Work::Call { function, user } => unsafe {
                let handle = std::ptr::with_exposed_provenance_mut(stream);
                function(handle, 0, std::ptr::with_exposed_provenance_mut(user));
            },
        }
    }
}

pub struct Stream {
    pub device: usize,
    /// Whether it waits for the default stream, and is waited for.
    pub blocking: bool,
    queue: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    /// Destroyed by the program; it goes when its work is done.
    pub closing: bool,
}

impl Stream {
    fn idle(&self) -> bool {
        self.submitted == self.completed
    }
}

/// A point in a stream.
#[derive(Clone, Copy, Default)]
pub struct Event {
    pub device: usize,
    stream: usize,
    ticket: u64,
}

#[derive(Default)]
pub struct Streams {
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Event>,
    next: usize,
    /// The stream that had its turn last.
    turn: usize,
}

impl Streams {
    fn handle(&mut self) -> usize {
        self.next += 1;
        0x5700_0000 + self.next * 16
    }

    pub fn create(&mut self, device: usize, blocking: bool) -> usize {
        let handle = self.handle();
        let (queue, submitted, completed) = (VecDeque::new(), 0, 0);
        let stream = Stream { device, blocking, queue, submitted, completed, closing: false };
        self.streams.insert(handle, stream);
        handle
    }

    /// A stream that the program has not destroyed.
    pub fn get(&self, handle: usize) -> Answer<&Stream> {
        self.streams.get(&handle).filter(|stream| !stream.closing).ok_or(INVALID_HANDLE)
    }

    pub fn destroy(&mut self, handle: usize) -> Answer {
        self.get(handle)?;
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.closing = true;
            if stream.idle() {
                self.streams.remove(&handle);
            }
        }
        Ok(())
    }

    pub fn submit(&mut self, handle: usize, work: Work) -> Answer {
        let stream = self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)?;
        stream.queue.push_back(work);
        stream.submitted += 1;
        Ok(())
    }

    /// How much has been given to a stream.
    pub fn ticket(&self, handle: usize) -> u64 {
        self.streams.get(&handle).map_or(0, |stream| stream.submitted)
    }

    /// Whether a stream has done so much; one that is gone has.
    pub fn reached(&self, handle: usize, ticket: u64) -> bool {
        self.streams.get(&handle).is_none_or(|stream| stream.completed >= ticket)
    }

    /// The streams that the default stream of a GPU waits for, with what they have to do.
    pub fn pending(&self, device: usize, all: bool) -> Vec<(usize, u64)> {
        let waits = |stream: &Stream| stream.device == device && (all || stream.blocking);
        let pending = self.streams.iter().filter(|(_, stream)| waits(stream) && !stream.idle());
        pending.map(|(handle, stream)| (*handle, stream.submitted)).collect()
    }

    pub fn forget(&mut self, device: usize) {
        self.streams.retain(|_, stream| stream.device != device);
        self.events.retain(|_, event| event.device != device);
    }

    pub fn left(&self) -> (usize, usize) {
        let streams = self.streams.values().filter(|stream| !stream.closing).count();
        (streams, self.events.len())
    }

    pub fn create_event(&mut self, device: usize) -> usize {
        let handle = self.handle();
        self.events.insert(handle, Event { device, ..Event::default() });
        handle
    }

    pub fn event(&self, handle: usize) -> Answer<Event> {
        self.events.get(&handle).copied().ok_or(INVALID_HANDLE)
    }

    pub fn destroy_event(&mut self, handle: usize) -> Answer {
        self.events.remove(&handle).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    pub fn record(&mut self, event: usize, stream: usize) -> Answer {
        let ticket = self.ticket(stream);
        let event = self.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        (event.stream, event.ticket) = (stream, ticket);
        Ok(())
    }

    /// What an event waits for.
    pub fn point(&self, event: usize) -> Answer<(usize, u64)> {
        self.event(event).map(|event| (event.stream, event.ticket))
    }

    /// Work whose turn it is.
    fn turn(&mut self) -> Option<(usize, Work)> {
        let ready = |(handle, stream): (&usize, &Stream)| match stream.queue.front()? {
            Work::Wait { stream, ticket } if !self.reached(*stream, *ticket) => None,
            _ => Some(*handle),
        };
        let after = self.streams.range(self.turn + 1..).find_map(ready);
        let handle = after.or_else(|| self.streams.iter().find_map(ready))?;
        self.turn = handle;
        let work = self.streams.get_mut(&handle)?.queue.pop_front()?;
        Some((handle, work))
    }

    fn complete(&mut self, handle: usize) {
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.completed += 1;
            if stream.closing && stream.idle() {
                self.streams.remove(&handle);
            }
        }
    }
}

/// Does the work of all streams, one after the other, for ever.
pub fn run(driver: &'static Driver) {
    let mut dice = 0x9e37_79b9_u32;
    let mut state = driver.lock();
    loop {
        let Some((stream, work)) = state.streams.turn() else {
            state = driver.wait(state);
            continue;
        };
        drop(state);
        if driver.faults.later {
            dice ^= dice << 13;
            dice ^= dice >> 17;
            dice ^= dice << 5;
            std::thread::sleep(Duration::from_micros(u64::from(dice % 200)));
        }
        work.run(stream);
        state = driver.lock();
        state.streams.complete(stream);
        driver.changed.notify_all();
    }
}
