//! Two ends of a connection in one process, without Python.
#![cfg(not(feature = "python"))]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use _comm::completions::Completions;
use _comm::listener::Listener;
use _comm::outbox::Frame;
use _comm::{Connection, Ending, Engine, Receipt, Route, Settings, Submitted};
use nix::poll::{PollFd, PollFlags, poll};

#[path = "engine/strangers.rs"]
mod strangers;

const PATIENCE: Duration = Duration::from_secs(60);

struct End {
    connection: Arc<Connection>,
    completions: Arc<Completions>,
}

const ROUTES: [Route; 4] = [Route::Auto, Route::Mapped, Route::Copied, Route::Socket];

fn settings(route: Route) -> Settings {
    Settings { route, ..Settings::new("here") }
}

fn wait<T>(completions: &Completions, mut ready: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < until, "nothing happens");
        let mut events = [PollFd::new(completions.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut events, 10_u16);
        completions.take();
    }
}

struct Place {
    directory: tempfile::TempDir,
    listener: Arc<Listener>,
    completions: Arc<Completions>,
}

impl Place {
    fn new(settings: Settings) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixListener::bind(directory.path().join("socket")).unwrap();
        socket.set_nonblocking(true).unwrap();
        let completions = Arc::new(Completions::new().unwrap());
        let engine = Engine::of_this_process().unwrap();
        let listener = engine.listen(socket.into(), settings, &completions);
        Self { directory, listener, completions }
    }

    fn stream(&self) -> UnixStream {
        let stream = UnixStream::connect(self.directory.path().join("socket")).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }

    fn connect(&self, settings: Settings) -> End {
        let completions = Arc::new(Completions::new().unwrap());
        let engine = Engine::of_this_process().unwrap();
        let connection = engine.connect(self.stream().into(), settings, &completions);
        End { connection, completions }
    }

    fn accept(&self) -> End {
        let connection = wait(&self.completions, || self.listener.accept().pop());
        End { connection, completions: Arc::clone(&self.completions) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.listener.close();
    }
}

fn pair(route: Route) -> [End; 2] {
    let place = Place::new(settings(route));
    let ours = place.connect(settings(route));
    let theirs = place.accept();
    wait(&ours.completions, || ours.connection.is_open().unwrap().then_some(()));
    let copies = matches!(route, Route::Auto | Route::Copied);
    let maps = matches!(route, Route::Auto | Route::Mapped);
    assert_eq!(ours.connection.routes(), (copies, copies, maps));
    [ours, theirs]
}

impl End {
    #[allow(unsafe_code)]
    fn submit(&self, frames: &[Vec<u8>]) -> Result<Submitted, Ending> {
        let frames: Vec<Frame> = frames
            .iter()
            .map(|frame| {
                let address = frame.as_ptr().expose_provenance();
                Frame { address, len: frame.len(), apart: frame.len() % 2 == 0 }
            })
            .collect();
        // SAFETY: all callers keep the frames until the message is done or the end has settled.
        unsafe { self.connection.submit(&frames) }
    }

    fn send(&self, frames: &[Vec<u8>]) {
        if let Submitted::Pending(number) = self.submit(frames).unwrap() {
            wait(&self.completions, || self.connection.is_done(number).then_some(()));
            assert!(!self.connection.is_lost(number));
        }
    }

    fn receive(&self) -> Result<Vec<Vec<u8>>, Ending> {
        wait(&self.completions, || self.connection.receive().transpose()).map(contents)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.connection.abort();
        self.connection.settle();
    }
}

fn contents(mut receipt: Receipt) -> Vec<Vec<u8>> {
    let frames = receipt.frames.clone();
    let frame = |(block, start, len): (usize, usize, usize)| {
        receipt.blocks[block].bytes_mut()[start..start + len].to_vec()
    };
    frames.into_iter().map(frame).collect()
}

/// Frames of any size, from a seed.
fn message(seed: u64) -> Vec<Vec<u8>> {
    let mut chance = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move |below: u64| {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        usize::try_from(chance % below).unwrap()
    };
    let sizes = [0, 1, 3_000, 5_000, 40_000, 70_000, 2_000_000];
    let frames = 0..next(6);
    let each = frames.map(|_| {
        let (len, first) = (sizes[next(7)] + next(9), next(251));
        (0..len).map(|at| u8::try_from((first + at) % 251).unwrap()).collect()
    });
    each.collect()
}

