//! Transfers between data planes, several of which run in this one process.

#![cfg(feature = "cli")]
#![allow(unsafe_code)]

mod libucp;

use std::sync::Once;
use std::time::Duration;

use cuda_cluster::cuda::Device;
use cuda_cluster::native::plane::{Opening, Plane, Report, Target, TransferError};
use cuda_cluster::ucx::{
    Buffer, HEADER_LIMIT, Library, Payload, Protocol, Setting, UcpContext, UcpWorker,
    WorkerAddress, environment,
};
use cuda_cluster::wire::native::ToWorker;
use cuda_cluster::wire::peer::{HEADER_LENGTHS, Hello, Member};
use cuda_cluster::wire::secret::Secret;
use proptest::prelude::*;
use tokio::sync::mpsc::UnboundedReceiver;

/// Longest wait for anything; a test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(120);

fn set_variables() {
    static VARIABLES: Once = Once::new();
    VARIABLES.call_once(|| {
        for Setting { name, value } in environment::defaults(None) {
            // SAFETY: no test calls UCX, the only C code here that reads the environment, before
            // this is done.
            unsafe { std::env::set_var(format!("UCX_{name}"), value) };
        }
    });
}

/// Data planes that are connected to each other.
struct Mesh {
    members: Vec<Member>,
    planes: Vec<Plane>,
    /// Sealed, as the scheduler sends them.
    addresses: Vec<Vec<u8>>,
    reports: Vec<UnboundedReceiver<Report>>,
}

impl Mesh {
    async fn new(planes: u64, bytes_in_flight: u64) -> Self {
        set_variables();
        let mut mesh = Self { members: vec![], planes: vec![], addresses: vec![], reports: vec![] };
        let mut addresses = Vec::new();
        for i in 0..planes {
            let me = Member { name: format!("gpu{i}"), incarnation: 100 + i };
            let opening = Opening {
                library: libucp::named(),
                settings: vec![Setting::new("NET_DEVICES", "lo")],
                device: Some(Device::simulated(format!("simulated GPU {i}"), 1 << 30)),
                bytes_in_flight,
            };
            let (plane, mut reports) =
                Plane::spawn(me.clone(), Secret::new([5; 32]), opening).expect("a thread");
            let Some(Report::Open { address, .. }) = reports.recv().await else {
                panic!("{:?}", plane.stop())
            };
            addresses.push((me.clone(), address.clone()));
            mesh.addresses.push(address);
            mesh.members.push(me);
            mesh.planes.push(plane);
            mesh.reports.push(reports);
        }
        for (me, plane) in mesh.members.iter().zip(&mesh.planes) {
            let others = addresses.iter().filter(|(member, _)| member != me);
            let names = others.clone().map(|(member, _)| member.name.clone()).collect();
            plane.notify(ToWorker::Expect { names });
            for (member, address) in others.cloned() {
                plane.notify(ToWorker::Peer { member, address });
            }
        }
        for reports in &mut mesh.reports {
            let ready = tokio::time::timeout(PATIENCE, reports.recv()).await;
            assert!(matches!(ready, Ok(Some(Report::Ready(_)))), "{ready:?}");
        }
        mesh
    }

    fn stop(&self) {
        for plane in &self.planes {
            plane.stop().expect("UCX worked to the end");
        }
    }
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    // In blocks, because byte by byte it takes minutes under valgrind.
    let block: Vec<u8> = (0..=250).collect();
    let mut pattern = block.repeat(bytes.div_ceil(block.len()) + 1);
    pattern.drain(..(seed % 251) as usize);
    pattern.truncate(bytes);
    pattern
}

fn run(test: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        tokio::time::timeout(Duration::from_secs(300), test).await.expect("no hang");
    });
}

#[test]
fn objects_of_every_size_come_whole_into_every_kind_of_memory() {
    run(async {
        let mesh = Mesh::new(2, 0).await;
        for bytes in [0usize, 1, 100, 8 << 10, 64 << 10, (1 << 20) + 7, 16 << 20] {
            let name = format!("object of {bytes}");
            mesh.planes[1].put(&name, pattern(bytes as u64, bytes));
            let into = Buffer::from(vec![0xff; bytes + 10]);
            for target in [Target::Host, Target::Device, Target::Into(into)] {
                for checked in [false, true] {
                    let target = match &target {
                        Target::Host => Target::Host,
                        Target::Device => Target::Device,
                        Target::Into(_) => Target::Into(Buffer::from(vec![0xff; bytes + 10])),
                    };
                    let fetched = mesh.planes[0].get("gpu1", &name, target, checked).await;
                    let fetched = fetched.expect("it is there");
                    assert_eq!(fetched.length, bytes);
                    let host = fetched.buffer.host().expect("simulated");
                    assert_eq!(host[..bytes], pattern(bytes as u64, bytes));
                }
            }
        }
        mesh.stop();
    });
}

