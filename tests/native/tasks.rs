//! Objects and tasks on real processes: a client, a scheduler, and workers.

use crate::cluster;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use crate::cluster::Cluster;
use cuda_cluster::cluster::{Client, ClientError, CudaParameter, CudaTask, Kernel, Remote, Scalar};
use cuda_cluster::os::run_directory::Paths;
use cuda_cluster::plan::{EnginePlan, NativePlan};
use cuda_cluster::wire::frame::{decode, encode};
use cuda_cluster::wire::greeting::{Challenge, Role, Welcome};
use cuda_cluster::wire::native::{FromClient, Registration, ToClient};
use cuda_cluster::wire::peer::Member;
use cuda_cluster::wire::tasks::{News, ObjectId, Product, Request, TaskError};

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
        assert!(start.elapsed() < cluster::PATIENCE, "released tasks are remembered");
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
    // 2²⁰⁰, modulo 2⁶⁴.
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
    while put.locations().expect("there").len() < 2 {
        assert!(start.elapsed() < cluster::PATIENCE, "no copy is made");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let links = client.overview().expect("told").links;
    assert_eq!(links.iter().map(|link| link.bytes).sum::<u64>(), 3_000_000, "{links:?}");
    cluster.stop();
}

#[test]
fn the_last_tasks_are_told_with_their_times_and_the_bytes_that_came_for_them() {
    let (mut cluster, client) = cluster(2);
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let micros = || u64::try_from(now().expect("after 1970").as_micros()).expect("small");
    let before = micros();
    let made = client.put(&[7; 1_000_000]).expect("put");
    let there = made.locations().expect("there");
    let other = if there == ["gpu0"] { "gpu1" } else { "gpu0" };
    let sum = client.task("sum").inputs(&[&made]).on(other).submit().expect("submitted");
    // Its input has no whole number of words, or it has: what it says does not matter here.
    let _ = sum.wait();
    let slow = client.submit("sleep", &20_000u64, &[]).expect("submitted");
    slow.wait().expect("done");
    let told = client.recent(0).expect("told");
    assert_eq!((told.tasks.len(), told.ran, told.next), (2, 2, 2), "{told:?}");
    let (sum_ran, slow_ran) = (told.tasks[0], told.tasks[1]);
    let name = |place: u32| told.workers[place as usize].as_str();
    assert_eq!((sum_ran.task, name(sum_ran.worker)), (sum.id(), other));
    assert_eq!(sum_ran.ran.fetched_bytes, 1_000_000);
    assert_eq!((slow_ran.task, slow_ran.ran.fetched_bytes), (slow.id(), 0));
    assert_eq!(told.functions[slow_ran.function as usize], "sleep");
    assert!(slow_ran.ran.micros >= 20_000, "{slow_ran:?}");
    for one in [sum_ran, slow_ran] {
        assert!(one.ran.at >= before, "{one:?}");
        assert!(one.ran.at + one.ran.micros <= micros(), "{one:?}");
    }
    assert_eq!(client.recent(told.next).expect("told").tasks, []);
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
fn a_value_of_another_type_is_an_error_and_no_other_value() {
    let (mut cluster, client) = cluster(1);
    // `sleep` takes a number; four characters must not be read as four microseconds.
    let text = client.submit("sleep", &"text", &[]).expect("submitted");
    let why = text.wait().expect_err("a text is not a number").to_string();
    assert!(why.contains("the value is not of type u64"), "{why}");
    let one = client.put(&[1]).expect("put");
    let two = client.submit("sum", &(), &[&one, &one]).expect("submitted");
    let why = two.value::<String>().expect_err("a number is not a text").to_string();
    assert!(why.contains("the value is not of type alloc::string::String"), "{why}");
    assert_eq!(two.value::<u64>().expect("that is what it is"), 2);
    let more = client.put(&[1, 2]).expect("put");
    let why = more.value::<u64>().expect_err("two numbers are no number").to_string();
    assert!(why.contains("1 byte"), "{why}");
    let sum = client.submit("sum", &(), &[&more]).expect("submitted");
    assert!(sum.wait().is_err(), "a function takes what is left over for nothing");
    client.submit("noop", &(), &[]).expect("submitted").value::<()>().expect("nothing");
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
    // The connection ends without a message.
    drop((kept, tasks, other));
    assert_eq!(shared.bytes().expect("still held").len(), 100_000);
    let start = std::time::Instant::now();
    while client.overview().expect("told").objects > 1 {
        assert!(start.elapsed() < cluster::PATIENCE, "what it held is remembered");
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
    let mut plan = cluster::plan(2);
    for worker in &mut plan.workers {
        worker.device_memory_limit_bytes = Some(100_000);
    }
    plan.engine =
        EnginePlan::Native(NativePlan { host_limit_bytes: Some(100_000), ..NativePlan::default() });
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
    // Each of them fits, but not all together: three inputs of 80,000 bytes must be in memory.
    let parts: Vec<Remote> = (0..3u64)
        .map(|row| client.submit("matrix.chunk", &(1u64, row, 0u64, 100u64), &[]))
        .collect::<Result<_, _>>()
        .expect("submitted");
    client.wait(&parts).expect("each fits");
    let all: Vec<&Remote> = parts.iter().collect();
    let why = reason(client.submit("table.join", &(), &all).expect("submitted"));
    assert!(why.contains("has no room: no room for 80000 bytes in"), "{why}");
    // The workers are unharmed.
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("done");
    cluster.stop();
}

#[test]
fn a_full_disk_is_the_tasks_error() {
    let mut plan = cluster::plan(1);
    plan.workers[0].device_memory_limit_bytes = Some(100_000);
    plan.engine = EnginePlan::Native(NativePlan {
        host_limit_bytes: Some(100_000),
        disk_limit_bytes: Some(100_000),
        ..NativePlan::default()
    });
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
        assert!(start.elapsed() < cluster::PATIENCE, "released objects are remembered");
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
    assert!(error.contains("simulated GPU 0 is not a GPU: it cannot run CUDA C++"), "{error}");
    cluster.stop();
}

/// An authenticated connection, for messages that our clients never send; `None` if the process
/// refuses one of this role.
fn raw(directory: &Path, process: &str, role: Role) -> Option<UnixStream> {
    let secret = Paths::at(directory).read_secret().expect("a secret");
    let mut stream = UnixStream::connect(Paths::at(directory).socket(process)).expect("it listens");
    let challenge: Challenge = receive(&mut stream).expect("a challenge");
    let answer = challenge.answer(&secret, role, [7; 32]);
    stream.write_all(&encode(&answer).expect("short")).expect("it listens");
    let welcome: Welcome = receive(&mut stream)?;
    assert!(welcome.is_proven(&secret, &challenge, &answer), "a listener that knows the secret");
    Some(stream)
}

/// The next frame's message; `None` if the connection is closed.
fn receive<T: serde::de::DeserializeOwned>(stream: &mut UnixStream) -> Option<T> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut bytes).expect("a whole frame");
    Some(decode(&bytes).expect("the expected message"))
}

