//! The UCX layer against the installed libucp: two workers on one thread.

#![cfg(feature = "cli")]
#![allow(unsafe_code)]

mod libucp;

use std::collections::BTreeSet;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Once;
use std::time::{Duration, Instant};

use cuda_cluster::ucx::{
    Buffer, Library, Payload, Protocol, Setting, Sleeper, UcpContext, UcpEndpoint, UcpWorker,
    environment,
};

/// A context of this process, with the variables that its workers set for themselves.
fn context() -> UcpContext {
    static VARIABLES: Once = Once::new();
    VARIABLES.call_once(|| {
        for Setting { name, value } in environment::defaults(None) {
            // SAFETY: no test calls UCX, the only C code here that reads the environment, before
            // this is done.
            unsafe { std::env::set_var(format!("UCX_{name}"), value) };
        }
    });
    let library = Library::open(libucp::named().as_deref()).expect("libucp is installed");
    UcpContext::new(&library, &[Setting::new("NET_DEVICES", "lo")]).expect("UCX starts")
}

/// Two workers, and the endpoints from the first to the second and back.
struct Pair {
    there: UcpEndpoint<&'static str>,
    back: UcpEndpoint<&'static str>,
    a: UcpWorker<&'static str>,
    b: UcpWorker<&'static str>,
}

impl Pair {
    fn new() -> Self {
        let a = UcpWorker::new(&context()).expect("a worker");
        let b = UcpWorker::new(&context()).expect("a worker");
        let there = a.connect(&b.address().expect("an address")).expect("an endpoint");
        let back = b.connect(&a.address().expect("an address")).expect("an endpoint");
        Self { there, back, a, b }
    }

    /// Lets both make progress until `done` returns something.
    fn until<T>(&self, mut done: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(120) {
            self.a.progress();
            self.b.progress();
            if let Some(result) = done() {
                return result;
            }
        }
        panic!("nothing came within two minutes");
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    // In blocks, because byte by byte it takes minutes under valgrind.
    let block: Vec<u8> = (0..=250).collect();
    let mut pattern = block.repeat(bytes.div_ceil(block.len()));
    pattern.truncate(bytes);
    pattern
}

#[test]
fn messages_of_every_size_arrive_whole_with_their_header() {
    let pair = Pair::new();
    for bytes in [0usize, 1, 8, 100, 8 << 10, 64 << 10, (1 << 20) + 3, 8 << 20] {
        for protocol in [Protocol::Auto, Protocol::Eager, Protocol::Rendezvous] {
            pair.there
                .send(b"header", Payload::from(pattern(bytes)), protocol, "sends")
                .expect("a short header");
            let arrival = pair.until(|| pair.b.next_arrival());
            assert_eq!(arrival.header(), b"header");
            assert_eq!(arrival.len(), bytes);
            arrival.receive(Buffer::from(vec![0; bytes]), "receives").expect("it fits");
            let mut done = pair.until(|| pair.b.next_completion());
            assert_eq!((*done.purpose(), done.result()), ("receives", Ok(())));
            let buffer = done.take_payload().into_owned().expect("the buffer comes back");
            assert_eq!(buffer.host(), Some(&pattern(bytes)[..]), "{bytes} {protocol:?}");
            let done = pair.until(|| pair.a.next_completion());
            assert_eq!((*done.purpose(), done.result()), ("sends", Ok(())));
        }
    }
}

#[test]
fn every_libucp_of_this_machine_does_the_same() {
    libucp::each(&[
        "messages_of_every_size_arrive_whole_with_their_header",
        "a_connection_shows_its_lanes",
        "a_closed_peer_gives_every_buffer_back",
    ]);
}

#[test]
fn a_context_knows_the_transports_of_this_machine() {
    let resources = context().resources().expect("memory for the text");
    for resource in ["self/memory", "tcp/lo"] {
        assert!(resources.iter().any(|one| one.starts_with(resource)), "{resources:?}");
    }
    assert!(cuda_cluster::ucx::lane_transports(&resources).contains(&"tcp"));
}

#[test]
fn a_connection_shows_its_lanes() {
    let pair = Pair::new();
    pair.there.send(b"x", Payload::Empty, Protocol::Auto, "sends").expect("a short header");
    pair.until(|| pair.b.next_arrival());
    pair.back.send(b"x", Payload::Empty, Protocol::Auto, "sends").expect("a short header");
    pair.until(|| pair.a.next_arrival());
    let lanes = pair.there.lanes().expect("memory for the text");
    println!("{}\n{lanes:?}", pair.there.description().expect("memory for the text"));
    assert!(lanes.iter().any(|lane| lane.contains("/memory")), "{lanes:?}");
}

#[test]
fn a_receive_that_has_not_begun_keeps_its_worker_awake() {
    let pair = Pair::new();
    pair.there
        .send(b"x", Payload::from(pattern(1 << 20)), Protocol::Rendezvous, "sends")
        .expect("a short header");
    let arrival = pair.until(|| pair.b.next_arrival());
    arrival.receive(Buffer::from(vec![0; 1 << 20]), "receives").expect("it fits");
    assert!(!pair.b.arm().expect("UCX can be asked"));
    assert_eq!(pair.b.operations_in_flight(), 1);
    pair.until(|| pair.b.next_completion());
    pair.until(|| pair.a.next_completion());
}

#[test]
fn a_closed_peer_gives_every_buffer_back() {
    let pair = Pair::new();
    pair.there.send(b"x", Payload::Empty, Protocol::Auto, "sends").expect("a short header");
    pair.until(|| pair.b.next_arrival());
    pair.until(|| pair.a.next_completion());
    let Pair { there, back, a, b } = pair;
    for _ in 0..3 {
        there
            .send(b"x", Payload::from(pattern(1 << 20)), Protocol::Rendezvous, "sends")
            .expect("a short header");
    }
    drop(there);
    let start = Instant::now();
    let mut ended = Vec::new();
    while ended.len() < 3 && start.elapsed() < Duration::from_secs(120) {
        a.progress();
        b.progress();
        ended.extend(std::iter::from_fn(|| a.next_completion()));
    }
    assert_eq!(ended.len(), 3);
    for mut completion in ended {
        assert!(completion.result().is_err(), "{completion:?}");
        assert_eq!(completion.take_payload().buffer().map(Buffer::len), Some(1 << 20));
    }
    drop(back);
}

/// The abstract sockets of this process.
fn abstract_sockets() -> BTreeSet<String> {
    let own = |inode: &str| {
        let entries = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
        let mut targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.any(|target| target.to_string_lossy() == format!("socket:[{inode}]"))
    };
    let table = std::fs::read_to_string("/proc/net/unix").expect("sockets");
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|fields| fields.len() > 7 && own(fields[6]));
    named.filter_map(|fields| Some(fields[7].strip_prefix('@')?.to_owned())).collect()
}