#[test]
fn every_libucp_of_this_machine_does_the_same() {
    libucp::each(&[
        "objects_of_every_size_come_whole_into_every_kind_of_memory",
        "what_is_not_there_is_said",
        "messages_come_back",
        "a_stranger_with_the_address_but_not_the_secret_gets_nothing_and_harms_nothing",
    ]);
}

#[test]
fn what_is_not_there_is_said() {
    run(async {
        let mesh = Mesh::new(2, 0).await;
        let get = |peer: &str, name: &str| mesh.planes[0].get(peer, name, Target::Host, false);
        let error = get("gpu1", "nothing").await.expect_err("nothing is there");
        assert!(matches!(error, TransferError::Missing { .. }), "{error}");
        let error = get("gpu9", "nothing").await.expect_err("nobody is there");
        assert!(matches!(error, TransferError::NoPeer { .. }), "{error}");
        mesh.planes[1].put("small", vec![1; 100]);
        let short = Target::Into(Buffer::from(vec![0; 99]));
        let error = mesh.planes[0].get("gpu1", "small", short, false).await.expect_err("short");
        assert!(matches!(error, TransferError::Memory { .. }), "{error}");
        mesh.planes[1].remove("small");
        let error = get("gpu1", "small").await.expect_err("it was removed");
        assert!(matches!(error, TransferError::Missing { .. }), "{error}");
        mesh.stop();
    });
}

#[test]
fn many_transfers_at_once_keep_to_the_limit_and_all_arrive() {
    run(async {
        // Less than two of the objects at a time.
        let mesh = Mesh::new(4, 3 << 20).await;
        for (i, plane) in mesh.planes.iter().enumerate() {
            plane.put("object", pattern(i as u64, 2 << 20));
        }
        let mut transfers = Vec::new();
        for to in 0..4 {
            for from in (0..4).filter(|from| *from != to) {
                for _ in 0..8 {
                    let plane = &mesh.planes[to];
                    let peer = format!("gpu{from}");
                    transfers.push((from, plane.get(peer, "object", Target::Host, true)));
                }
            }
        }
        for (from, transfer) in transfers {
            let fetched = transfer.await.expect("it is there");
            assert_eq!(fetched.buffer.host(), Some(&pattern(from as u64, 2 << 20)[..]));
        }
        mesh.stop();
    });
}

