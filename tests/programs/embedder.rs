//! A program that owns clusters in each way that the embedded API offers, and checks what it is
//! told. The first argument is the way; a failed check is a panic.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::time::Duration;

use cuda_cluster::cluster::{
    self, Builder, ClientError, Cluster, ClusterPhase, ControlError, Escalation, Handle,
    LaunchFailure, Outcome, Stream,
};
use cuda_cluster::ids::ClusterName;
use cuda_cluster::plan::Plan;
use cuda_cluster::topology;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid, fork};

fn main() -> ExitCode {
    if let Some(code) = cluster::dispatch() {
        return code;
    }
    let way = std::env::args().nth(1).unwrap_or_default();
    let runtime = tokio::runtime::Runtime::new().expect("an event loop");
    match way.as_str() {
        "blocking" => blocking(),
        "blocking-in-tokio" => runtime.block_on(async { blocking() }),
        "again" => runtime.block_on(again()),
        "taken" => runtime.block_on(taken()),
        "stopped" => runtime.block_on(stopped()),
        "silent" => runtime.block_on(silent()),
        "later" => runtime.block_on(later()),
        "forked" => forked(),
        "killed" => runtime.block_on(killed()),
        "not-ready" => runtime.block_on(not_ready()),
        "detached" => runtime.block_on(detached()),
        "stored" => runtime.block_on(stored()),
        "topology" => runtime.block_on(named_topology()),
        "run" => runtime.block_on(run()),
        "unverified" => runtime.block_on(unverified()),
        "verified" => runtime.block_on(verified()),
        "dask" => runtime.block_on(dask(&std::env::args().nth(2).expect("a Python"))),
        "client" => runtime.block_on(client()),
        other => panic!("{other:?} is no way"),
    }
    println!("done");
    ExitCode::SUCCESS
}

fn simulated() -> Builder {
    let machine = topology::parse(topology::builtin("dgx-1-v100").expect("built in"));
    Cluster::builder().simulate(machine.expect("a topology")).workers(1)
}

fn name(text: &str) -> ClusterName {
    text.parse().expect("a name")
}

/// Each call, and twice the same name: `drop` waits.
fn blocking() {
    for _ in 0..2 {
        let cluster = simulated().name(name("b")).launch_blocking().expect("READY");
        assert_eq!(cluster.state().expect("told").workers.len(), 1);
        assert!(cluster.verify().expect("asked").pairs.is_empty(), "there is no other worker");
        let unknown = cluster.restart("gpu7").expect_err("there is none");
        assert!(unknown.to_string().contains("gpu7"), "{unknown}");
        drop(cluster);
    }
    let cluster = simulated().name(name("b")).launch_blocking().expect("READY");
    let handle = cluster.handle().clone();
    let mut events = cluster.events().expect("told");
    let stopper = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().expect("an event loop");
        runtime.block_on(handle.stop(Escalation::Graceful, Duration::from_secs(60)))
    });
    let last = events.by_ref().last().expect("an end").expect("told");
    assert_eq!(last.outcome(), Some(Outcome::Stopped { degraded: None }));
    assert_eq!(cluster.wait().expect("told"), Outcome::Stopped { degraded: None });
    stopper.join().expect("no panic").expect("it ends");
}

/// The same name at once after `stop`, and after `drop`, which does not wait.
async fn again() {
    let launch = || simulated().name(name("again")).launch();
    launch().await.expect("READY").stop().await;
    drop(launch().await.expect("READY"));
    drop(launch().await.expect("READY"));
    launch().await.expect("READY").stop().await;
}

async fn taken() {
    let cluster = simulated().name(name("t")).launch().await.expect("READY");
    let refused = simulated().name(name("t")).launch().await.expect_err("taken");
    let LaunchFailure::NameTaken { name, path } = &refused else { panic!("{refused:?}") };
    assert_eq!((name.as_str(), path.as_path()), ("t", cluster.paths().root()));
    let hint = refused.hint().expect("a hint");
    assert!(hint.contains("'name'") && !hint.contains("--"), "{hint}");
    cluster.stop().await;
}

/// Another handle of the same cluster stops it, and the owner learns that.
async fn stopped() {
    let cluster = simulated().launch().await.expect("READY");
    let other = Handle::attach(cluster.name()).expect("it runs");
    assert_eq!(other.plan().await.expect("told").name, *cluster.name());
    let (outcome, stopped) =
        tokio::join!(cluster.wait(), other.stop(Escalation::Graceful, Duration::from_secs(60)));
    stopped.expect("it ends");
    assert_eq!(outcome, Outcome::Stopped { degraded: None });
    // Asked again, an ended cluster answers the same.
    assert_eq!(cluster.wait().await, outcome);
    Handle::attach(cluster.name()).expect_err("it has ended");
}