#[test]
fn datagrams_of_strangers_wake_a_worker_and_do_nothing_else() {
    // In a process of its own: a worker of another test may be about to be made.
    if libucp::named().is_none() {
        return libucp::each(&["datagrams_of_strangers_wake_a_worker_and_do_nothing_else"]);
    }
    let before = abstract_sockets();
    // One with a connection, and one that nobody has used yet: UCX treats their sockets differently.
    let pair = Pair::new();
    let idle = UcpWorker::<&str>::new(&context()).expect("a worker");
    pair.there.send(b"x", Payload::Empty, Protocol::Auto, "sends").expect("a short header");
    pair.until(|| pair.b.next_arrival());
    let sleeper = Sleeper::new().expect("an event");
    let stranger = UnixDatagram::unbound().expect("a socket");
    stranger.set_nonblocking(true).expect("its mode");
    let sockets: Vec<SocketAddr> = (&abstract_sockets() - &before)
        .iter()
        .map(|name| SocketAddr::from_abstract_name(name).expect("a name"))
        .collect();
    assert!(sockets.len() >= 3, "each worker has one: {sockets:?}");
    let long = [0; 4000];
    for sent in [&b""[..], b"x", &long, b""] {
        for socket in &sockets {
            for _ in 0..20 {
                // A queue is full soon.
                let _ = stranger.send_to_addr(sent, socket);
            }
        }
        for worker in [&pair.a, &pair.b, &idle] {
            for _ in 0..30 {
                worker.progress();
                let limit = Some(Duration::from_millis(1));
                sleeper.sleep(worker, limit, || false).expect("UCX goes on");
            }
            assert!(worker.arm().expect("UCX goes on"), "it can sleep when nothing comes");
        }
    }
    pair.there.send(b"x", Payload::Empty, Protocol::Auto, "sends").expect("a short header");
    pair.until(|| pair.b.next_arrival());
}
