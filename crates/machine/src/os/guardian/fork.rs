//! Asks a fork server for a process, instead of executing one.
//!
//! The server is a process of the cluster that has already loaded what the new one needs. It forks
//! twice, so that the guardian adopts the new process, which then follows the shim's instructions
//! itself, as soon as the guardian tells it to: a server that dies may have forked one that it did
//! not report.
//!
//! *Invariant:* a returned process id is that of a child of this process, and one that is not
//! returned does nothing.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpid};
use serde::{Deserialize, Serialize};

use super::channel::{Channel, encoded};
use cuda_cluster_wire::status::{self, Status};

/// How long to wait for an answer, in seconds; the guardian is blocked meanwhile.
const ANSWER_WITHIN: i64 = 5;

/// The request; the instructions, the status pipe, and one or two streams of output are sent along
/// as descriptors.
#[derive(Debug, Serialize)]
struct Question {
    /// The intended parent of the process.
    guardian: i32,
}

/// The server's answer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Pid(i32),
    Refused(String),
}

/// What the new process waits for, on the connection over which it was asked for.
#[derive(Debug, Serialize)]
struct Begin {
    begin: bool,
}

/// Has the server fork a process.
pub(super) fn ask(path: &Path, descriptors: &[BorrowedFd<'_>]) -> io::Result<Pid> {
    let end = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let patience = TimeVal::seconds(ANSWER_WITHIN);
    setsockopt(&end, ReceiveTimeout, &patience)?;
    setsockopt(&end, SendTimeout, &patience)?;
    connect(end.as_raw_fd(), &UnixAddr::new(path)?)?;
    let channel = Channel::from_descriptor(end);
    channel.send(&encoded(&Question { guardian: getpid().as_raw() })?, descriptors)?;
    let gone = || io::Error::new(io::ErrorKind::UnexpectedEof, "the fork server is gone");
    let (answer, _) = channel.receive::<Answer>()?.ok_or_else(gone)?;
    let pid = match answer {
        Answer::Pid(pid) => Pid::from_raw(pid),
        Answer::Refused(reason) => return Err(io::Error::other(reason)),
    };
    // Fails unless the process is a child of this one.
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT)?;
    channel.send(&encoded(&Begin { begin: true })?, &[])?;
    Ok(pid)
}

/// Reports on a process's status pipe why it is executed instead of forked.
pub(super) fn excuse(pipe: &OwnedFd, error: &io::Error) {
    let text = format!("executed, not forked: {error}");
    // Without the pipe the process could not report anything either.
    let _ = pipe
        .try_clone()
        .map(File::from)
        .and_then(|mut pipe| pipe.write_all(status::encode(&Status::Note { text }).as_bytes()));
}