/// A cluster whose supervisor is stopped has ended, too, when its owner has stopped it.
async fn silent() {
    let cluster = simulated().launch().await.expect("READY");
    let state = cluster.state().await.expect("told");
    let supervisor = Pid::from_raw(state.supervisor_pid.cast_signed());
    kill(supervisor, Signal::SIGSTOP).expect("it lives");
    cluster.stop().await;
    kill(supervisor, None).expect_err("it has ended");
}

/// A handle of a cluster that has ended leaves a later one of its name alone.
async fn later() {
    let launch = || simulated().name(name("later")).launch();
    let first = launch().await.expect("READY");
    let old = first.handle().clone();
    let mut events = old.events().await.expect("told");
    first.stop().await;
    let second = launch().await.expect("READY");
    let replaced = [
        old.state().await.map(drop),
        old.plan().await.map(drop),
        old.events().await.map(drop),
        old.restart("gpu0").await,
        old.scale(0).await,
    ];
    for result in replaced {
        let error = result.expect_err("it has ended");
        assert!(matches!(error, ControlError::Replaced { .. }), "{error:?}");
    }
    assert!(matches!(old.client(), Err(ClientError::Gone)));
    assert!(matches!(old.wait().await, Outcome::Stopped { .. }));
    old.kill(Duration::from_secs(60)).await.expect("it has ended");
    let mut last = None;
    while let Some(record) = events.next().await.expect("told") {
        last = Some(record);
    }
    assert!(matches!(last.and_then(|last| last.outcome()), Some(Outcome::Stopped { .. })));
    let state = second.state().await.expect("told");
    assert_eq!((state.state, state.workers[0].restarts), (ClusterPhase::Ready, 0));
    for none in ["gpu0?x=1", "%67pu0", "a/b", "gpu 0", ""] {
        let refused = second.restart(none).await.expect_err("no process has that name");
        let ControlError::Refused { message, .. } = refused else { panic!("{refused:?}") };
        assert!(!message.is_empty(), "{none}");
    }
    second.stop().await;
}

/// This process ends, and a child that it has forked holds all its descriptors.
#[allow(unsafe_code, clippy::exit, reason = "a fork, and an end without any clean-up")]
fn forked() {
    let cluster = simulated().name(name("forked")).launch_blocking().expect("READY");
    // SAFETY: the child calls only what is safe in a process that had several threads.
    match unsafe { fork() }.expect("forked") {
        // SAFETY: these take numbers, and nobody uses the descriptors in the child.
        ForkResult::Child => unsafe {
            for standard in 0..3 {
                libc::close(standard);
            }
            libc::alarm(120);
            libc::pause();
            libc::_exit(0)
        },
        ForkResult::Parent { child } => {
            std::mem::forget(cluster);
            println!("{child}");
            std::process::exit(0);
        }
    }
}

/// The supervisor is killed: events and `wait` tell the cause even so.
async fn killed() {
    let cluster = simulated().launch().await.expect("READY");
    let mut events = cluster.events().await.expect("told");
    let supervisor = cluster.state().await.expect("told").supervisor_pid;
    kill(Pid::from_raw(supervisor.try_into().expect("a pid")), Signal::SIGKILL).expect("killed");
    let Outcome::Failed(cause) = cluster.wait().await else { panic!("it did not fail") };
    assert!(cause.text.contains("ended without a word"), "{cause}");
    let mut last = None;
    while let Some(record) = events.next().await.expect("told") {
        last = Some(record);
    }
    assert_eq!(last.and_then(|last| last.outcome()), Some(Outcome::Failed(cause)));
}

/// A start that fails leaves no run directory of a name that nobody chose.
async fn not_ready() {
    let failure = simulated().set("supervision.ready_within", "1ms").launch().await;
    let failure = failure.expect_err("nothing is READY within a millisecond");
    assert!(matches!(failure, LaunchFailure::NotReady { late: true, .. }), "{failure:?}");
    let wrong = simulated().set("supervision.grac", "1s").launch().await.expect_err("no key");
    assert!(wrong.to_string().contains("builder: supervision.grac"), "{wrong}");
    let wrong = simulated().set("workers", "many").launch().await.expect_err("no number");
    assert!(wrong.to_string().contains("builder: workers"), "{wrong}");
}