fn client_connection(cluster: &Cluster) -> UnixStream {
    raw(cluster.directory(), "scheduler", Role::Client).expect("clients are taken")
}

#[test]
fn a_malformed_frame_ends_its_connection_and_no_other() {
    let (mut cluster, client) = cluster(1);
    let mut stream = client_connection(&cluster);
    stream.write_all(&[3, 0, 0, 0, 255, 255, 255]).expect("it listens");
    // The connection is closed from the other side.
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    let mut stream = client_connection(&cluster);
    stream.write_all(&u32::MAX.to_le_bytes()).expect("it listens");
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("others go on");
    let log = cluster.log("scheduler");
    assert_eq!(
        log.matches("the other side sent a message that cannot be decoded").count(),
        2,
        "{log}"
    );
    cluster.stop();
}

#[test]
fn nobody_sends_what_only_another_role_may() {
    let (mut cluster, client) = cluster(1);
    // A client that registers a worker.
    let mut stream = client_connection(&cluster);
    let member = Member { name: "gpu0".to_owned(), incarnation: 9 };
    let registration = Registration { member, address: vec![0; 40] };
    stream.write_all(&encode(&registration).expect("short")).expect("it listens");
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    // A worker that submits a task instead of registering.
    let directory = cluster.directory();
    let mut stream = raw(directory, "scheduler", Role::Worker).expect("workers are taken");
    let questions = FromClient::Ask(vec![Request::Overview; 3]);
    stream.write_all(&encode(&questions).expect("short")).expect("it listens");
    stream.read_to_end(&mut Vec::new()).expect("it ends in good order");
    // A client at a worker's socket, and a bulk connection at the scheduler's.
    assert!(raw(directory, "gpu0", Role::Client).is_none(), "a worker takes a client");
    assert!(raw(directory, "gpu0", Role::Worker).is_none(), "a worker takes a worker");
    assert!(raw(directory, "scheduler", Role::Bulk).is_none(), "the scheduler takes bulk");
    assert!(raw(directory, "gpu0", Role::Bulk).is_some(), "a worker takes no bulk");
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("others go on");
    assert_eq!(client.overview().expect("told").workers.len(), 1);
    let log = cluster.log("scheduler");
    assert_eq!(log.matches("worker registers").count(), 1, "{log}");
    assert_eq!(
        log.matches("the other side sent a message that cannot be decoded").count(),
        2,
        "{log}"
    );
    assert!(log.contains("this socket takes no bulk connections"), "{log}");
    let log = cluster.log("gpu0");
    assert!(log.contains("this socket takes no client connections"), "{log}");
    cluster.stop();
}

/// How often each thread that sends a client's requests has waited.
fn waits_of_senders() -> BTreeMap<OsString, String> {
    let threads = std::fs::read_dir("/proc/self/task").expect("this process's threads").flatten();
    let senders = threads.filter_map(|thread| {
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(thread.path().join("comm")).ok()?;
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let waits = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        (name.trim() == "client-out").then(|| (thread.file_name(), waits.to_owned()))
    });
    senders.collect()
}

#[test]
fn an_idle_client_wakes_nobody() {
    let (mut cluster, client) = cluster(1);
    client.submit("noop", &(), &[]).expect("submitted").wait().expect("done");
    // Clients of other tests in this process may be working, and this one's last wait may begin late.
    let sleeps = || {
        let before = waits_of_senders();
        std::thread::sleep(Duration::from_secs(1));
        let after = waits_of_senders();
        before.iter().any(|(thread, waits)| after.get(thread) == Some(waits))
    };
    assert!((0..3).any(|_| sleeps()), "{:?}", waits_of_senders());
    drop(client);
    cluster.stop();
}

#[test]
fn a_client_that_does_not_read_does_not_make_the_scheduler_grow() {
    let (mut cluster, client) = cluster(1);
    let mut stream = client_connection(&cluster);
    let send = |stream: &mut UnixStream, requests: Vec<Request>| {
        stream.write_all(&encode(&FromClient::Ask(requests)).expect("short"))
    };
    let Some(ToClient::News(news)) = receive(&mut stream) else { panic!("another message") };
    let News::Hello { client: number } = news[0] else { panic!("{news:?}") };
    let object = ObjectId::new(number, 0);
    let put = Request::Put { object, product: Product::Inline(vec![1; 1000]), on: None };
    send(&mut stream, vec![put]).expect("it listens");
    // Each request of a few bytes gets an answer of a thousand.
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
