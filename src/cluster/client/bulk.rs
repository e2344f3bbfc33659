//! Objects' bytes between this client and workers, over the workers' own sockets.

use std::io::{Read, Write};
use std::time::Duration;

use super::ClientError;
use super::line::{Line, connect, receive, send};
use super::patience::explained;
use crate::wire::native::FRAME_LIMIT;
use crate::wire::tasks::{Bulk, BulkReply, Counters, ObjectId};

/// Tries to get an object whose worker may have died meanwhile.
const TRIES: u32 = 600;

/// Time between two tries.
const PAUSE: Duration = Duration::from_millis(50);

fn ask(line: &Line, worker: &str, question: &Bulk, content: &[u8]) -> Result<Reply, ClientError> {
    let path = line.run_directory.join(format!("{worker}.sock"));
    let mut stream = connect(&line.run_directory, worker, &line.secret)?;
    let socket = |source| explained(&path, source);
    send(&mut stream, question).map_err(socket)?;
    stream.write_all(content).map_err(socket)?;
    let reply = receive(&mut stream, FRAME_LIMIT).map_err(socket)?;
    let mut bytes = Vec::new();
    if let BulkReply::Bytes(length) = reply {
        (&mut stream).take(length).read_to_end(&mut bytes).map_err(socket)?;
        if bytes.len() as u64 != length {
            return Err(socket(std::io::ErrorKind::UnexpectedEof.into()));
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

/// Gives an object to a worker.
pub(super) fn put(
    line: &Line,
    worker: &str,
    object: ObjectId,
    content: &[u8],
) -> Result<(), ClientError> {
    let question = Bulk::Put { object, bytes: content.len() as u64 };
    let reply = ask(line, worker, &question, content)?;
    if reply.reply == BulkReply::Stored { Ok(()) } else { Err(reply.refused(worker)) }
}

/// Gets an object from whoever has it, as often as workers die over it.
pub(super) fn fetch(line: &Line, object: ObjectId) -> Result<Vec<u8>, ClientError> {
    let mut tries = 0;
    loop {
        let workers = line.locate(object)?;
        let mut last = ClientError::Gone;
        for worker in &workers {
            match ask(line, worker, &Bulk::Get { object }, &[]) {
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

pub(super) fn counters(line: &Line, worker: &str) -> Result<Counters, ClientError> {
    let reply = ask(line, worker, &Bulk::Counters, &[])?;
    match reply.reply {
        BulkReply::Counters(counters) => Ok(counters),
        _ => Err(reply.refused(worker)),
    }
}