async fn detached() {
    let handle = simulated().name(name("free")).launch_detached().await.expect("READY");
    assert_eq!(handle.state().await.expect("told").workers.len(), 1);
}

async fn stored() {
    let plan = simulated().plan().expect("a plan");
    let plan = Plan::parse(&serde_json::to_string(&plan).expect("JSON")).expect("the same");
    let stored = || Cluster::builder().stored_plan(plan.clone());
    let cluster = stored().name(name("stored")).launch().await.expect("READY");
    assert_eq!((cluster.plan().workers.len(), cluster.name().as_str()), (1, "stored"));
    cluster.stop().await;
    let refused = stored().workers(2).launch().await.expect_err("it is decided");
    assert!(matches!(&refused, LaunchFailure::Planned { key } if key == "workers"), "{refused:?}");
    let mut edited = plan.clone();
    edited.workers[0].name = "../../elsewhere".to_owned();
    let refused = Cluster::builder().stored_plan(edited).launch().await.expect_err("no name");
    assert!(refused.to_string().contains("workers[0].name"), "{refused}");
}

/// What the builder was told before a spec stays, unless the spec says otherwise.
async fn named_topology() {
    let text = "version: 1\ntopology: dgx-1-v100\nsimulate: true\nthreads: 2\n";
    let spec = cuda_cluster::spec::parse(text, "test").expect("a spec");
    let wanted = Cluster::builder().workers(2).set("threads", 7).spec(spec.clone());
    let cluster = wanted.launch().await.expect("READY");
    assert_eq!(cluster.plan().machine.name.as_deref(), Some("dgx-1-v100"));
    let threads: Vec<u32> = cluster.plan().workers.iter().map(|worker| worker.threads).collect();
    assert_eq!(threads, [2, 2]);
    cluster.stop().await;
    let supervised = Cluster::builder().set("supervision.limit", 7).workers(3);
    let supervised = supervised.set("supervision", serde_json::json!({ "grace": "2s" }));
    let spec_of = supervised.set("workers", ()).request().expect("right").spec;
    assert_eq!((spec_of.supervision.limit, spec_of.workers), (Some(7), Some(3)));
    assert!(spec_of.supervision.grace.is_some());
    for (key, wrong) in [("version", 2.0), ("device.memory_limit", f64::NAN)] {
        let wrong = Cluster::builder().set(key, wrong).request().expect_err(key);
        assert!(wrong.to_string().contains(&format!("builder: {key}")), "{wrong}");
    }
    let missing = Cluster::builder().spec(spec).set("topology", "dgx-one").plan();
    let missing = missing.expect_err("no such machine");
    assert!(matches!(missing, LaunchFailure::Topology { .. }), "{missing:?}");
    assert!(missing.hint().is_some_and(|hint| hint.contains("dgx-1-v100")), "{missing:?}");
}

/// Every ordered pair of workers is measured before READY.
/// Data that moves over TCP where shared memory is expected takes the cluster down.
async fn unverified() {
    let slow = simulated().workers(2).set("verify", true);
    let slow = slow.set("ucx.env", serde_json::json!({"UCX_TLS": "tcp,self"}));
    let failure = slow.name(name("slow")).launch().await.expect_err("it is not as planned");
    let LaunchFailure::Unverified { objections } = &failure else { panic!("{failure:?}") };
    assert_eq!(objections.len(), 2, "both ways: {objections:?}");
    assert!(objections.iter().all(|one| one.contains("shared memory expected")), "{objections:?}");
    assert!(failure.to_string().contains("the verification failed"), "{failure}");
    assert!(cluster::find(Some(&name("slow"))).is_err(), "it was taken down");
}

async fn verified() {
    let cluster = simulated().workers(3).set("verify", true).launch().await.expect("READY");
    let proof = cluster.verification().expect("it was verified");
    assert_eq!((proof.pairs.len(), proof.objections().count()), (6, 0));
    assert!(proof.pairs.iter().all(|pair| pair.gb_per_s.is_some_and(|rate| rate > 0.0)));
    let again = cluster.handle().verify().await.expect("measured again");
    assert_eq!((again.pairs.len(), again.objections().count()), (6, 0));
    assert!(again.pairs.iter().all(|pair| pair.latency_us.is_some()));
    cluster.stop().await;
    let unasked = simulated().launch().await.expect("READY");
    assert!(unasked.verification().is_none());
    unasked.stop().await;
}

