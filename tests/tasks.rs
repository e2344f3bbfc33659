//! Objects and tasks on real processes: a client, a scheduler, and workers.
#![allow(unsafe_code)]

mod native;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use cuda_cluster::cluster::{Client, ClientError, CudaParameter, CudaTask, Kernel, Remote, Scalar};
use cuda_cluster::wire::native::{
    Answer, Challenge, ToClient, ToScheduler, Welcome, answer_proof, decode, encode,
};
use cuda_cluster::wire::tasks::{News, ObjectId, Product, Request, TaskError};
use native::Cluster;

fn cluster(workers: usize) -> (Cluster, Client) {
    let mut cluster = Cluster::start(workers);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    (cluster, client)
}

#[test]
fn thousands_of_tasks_complete_and_leave_nothing_behind() {
    let (mut cluster, client) = cluster(2);
    let tasks = client.map("noop", 0..5000u32).expect("submitted");
    client.wait(&tasks).expect("done");
    let finished: u64 =
        client.overview().expect("told").workers.iter().map(|worker| worker.finished).sum();
    assert_eq!(finished, 5000);
    drop(tasks);
    let start = std::time::Instant::now();
    while client.overview().expect("told").tasks > 0 {
        assert!(start.elapsed() < native::PATIENCE, "released tasks are remembered");
    }
    cluster.stop();
}

#[test]
fn chains_and_fans_compute_what_they_should() {
    let (mut cluster, client) = cluster(3);
    let one = client.put(&[1]).expect("put");
    let mut chain = one;
    for _ in 0..200 {
        chain = client.submit("sum", &(), &[&chain, &chain]).expect("submitted");
    }
    // Two to the power of 200, in 64 bits.
    assert_eq!(chain.value::<u64>().expect("computed"), 0);
    let leaves: Vec<Remote> = (0..100u8).map(|n| client.put(&[n]).expect("put")).collect();
    let all: Vec<&Remote> = leaves.iter().collect();
    let sum = client.submit("sum", &(), &all).expect("submitted");
    assert_eq!(sum.value::<u64>().expect("computed"), 4950);
    cluster.stop();
}

