//! A listener on loopback, where every user of the machine can connect.
//!
//! *Invariant:* connections that have not sent a whole request hold at most a share of the
//! descriptors that this process may have, and each for a limited time.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;

/// Longest time until a connection's first request is there.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// Connections without a request at a time, at most, and what share of the descriptors.
const MOST: usize = 1024;
const SHARE: u64 = 8;

/// Ends the header of a request.
const END: &[u8] = b"\r\n\r\n";

/// Accepts connections, and drops those that are too many.
#[derive(Debug)]
pub(super) struct Patient {
    listener: TcpListener,
    /// Connections without a request.
    waiting: Arc<AtomicUsize>,
    most: usize,
}

impl Patient {
    pub(super) fn new(listener: TcpListener) -> Self {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        let most = usize::try_from(descriptors / SHARE).unwrap_or(MOST).min(MOST);
        Self { listener, waiting: Arc::default(), most }
    }
}

impl axum::serve::Listener for Patient {
    type Io = Visitor;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = axum::serve::Listener::accept(&mut self.listener).await;
            let place = Place::take(&self.waiting);
            if self.waiting.load(Ordering::Relaxed) > self.most {
                continue;
            }
            let deadline = Box::pin(tokio::time::sleep(REQUEST_WITHIN));
            let waits = Some(Waits { deadline, seen: 0, _place: place });
            return (Visitor { stream, waits }, address);
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// One of the connections that are counted.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection whose first request is not there yet.
#[derive(Debug)]
struct Waits {
    deadline: Pin<Box<Sleep>>,
    /// How much of [`END`] the last bytes were.
    seen: usize,
    _place: Place,
}

impl Waits {
    /// Whether the header's end is among the next bytes.
    fn ends(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().any(|byte| {
            self.seen = match byte {
                byte if *byte == END[self.seen] => self.seen + 1,
                b'\r' => 1,
                _ => 0,
            };
            self.seen == END.len()
        })
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Visitor {
    stream: TcpStream,
    waits: Option<Waits>,
}

impl AsyncRead for Visitor {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(waits) = &mut this.waits
            && waits.deadline.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let done = Pin::new(&mut this.stream).poll_read(context, buffer);
        if let Some(waits) = &mut this.waits
            && waits.ends(&buffer.filled()[before..])
        {
            this.waits = None;
        }
        done
    }
}

impl AsyncWrite for Visitor {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_header_is_found_in_whatever_pieces_it_comes() {
        let place = || Place::take(&Arc::default());
        let ends = |pieces: &[&[u8]]| {
            let deadline = Box::pin(tokio::time::sleep(REQUEST_WITHIN));
            let mut waits = Waits { deadline, seen: 0, _place: place() };
            pieces.iter().any(|piece| waits.ends(piece))
        };
        assert!(ends(&[b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]));
        assert!(ends(&[b"x\r", b"\n\r", b"\n"]));
        assert!(ends(&[b"x\r\r\n\r\n"]));
        assert!(!ends(&[b"GET / HTTP/1.1\r\nhost: x\r\n"]));
        assert!(!ends(&[b"\r\n\rx\n"]));
    }

    #[tokio::test]
    async fn too_many_that_say_nothing_are_dropped_and_their_places_are_free_when_they_go() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut patient = Patient { listener, waiting: Arc::default(), most: 2 };
        let mut callers = Vec::new();
        for _ in 0..4 {
            callers.push(TcpStream::connect(address).await.expect("a connection"));
        }
        let first = axum::serve::Listener::accept(&mut patient).await;
        let second = axum::serve::Listener::accept(&mut patient).await;
        let third = axum::serve::Listener::accept(&mut patient);
        tokio::select! {
            biased;
            _ = third => panic!("there is no place for it"),
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
        }
        assert_eq!(patient.waiting.load(Ordering::Relaxed), 2);
        drop((first, second));
        assert_eq!(patient.waiting.load(Ordering::Relaxed), 0);
        callers.push(TcpStream::connect(address).await.expect("a connection"));
        axum::serve::Listener::accept(&mut patient).await;
    }
}