#[test]
fn messages_arrive_as_sent_in_both_directions_at_once() {
    let messages = std::env::var("MESSAGES").map_or(60, |count| count.parse().unwrap());
    for route in ROUTES {
        let ends = pair(route);
        std::thread::scope(|scope| {
            for end in &ends {
                // Both have events of one place, of which any thread may take those of the other.
                scope.spawn(move || (0..messages).for_each(|seed| end.send(&message(seed))));
                scope.spawn(move || {
                    for seed in 0..messages {
                        assert!(end.receive().unwrap() == message(seed), "message {seed}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_writer_waits_for_a_reader_that_is_behind_and_nothing_is_lost() {
    let [ours, theirs] = pair(Route::Socket);
    let frames = [vec![7; 10 << 20]];
    let mut pending = 0;
    let mut numbers = Vec::new();
    for _ in 0..30 {
        if let Submitted::Pending(number) = ours.submit(&frames).unwrap() {
            pending += 1;
            numbers.push(number);
        }
    }
    assert!(pending > 0);
    std::thread::sleep(Duration::from_millis(200));
    assert!(numbers.iter().any(|number| !ours.connection.is_done(*number)), "all at once");
    for _ in 0..30 {
        assert!(theirs.receive().unwrap() == frames);
    }
    wait(&ours.completions, || ours.connection.is_flushed().then_some(()));
}

#[test]
fn a_sender_that_ends_has_sent_whole_messages_only() {
    for turn in 0..200_u64 {
        let [ours, theirs] = pair(ROUTES[usize::try_from(turn % 4).unwrap()]);
        let mut frames = [vec![1; 4 << 20]];
        let _ = ours.submit(&frames).unwrap();
        std::thread::sleep(Duration::from_micros(turn * 7));
        ours.connection.abort();
        ours.connection.settle();
        // From now on they are somebody else's.
        frames[0].fill(2);
        match theirs.receive() {
            Ok(message) => assert!(message[0].iter().all(|byte| *byte == 1), "turn {turn}"),
            Err(ending) => assert!(
                matches!(&ending, Ending::Closed | Ending::Broken(_)),
                "turn {turn}: {ending}"
            ),
        }
    }
}

#[test]
fn a_peer_that_says_nothing_or_nonsense_is_given_up() {
    let greeting = Duration::from_millis(50);
    let place = Place::new(Settings { greeting, ..settings(Route::Auto) });
    let mut silent = place.stream();
    let mut stranger = place.stream();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // The listener's own hello, if it has heard anything, and then the end.
    for (stream, told) in [(&mut silent, 0), (&mut stranger, _comm::greeting::HELLO)] {
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut hello = Vec::new();
        let _ = stream.read_to_end(&mut hello);
        assert_eq!(hello.len(), told);
    }
    assert!(place.listener.accept().is_empty());
}

#[test]
fn over_a_network_ends_with_different_secrets_know_why_they_part() {
    let secret = |byte| Settings { secret: Some([byte; 32]), ..settings(Route::Auto) };
    let engine = Engine::of_this_process().unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    socket.set_nonblocking(true).unwrap();
    let completions = Arc::new(Completions::new().unwrap());
    let listener = engine.listen(socket.into(), secret(1), &completions);
    let connect = |settings| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let completions = Arc::new(Completions::new().unwrap());
        let connection = engine.connect(stream.into(), settings, &completions);
        End { connection, completions }
    };
    let ours = connect(secret(2));
    let ending = wait(&ours.completions, || ours.connection.is_open().err());
    assert_eq!(ending, Ending::Refused("the peer has another secret".to_owned()));
    let ours = connect(settings(Route::Auto));
    let ending = wait(&ours.completions, || ours.connection.is_open().err());
    let text = "the peer has a secret, and this process has none";
    assert_eq!(ending, Ending::Refused(text.to_owned()));
    assert!(listener.accept().is_empty());
    let ours = connect(secret(1));
    wait(&ours.completions, || ours.connection.is_open().unwrap().then_some(()));
    listener.close();
}

#[test]
fn a_process_of_the_same_user_needs_no_secret() {
    let place = Place::new(Settings { secret: Some([1; 32]), ..settings(Route::Auto) });
    let ours = place.connect(settings(Route::Auto));
    wait(&ours.completions, || ours.connection.is_open().unwrap().then_some(()));
}