/// Dask's workers are measured like native ones; ranks of the command engine can't be.
async fn dask(python: &str) {
    let wanted = simulated().workers(2).set("engine", "dask").set("dask.python", python);
    let cluster = wanted.set("dask.protocol", "tcp").launch().await.expect("READY");
    let measured = cluster.handle().verify().await.expect("measured");
    assert_eq!((measured.pairs.len(), measured.objections().count()), (2, 0), "{measured:?}");
    assert!(measured.pairs.iter().all(|pair| pair.gb_per_s.is_some_and(|rate| rate > 0.0)));
    cluster.stop().await;
    let command = simulated().set("engine", "command");
    let command = command.set("command.argv", ["sleep", "1000"]).launch().await.expect("READY");
    let refused = command.handle().verify().await.expect_err("nobody to ask");
    assert!(refused.to_string().contains("runs the command engine"), "{refused}");
    assert!(refused.hint().is_some_and(|hint| hint.contains("native and Dask")), "{refused:?}");
    command.stop().await;
}

async fn run() {
    let (sender, written) = std::sync::mpsc::channel();
    let script = ["sh", "-c", "echo out $RANK; echo err >&2; exit $((RANK * 3))"];
    let ended = simulated().workers(2).run(script, move |written| {
        let _ = sender.send((written.source, written.bytes.to_vec()));
    });
    let ended = ended.await.expect("it starts");
    assert!(matches!(ended.outcome, Outcome::Failed(_)), "{ended:?}");
    assert_eq!(ended.exits[1].and_then(|exit| exit.code), Some(3), "{ended:?}");
    let of = |rank, stream| {
        move |(source, _): &&(cluster::Source, Vec<u8>)| {
            source.rank == rank && source.stream == stream
        }
    };
    let written: Vec<_> = written.into_iter().collect();
    let text = |rank, stream| {
        let bytes: Vec<u8> =
            written.iter().filter(of(rank, stream)).flat_map(|(_, bytes)| bytes.clone()).collect();
        String::from_utf8(bytes).expect("text")
    };
    assert_eq!(text(1, Stream::Output), "out 1\n");
    assert_eq!(text(1, Stream::Error), "err\n");
    let good = simulated().workers(2).run(["true"], |_| ()).await.expect("it starts");
    assert_eq!(good.outcome, Outcome::Finished);
    assert!(good.exits.iter().all(|exit| exit.is_some_and(|exit| exit.code == Some(0))));
}

/// Many tasks at a time on one thread, which none of them blocks.
async fn client() {
    let cluster = simulated().launch().await.expect("READY");
    let client = cluster.client().expect("the scheduler answers");
    let slow = client.submit("sleep", &600_000_000u64, &[]).expect("submitted");
    let limit = Duration::from_millis(50);
    tokio::time::timeout(limit, slow.wait_async()).await.expect_err("it sleeps");
    let timed_out = slow.wait_within(limit).expect_err("it sleeps");
    assert!(matches!(timed_out, ClientError::TimedOut { within } if within == limit));
    for outputs in [0, 4097] {
        let refused = client.task("sleep").outputs(outputs).submit_all().expect_err("so many");
        assert!(matches!(refused, ClientError::Outputs { limit: 4096, .. }), "{refused:?}");
    }
    let none = client.counters("gpu7").expect_err("there is none");
    assert_eq!(none.to_string(), "there is no worker gpu7");
    let queued = client.submit("sleep", &0u64, &[]).expect("submitted");
    // The only thread of the only worker is busy until the first task is cancelled.
    slow.cancel().expect("asked");
    queued.wait_async().await.expect("the worker is free");
    // What nobody holds any more is not computed to its end.
    drop(client.submit("sleep", &600_000_000u64, &[]).expect("submitted"));
    let numbers: Vec<f32> = (0..50_000u16).map(f32::from).collect();
    let stored = client.put_numbers(&numbers).expect("put");
    assert_eq!(stored.numbers_async::<f32>().await.expect("there"), numbers);
    let values: Vec<_> = (1..=3u64).map(|n| client.put_value(&n).expect("put")).collect();
    let sum = client.submit("sum", &(), &values.iter().collect::<Vec<_>>()).expect("submitted");
    assert_eq!(sum.value_async::<u64>().await.expect("computed"), 6);
    let mut came = client.as_completed(values);
    while let Some(value) = came.next_async().await {
        value.wait_async().await.expect("there");
    }
    cluster.stop().await;
}
