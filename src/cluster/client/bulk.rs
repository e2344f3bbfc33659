//! Transfers objects' bytes between this client and workers, over the workers' own sockets.

use std::io::{self, Read, Write};
use std::time::Duration;

use super::ClientError;
use super::session::Session;
use super::socket::{connect, finish};
use crate::engine::native::connection;
use crate::wire::frame::FRAME_LIMIT;
use crate::wire::greeting::Role;
use crate::wire::tasks::{Bulk, BulkReply, Counters, ObjectId};

/// Number of attempts to get an object whose worker may have died.
const TRIES: u32 = 600;

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

fn ask(
    session: &Session,
    worker: &str,
    question: &Bulk,
    content: &[u8],
) -> Result<Reply, ClientError> {
    let broken = |error| ClientError::conversation(&session.paths.socket(worker), error);
    let mut socket = connect(&session.paths, worker, &session.secret, Role::Bulk)?;
    finish(connection::send(&mut socket, question)).map_err(broken)?;
    socket.0.write_all(content).map_err(|error| broken(error.into()))?;
    let reply = finish(connection::receive(&mut socket, FRAME_LIMIT)).map_err(broken)?;
    let mut bytes = Vec::new();
    if let BulkReply::Bytes(length) = reply {
        let read = (&mut socket.0).take(length).read_to_end(&mut bytes);
        if read.map_err(|error| broken(error.into()))? as u64 != length {
            let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(broken(ended.into()));
        }
    }
    Ok(Reply { reply, bytes })
}

struct Reply {
    reply: BulkReply,
    bytes: Vec<u8>,
}

impl Reply {
    fn refused(self, worker: &str) -> ClientError {
        let reason = match self.reply {
            BulkReply::Refused { reason } => reason,
            _ => "an answer to another question".to_owned(),
        };
        ClientError::Refused { worker: worker.to_owned(), reason }
    }
}

/// Sends an object to a worker.
pub(super) fn put(
    session: &Session,
    worker: &str,
    object: ObjectId,
    content: &[u8],
) -> Result<(), ClientError> {
    let question = Bulk::Put { object, bytes: content.len() as u64 };
    let reply = ask(session, worker, &question, content)?;
    if reply.reply == BulkReply::Stored { Ok(()) } else { Err(reply.refused(worker)) }
}

/// Gets an object from a worker that has it; tries again when a worker dies.
pub(super) fn fetch(session: &Session, object: ObjectId) -> Result<Vec<u8>, ClientError> {
    let mut tries = 0;
    loop {
        let workers = session.locate(object)?;
        let mut last = ClientError::Gone;
        for worker in &workers {
            match ask(session, worker, &Bulk::Get { object }, &[]) {
                Ok(Reply { reply: BulkReply::Bytes(_), bytes }) => return Ok(bytes),
                Ok(reply) => last = reply.refused(worker),
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

pub(super) fn counters(session: &Session, worker: &str) -> Result<Counters, ClientError> {
    let reply = ask(session, worker, &Bulk::Counters, &[])?;
    match reply.reply {
        BulkReply::Counters(counters) => Ok(counters),
        _ => Err(reply.refused(worker)),
    }
}