#[test]
fn large_objects_go_round_and_come_back() {
    let (mut cluster, client) = cluster(2);
    let content: Vec<u8> = (0..3_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    let put = client.put(&content).expect("put");
    assert_eq!(put.bytes().expect("there"), content);
    put.replicate(2).expect("asked");
    let start = std::time::Instant::now();
    while put.places().expect("there").len() < 2 {
        assert!(start.elapsed() < native::PATIENCE, "no copy is made");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let links = client.overview().expect("told").links;
    assert_eq!(links.iter().map(|link| link.bytes).sum::<u64>(), 3_000_000, "{links:?}");
    cluster.stop();
}

#[test]
fn an_error_names_its_worker_and_reaches_what_depends_on_it() {
    let (mut cluster, client) = cluster(2);
    let put = client.put(&[0xff; 3]).expect("put");
    let bad = client.task("sum").inputs(&[&put]).on("gpu1").submit().expect("submitted");
    let after = client.submit("sum", &(), &[&bad]).expect("submitted");
    for remote in [&bad, &after] {
        let Err(ClientError::Task(TaskError::Failed { task, worker, .. })) = remote.wait() else {
            panic!("{:?}", remote.wait())
        };
        assert_eq!((task, worker.as_str()), (bad.id(), "gpu1"));
    }
    let unknown = client.submit("no such thing", &(), &[]).expect("submitted");
    let error = unknown.wait().expect_err("there is none").to_string();
    assert!(error.contains("no function \"no such thing\""), "{error}");
    cluster.stop();
}

#[test]
fn a_cancelled_task_and_its_dependents_do_not_run() {
    let (mut cluster, client) = cluster(1);
    let slow = client.submit("sleep", &3_000_000u64, &[]).expect("submitted");
    let next = client.submit("sleep", &1u64, &[&slow]).expect("submitted");
    let last = client.submit("sleep", &1u64, &[&next]).expect("submitted");
    next.cancel().expect("asked");
    for remote in [&next, &last] {
        let error = remote.wait().expect_err("cancelled");
        assert!(matches!(error, ClientError::Task(TaskError::Cancelled { .. })), "{error}");
    }
    slow.wait().expect("it runs on");
    assert!(client.explain(slow.id()).expect("told").contains("gpu0 was chosen"));
    cluster.stop();
}

#[test]
fn results_come_as_they_are_completed() {
    let (mut cluster, client) = cluster(2);
    let slow = client.submit("sleep", &2_000_000u64, &[]).expect("submitted");
    let fast = client.submit("noop", &(), &[]).expect("submitted");
    let order = [fast.id(), slow.id()];
    let came: Vec<_> = client.as_completed(vec![slow, fast]).map(|remote| remote.id()).collect();
    assert_eq!(came, order);
    cluster.stop();
}

#[test]
fn a_client_that_goes_away_releases_what_it_held() {
    let (mut cluster, client) = cluster(2);
    let other = Client::connect(cluster.directory()).expect("connected");
    let kept = other.put(&[7; 100_000]).expect("put");
    let shared = client.hold(kept.id()).expect("asked");
    assert_eq!(shared.bytes().expect("held").len(), 100_000);
    let tasks = other.map("noop", 0..100u32).expect("submitted");
    other.wait(&tasks).expect("done");
    // The connection ends without a word.
    drop((kept, tasks, other));
    assert_eq!(shared.bytes().expect("still held").len(), 100_000);
    let start = std::time::Instant::now();
    while client.overview().expect("told").objects > 1 {
        assert!(start.elapsed() < native::PATIENCE, "what it held is remembered");
    }
    cluster.stop();
}

#[test]
fn a_stranger_is_refused() {
    let (mut cluster, _client) = cluster(1);
    cluster.write_secret(&"cd".repeat(32));
    let refused = Client::connect(cluster.directory());
    assert!(matches!(refused, Err(ClientError::Stranger { .. })), "{refused:?}");
    cluster.stop();
}

#[test]
fn what_can_never_run_or_fit_fails_at_once_and_says_why() {
    let mut plan = native::plan(2);
    for worker in &mut plan.workers {
        worker.device_memory_limit_bytes = Some(100_000);
    }
    plan.engine_options = serde_json::json!({"host_limit_bytes": 100_000});
    let mut cluster = Cluster::start_plan(&plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    let reason = |remote: Remote| remote.wait().expect_err("it cannot be").to_string();
    let greedy = client.task("noop").resource("GPU", 2).submit().expect("submitted");
    assert!(reason(greedy).contains("no worker that may run it has GPU=2"));
    let elsewhere = client.task("noop").on("gpu7").submit().expect("submitted");
    assert!(reason(elsewhere).contains("there is no worker gpu7"));
    let large = client.submit("matrix.chunk", &(1u64, 0u64, 0u64, 200u64), &[]).expect("submitted");
    let why = reason(large);
    assert!(why.contains("no room for 320000 bytes in device memory"), "{why}");
    // Each fits, and they do not fit together: three inputs of 80,000 bytes have to be in memory.
    let parts: Vec<Remote> = (0..3u64)
        .map(|row| client.submit("matrix.chunk", &(1u64, row, 0u64, 100u64), &[]))
        .collect::<Result<_, _>>()
        .expect("submitted");
    client.wait(&parts).expect("each fits");
    let all: Vec<&Remote> = parts.iter().collect();
    let why = reason(client.submit("table.join", &(), &all).expect("submitted"));
    assert!(why.contains("has no room: no room for 80000 bytes in"), "{why}");
    // The workers are none the worse.
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("done");
    cluster.stop();
}

#[test]
fn a_full_disk_is_the_tasks_error() {
    let mut plan = native::plan(1);
    plan.workers[0].device_memory_limit_bytes = Some(100_000);
    plan.engine_options =
        serde_json::json!({"host_limit_bytes": 100_000, "disk_limit_bytes": 100_000});
    let mut cluster = Cluster::start_plan(&plan);
    cluster.ready();
    let client = Client::connect(cluster.directory()).expect("the scheduler answers");
    let chunk = |row: u64| client.submit("matrix.chunk", &(1u64, row, 0u64, 100u64), &[]);
    let kept: Vec<Remote> = (0..4).map(|row| chunk(row).expect("submitted")).collect();
    let results: Vec<_> = kept.iter().map(Remote::wait).collect();
    let failed = results.iter().filter_map(|result| result.as_ref().err());
    let words: Vec<String> = failed.map(ToString::to_string).collect();
    assert!(!words.is_empty() && words.iter().all(|w| w.contains("no room for")), "{words:?}");
    drop(kept);
    let start = std::time::Instant::now();
    while client.overview().expect("told").objects > 0 {
        assert!(start.elapsed() < native::PATIENCE, "released objects are remembered");
    }
    chunk(9).expect("submitted").wait().expect("there is room again");
    cluster.stop();
}

#[test]
fn cuda_source_without_a_gpu_is_an_honest_error() {
    let (mut cluster, client) = cluster(1);
    let task = CudaTask {
        kernel: Kernel {
            source: "extern \"C\" __global__ void f() {}".to_owned(),
            function: "f".to_owned(),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        },
        parameters: vec![CudaParameter::Value(Scalar::F32(1.5)), CudaParameter::Output(1 << 20)],
    };
    let remote = client.submit(CudaTask::FUNCTION, &task, &[]).expect("submitted");
    let error = remote.wait().expect_err("there is no GPU").to_string();
    assert!(error.contains("simulated GPU 0 is no GPU: it cannot run CUDA C++"), "{error}");
    cluster.stop();
}

/// A connection that has proven itself, for messages that no client of ours sends.
fn raw(directory: &Path) -> UnixStream {
    let text = std::fs::read_to_string(directory.join("secret")).expect("a file");
    let secret = text.parse().expect("a secret");
    let mut stream = UnixStream::connect(directory.join("scheduler.sock")).expect("it listens");
    let challenge: Challenge = receive(&mut stream);
    let nonce = [7; 32];
    let proof = answer_proof(&secret, &challenge, &nonce);
    stream.write_all(&encode(&Answer { nonce, proof }).expect("short")).expect("it listens");
    let _: Welcome = receive(&mut stream);
    stream
}

fn receive<T: serde::de::DeserializeOwned>(stream: &mut UnixStream) -> T {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).expect("a frame");
    let mut bytes = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut bytes).expect("a frame");
    decode(&bytes).expect("the expected message")
}

#[test]
fn a_malformed_frame_ends_its_connection_and_no_other() {
    let (mut cluster, client) = cluster(1);
    let mut stream = raw(cluster.directory());
    stream.write_all(&[3, 0, 0, 0, 255, 255, 255]).expect("it listens");
    // The connection is closed from the other side.
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    let mut stream = raw(cluster.directory());
    stream.write_all(&u32::MAX.to_le_bytes()).expect("it listens");
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("others go on");
    let log = cluster.log("scheduler");
    assert_eq!(log.matches("the other side does not speak our language").count(), 2, "{log}");
    cluster.stop();
}

#[test]
fn a_client_that_does_not_read_does_not_make_the_scheduler_grow() {
    let (mut cluster, client) = cluster(1);
    let mut stream = raw(cluster.directory());
    let send = |stream: &mut UnixStream, requests: Vec<Request>| {
        stream.write_all(&encode(&ToScheduler::Ask(requests)).expect("short"))
    };
    send(&mut stream, vec![]).expect("it listens");
    let ToClient::News(news) = receive(&mut stream) else { panic!("another message") };
    let News::Hello { client: number } = news[0] else { panic!("{news:?}") };
    let object = ObjectId::new(number, 0);
    let put = Request::Put { object, product: Product::Inline(vec![1; 1000]), on: None };
    send(&mut stream, vec![put]).expect("it listens");
    // Each question of a few bytes is answered with a thousand.
    stream.set_write_timeout(Some(Duration::from_secs(3))).expect("a time");
    let questions = vec![Request::Locate { object }; 20_000];
    let asked = (0..500).take_while(|_| send(&mut stream, questions.clone()).is_ok()).count();
    assert!(asked < 500, "whoever does not read is heard all the same");
    let resident = cluster.resident_bytes("scheduler");
    println!("{asked} frames were taken, and {} MB are resident", resident / 1_000_000);
    assert!(resident < 600_000_000, "{resident}");
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("others go on");
    drop(stream);
    cluster.stop();
}

#[test]
fn another_version_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("secret"), "0123456789abcdef".repeat(4)).expect("a file");
    let listener = UnixListener::bind(directory.path().join("scheduler.sock")).expect("a socket");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let challenge = Challenge { version: 99, nonce: [1; 32] };
        stream.write_all(&encode(&challenge).expect("short")).expect("it reads");
    });
    let error = Client::connect(directory.path()).expect_err("of another version").to_string();
    assert!(error.contains("speaks version 99"), "{error}");
    server.join().expect("it spoke");
}