#[test]
fn a_lost_peer_fails_its_transfers_and_no_others() {
    run(async {
        let mesh = Mesh::new(3, 0).await;
        mesh.planes[1].put("object", pattern(1, 64 << 20));
        mesh.planes[2].put("object", pattern(2, 64 << 20));
        let lost: Vec<_> =
            (0..8).map(|_| mesh.planes[0].get("gpu1", "object", Target::Host, false)).collect();
        let kept = mesh.planes[0].get("gpu2", "object", Target::Host, true);
        mesh.planes[0].notify(ToWorker::Lost { member: mesh.members[1].clone(), left: false });
        let mut failed = 0;
        for transfer in lost {
            match transfer.await {
                Ok(_) => {}
                Err(TransferError::PeerLost { .. } | TransferError::NoPeer { .. }) => failed += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(failed > 0);
        let fetched = kept.await.expect("its peer lives");
        assert_eq!(fetched.buffer.host(), Some(&pattern(2, 64 << 20)[..]));
        mesh.stop();
    });
}

#[test]
fn the_end_of_the_data_plane_answers_every_transfer() {
    run(async {
        let mesh = Mesh::new(2, 0).await;
        mesh.planes[1].put("object", pattern(1, 64 << 20));
        let transfers: Vec<_> =
            (0..4).map(|_| mesh.planes[0].get("gpu1", "object", Target::Host, false)).collect();
        mesh.stop();
        for transfer in transfers {
            match transfer.await {
                Ok(_) | Err(TransferError::Ended) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let error = mesh.planes[0].echo("gpu1").await.expect_err("it has ended");
        assert!(matches!(error, TransferError::Ended), "{error}");
    });
}

#[test]
fn messages_come_back() {
    run(async {
        let mesh = Mesh::new(2, 0).await;
        let began = std::time::Instant::now();
        const ECHOES: u32 = 2000;
        for _ in 0..ECHOES {
            mesh.planes[0].echo("gpu1").await.expect("its peer lives");
        }
        println!("{:?} one way through the async API", began.elapsed() / (2 * ECHOES));
        tokio::time::sleep(Duration::from_millis(200)).await;
        let began = std::time::Instant::now();
        mesh.planes[0].echo("gpu1").await.expect("its peer lives");
        println!("{:?} there and back after idle", began.elapsed());
        mesh.stop();
    });
}

#[test]
fn a_stranger_with_the_address_but_not_the_secret_gets_nothing_and_harms_nothing() {
    run(async {
        let mesh = Mesh::new(2, 0).await;
        mesh.planes[1].put("object", pattern(1, 1 << 20));
        let address = mesh.addresses[1].clone();
        let stranger = std::thread::spawn(move || strange(&address));
        let mut echoes = 0;
        while !stranger.is_finished() {
            mesh.planes[0].echo("gpu1").await.expect("strangers do not matter");
            echoes += 1;
        }
        let answers = stranger.join().expect("the stranger got through its list");
        assert_eq!(answers, 0);
        assert!(echoes > 0);
        let fetched = mesh.planes[0].get("gpu1", "object", Target::Host, true).await;
        assert_eq!(fetched.expect("it is there").buffer.host(), Some(&pattern(1, 1 << 20)[..]));
        mesh.stop();
    });
}

/// Sends everything that a stranger might try to a worker; returns the number of messages that come
/// back.
fn strange(address: &[u8]) -> usize {
    // Only the seal is removed: anyone on the machine could have seen the rest.
    let key = Secret::new([5; 32]).key("worker address");
    let address = WorkerAddress::open(address, &key).expect("sealed by the mesh");
    let library = Library::open(libucp::named().as_deref()).expect("libucp is installed");
    let settings = [Setting::new("NET_DEVICES", "lo")];
    let context = UcpContext::new(&library, &settings).expect("UCX starts");
    let worker = UcpWorker::<()>::new(&context).expect("a worker");
    let endpoint = worker.connect(&address).expect("an endpoint");
    let (short, long) = HEADER_LENGTHS;
    let mut headers = vec![vec![], vec![0; HEADER_LIMIT], vec![0xff; short], vec![0xff; long]];
    // Every kind of message, well-formed, with a forged token.
    let forged = |kind: u8| {
        let mut header = vec![0; short];
        header[short - 1] = kind;
        header
    };
    headers.extend((0..=16).map(forged));
    let hello = Hello { from: Member { name: "gpu0".to_owned(), incarnation: 100 } };
    let payloads = [vec![], hello.encode(), vec![0xff; 600], vec![0xff; 64 << 10]];
    let mut answers = 0;
    for round in 0..200 {
        for header in &headers {
            for payload in &payloads {
                let protocol = if round % 2 == 0 { Protocol::Eager } else { Protocol::Rendezvous };
                endpoint
                    .send(header, Payload::from(payload.clone()), protocol, ())
                    .expect("a short header");
            }
            while worker.operations_in_flight() > 1000 {
                worker.progress();
            }
            worker.progress();
            answers += std::iter::from_fn(|| worker.next_arrival()).count();
            while worker.next_completion().is_some() {}
        }
    }
    let huge = Payload::from(vec![0; 256 << 20]);
    endpoint.send(&forged(6), huge, Protocol::Rendezvous, ()).expect("a short header");
    while worker.operations_in_flight() > 0 {
        worker.progress();
        while worker.next_completion().is_some() {}
    }
    answers + std::iter::from_fn(|| worker.next_arrival()).count()
}

/// What happens to one transfer of the property test.
#[derive(Clone, Debug)]
struct Step {
    from: usize,
    to: usize,
    object: usize,
    target: u8,
    checked: bool,
    /// `None` waits for the object; otherwise the future is dropped after this many microseconds.
    dropped_after: Option<u64>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0usize..3, 1usize..3, 0usize..5, 0u8..3, any::<bool>(), any::<bool>(), 0u64..3000)
        .prop_map(|(to, other, object, target, checked, dropped, after)| Step {
            from: (to + other) % 3,
            to,
            object,
            target,
            checked,
            dropped_after: dropped.then_some(after),
        });
    proptest::collection::vec(step, 1..60)
}

const SIZES: [usize; 5] = [10, 5_000, 100_000, 1 << 20, 5 << 20];

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 6, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Futures are dropped at every point of a transfer while others run; those that are awaited
    /// get exactly their bytes, and memory is not written to after it was returned.
    #[test]
    fn dropped_futures_harm_nobody(steps in steps()) {
        run(async {
            let mesh = Mesh::new(3, 4 << 20).await;
            for (i, plane) in mesh.planes.iter().enumerate() {
                for (object, size) in SIZES.into_iter().enumerate() {
                    plane.put(object.to_string(), pattern((i * 7 + object) as u64, size));
                }
            }
            let mut running = tokio::task::JoinSet::new();
            for step in steps {
                let plane = mesh.planes[step.to].clone();
                running.spawn(async move {
                    let size = SIZES[step.object];
                    let target = match step.target {
                        0 => Target::Host,
                        1 => Target::Device,
                        _ => Target::Into(Buffer::from(vec![0; size])),
                    };
                    let peer = format!("gpu{}", step.from);
                    let transfer = plane.get(peer, step.object.to_string(), target, step.checked);
                    if let Some(after) = step.dropped_after {
                        let _ = tokio::time::timeout(Duration::from_micros(after), transfer).await;
                        return;
                    }
                    let fetched = transfer.await.expect("it is there");
                    let expected = pattern((step.from * 7 + step.object) as u64, size);
                    assert_eq!(fetched.buffer.host(), Some(&expected[..]));
                });
            }
            while let Some(done) = running.join_next().await {
                done.expect("no assertion failed");
            }
            // Afterwards everything still works.
            for plane in &mesh.planes[1..] {
                plane.get("gpu0", "3", Target::Host, true).await.expect("it is there");
            }
            mesh.stop();
        });
    }
}
