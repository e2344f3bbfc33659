//! Transfers objects' bytes between this client and workers, over the workers' own sockets.
//!
//! Where the kernel allows it, an object is copied directly from the worker's memory, and a worker
//! copies from this process. Otherwise the bytes go over the socket.
//!
//! *Invariant:* bytes that were copied from a worker's memory are used only if the worker still
//! held them afterwards.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::time::Duration;

use super::ClientError;
use super::session::Session;
use super::socket::{Patient, Ready, connect, finish};
use cuda_cluster_data::copy;
use cuda_cluster_native::connection;
use cuda_cluster_native::error::ConversationError;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::tasks::{AtWork, Bulk, BulkReply, Counters, ObjectId};

/// Number of attempts to get an object whose worker may have died.
const TRIES: u32 = 600;

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// Objects from this size on, in bytes, are read from memory: for smaller ones a socket is as fast.
pub(super) const LARGE: usize = 64 << 10;

/// A connection to a worker, which answers one question after the other.
struct Connection<'a> {
    session: &'a Session,
    worker: String,
    socket: Ready<Patient>,
}

impl<'a> Connection<'a> {
    fn open(session: &'a Session, worker: &str) -> Result<Self, ClientError> {
        let socket = connect(&session.paths, worker, &session.secret, Role::Bulk)?;
        Ok(Self { session, worker: worker.to_owned(), socket })
    }

    fn broken(&self, error: impl Into<ConversationError>) -> ClientError {
        ClientError::conversation(&self.session.paths.socket(&self.worker), error.into())
    }

    fn send(&mut self, question: &Bulk) -> Result<(), ClientError> {
        finish(connection::send(&mut self.socket, question)).map_err(|error| self.broken(error))
    }

    fn ask(&mut self, question: &Bulk) -> Result<BulkReply, ClientError> {
        self.send(question)?;
        self.receive()
    }

    fn receive(&mut self) -> Result<BulkReply, ClientError> {
        let reply = finish(connection::receive(&mut self.socket, FRAME_LIMIT));
        reply.map_err(|error| self.broken(error))
    }

    fn refused(&self, reply: BulkReply) -> ClientError {
        let reason = match reply {
            BulkReply::Refused { reason } => reason,
            _ => "an answer to another question".to_owned(),
        };
        ClientError::Refused { worker: self.worker.clone(), reason }
    }

    fn get(&mut self, object: ObjectId) -> Result<Vec<u8>, ClientError> {
        let pid = self.socket.0.peer().filter(|_| self.session.reads_memory());
        let mut reply = self.ask(&Bulk::Get { object, reads: pid.is_some() })?;
        if let (BulkReply::At { address, bytes }, Some(pid)) = (&reply, pid) {
            match self.copy(pid, *address, *bytes)? {
                Some(bytes) => return Ok(bytes),
                None => reply = self.ask(&Bulk::Get { object, reads: false })?,
            }
        }
        let BulkReply::Bytes(length) = reply else { return Err(self.refused(reply)) };
        let room = copy::vector(usize::try_from(length).unwrap_or(usize::MAX));
        let action = "allocate memory for an object";
        let mut bytes = room.map_err(|source| ClientError::System { action, source })?;
        let read = (&mut self.socket.0).take(length).read_to_end(&mut bytes);
        if read.map_err(|error| self.broken(error))? as u64 != length {
            return Err(self.broken(io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        Ok(bytes)
    }

    /// Copies from the worker's memory; `None` if that is not possible.
    fn copy(&mut self, pid: u32, at: u64, bytes: u64) -> Result<Option<Vec<u8>>, ClientError> {
        let [address, bytes] = [at, bytes].map(|one| usize::try_from(one).unwrap_or(usize::MAX));
        let copy = match copy::copy(pid, address, bytes) {
            Ok(copy) => copy,
            Err(error) => {
                // Without permission, it would be refused for the next object as well.
                if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) {
                    self.session.stop_reading_memory();
                }
                return Ok(None);
            }
        };
        // A worker that gives up on a slow reader closes the connection, and only then reuses the
        // memory.
        if !self.socket.0.is_open() {
            return Err(self.broken(io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        self.send(&Bulk::Done)?;
        Ok(Some(copy))
    }

    fn put(&mut self, object: ObjectId, content: &[u8]) -> Result<(), ClientError> {
        let readable = content.len() >= LARGE && self.session.reads_memory();
        let address = readable.then(|| content.as_ptr().addr() as u64);
        self.send(&Bulk::Put { object, bytes: content.len() as u64, address })?;
        let mut reply = address.map(|_| self.receive()).transpose()?;
        if reply.as_ref().is_none_or(|reply| *reply == BulkReply::Send) {
            self.socket.0.write_all(content).map_err(|error| self.broken(error))?;
            reply = Some(self.receive()?);
        }
        match reply {
            Some(BulkReply::Stored) => Ok(()),
            Some(other) => Err(self.refused(other)),
            None => Err(ClientError::Gone),
        }
    }
}

/// Sends an object to a worker.
pub(super) fn put(
    session: &Session,
    worker: &str,
    object: ObjectId,
    content: &[u8],
) -> Result<(), ClientError> {
    Connection::open(session, worker)?.put(object, content)
}

/// Gets objects, over one connection to each worker.
pub(super) struct Fetcher<'a> {
    session: &'a Session,
    open: HashMap<String, Connection<'a>>,
}

impl<'a> Fetcher<'a> {
    pub(super) fn new(session: &'a Session) -> Self {
        Self { session, open: HashMap::new() }
    }

    /// Closes the connections, for a wait that may be long.
    pub(super) fn close(&mut self) {
        self.open.clear();
    }

    /// Gets an object from a worker that has it; tries again when a worker dies.
    pub(super) fn fetch(&mut self, object: ObjectId) -> Result<Vec<u8>, ClientError> {
        let mut tries = 0;
        loop {
            let workers = self.session.locate(object)?;
            let mut last = ClientError::Gone;
            for worker in &workers {
                match self.get(worker, object) {
                    Ok(bytes) => return Ok(bytes),
                    Err(error) => last = error,
                }
            }
            tries += 1;
            if tries == TRIES || matches!(last, ClientError::NotAnswering { .. }) {
                return Err(last);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn get(&mut self, worker: &str, object: ObjectId) -> Result<Vec<u8>, ClientError> {
        let connection = match self.open.entry(worker.to_owned()) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => place.insert(Connection::open(self.session, worker)?),
        };
        let result = connection.get(object);
        // After an error, the next reply could be an answer to an earlier question.
        if result.is_err() {
            self.open.remove(worker);
        }
        result
    }
}

pub(super) fn counters(session: &Session, worker: &str) -> Result<Counters, ClientError> {
    asked(session, worker, &Bulk::Counters, |reply| match reply {
        BulkReply::Counters(counters) => Ok(counters),
        other => Err(other),
    })
}

pub(super) fn at_work(session: &Session, worker: &str) -> Result<AtWork, ClientError> {
    asked(session, worker, &Bulk::AtWork, |reply| match reply {
        BulkReply::AtWork(at_work) => Ok(at_work),
        other => Err(other),
    })
}

fn asked<T>(
    session: &Session,
    worker: &str,
    question: &Bulk,
    answer: impl FnOnce(BulkReply) -> Result<T, BulkReply>,
) -> Result<T, ClientError> {
    // No socket, one that nobody listens to any more, or one whose worker ends meanwhile, perhaps
    // while it greets.
    let gone = |error| match error {
        ClientError::Socket { .. } | ClientError::Stranger { .. } => {
            ClientError::NoWorker { worker: worker.to_owned() }
        }
        error => error,
    };
    let mut connection = Connection::open(session, worker).map_err(gone)?;
    let reply = connection.ask(question).map_err(gone)?;
    answer(reply).map_err(|other| connection.refused(other))
}
