//! One story for each rule by which a wait is followed: what the kernel and libraries show, and the
//! verdict.
#![allow(missing_docs)]

mod apart;

use cuda_cluster_why::evidence::{
    Call, Connection, CpuLimit, End, Evidence, Frame, Group, Holder, Locked, NAMED_PIPE, Process,
    Rank, State, Thread, Waits,
};
use cuda_cluster_why::judge;
use cuda_cluster_why::verdict::{Kind, Standing, Verdict};

const MINUTE_MS: u64 = 60_000;

/// Frames, the innermost first: the file and the function of each.
fn frames(of: &[(&str, &str)]) -> Vec<Frame> {
    let frame = |(file, function): &(&str, &str)| Frame {
        function: (*function).to_owned(),
        file: (*file).to_owned(),
        line: 1,
        code: None,
    };
    of.iter().map(frame).collect()
}

/// A thread that has waited so for a minute.
fn waits(waits: Waits, of: &[(&str, &str)]) -> Thread {
    let call = Call { name: "call".to_owned(), waits, left_ms: None };
    Thread {
        call: Some(call),
        asleep_for_ms: Some(MINUTE_MS),
        same_frames: true,
        frames: frames(of),
        ..Thread::default()
    }
}

fn lock(timed: bool) -> Waits {
    Waits::Lock { address: 1, shared: false, timed, holder: None, sharers: None }
}

fn sleeps(left_ms: u64) -> Thread {
    waits(Waits::Time { left_ms: Some(left_ms) }, &[("/job/train.py", "pause")])
}

fn reads(end: End) -> Thread {
    waits(Waits::Descriptor { end, writes: false }, &[("/job/train.py", "load")])
}

fn barrier() -> Thread {
    waits(Waits::Unknown, &[("/job/team.py", "barrier"), ("/job/train.py", "main")])
}

/// A job of which each rank has one process with these threads; rank `n` is process `100 * (n + 1)`.
fn job(ranks: Vec<Vec<Thread>>) -> Evidence {
    let mut job = Evidence { interval_ms: 400, ..Evidence::default() };
    for (number, threads) in (0..).zip(ranks) {
        let (name, pid) = (format!("gpu{number}"), 100 * (number + 1));
        job.ranks.push(Rank { name: name.clone(), pid: Some(pid), ..Rank::default() });
        job.processes.push(process(pid, 1, &name, threads));
    }
    job
}

fn process(pid: u32, parent: u32, rank: &str, threads: Vec<Thread>) -> Process {
    let threads = (pid..).zip(threads).map(|(tid, thread)| Thread {
        tid,
        name: "python".to_owned(),
        ..thread
    });
    Process {
        pid,
        parent,
        rank: rank.to_owned(),
        name: "python".to_owned(),
        threads: threads.collect(),
        ..Process::default()
    }
}

/// One rank is in a barrier, the other one, process 200, does this.
fn odd(threads: Vec<Thread>) -> Evidence {
    job(vec![vec![barrier()], threads])
}

/// The same with a child of it, process 300.
fn with_child(threads: Vec<Thread>, child: Vec<Thread>) -> Evidence {
    let mut job = odd(threads);
    job.processes.push(process(300, 200, "gpu1", child));
    job
}

fn told(job: &Evidence) -> (Standing, Option<Kind>, String) {
    let Verdict { standing, cause, odd, .. } = judge(job);
    (standing, cause, odd.join(" "))
}

fn text(job: &Evidence) -> String {
    judge(job).text
}

fn gpu1(standing: Standing, kind: Kind) -> (Standing, Option<Kind>, String) {
    (standing, Some(kind), "gpu1".to_owned())
}

fn stream(remote: &str, peer: Option<(u32, Option<&str>)>) -> Connection {
    let holder = |(pid, rank): (u32, Option<&str>)| Holder { pid, rank: rank.map(str::to_owned) };
    Connection {
        local: "10.0.0.1:4000".to_owned(),
        remote: remote.to_owned(),
        peer: peer.map(holder),
        ..Connection::default()
    }
}

#[test]
fn a_process_that_is_stopped_for_a_moment_is_no_stall() {
    let stopped = |millis| {
        let main = Thread { asleep_for_ms: Some(millis), ..barrier() };
        let mut job = odd(vec![main]);
        job.processes[1].state = State::Stopped;
        told(&job)
    };
    assert_eq!(stopped(1_500), gpu1(Standing::Waiting, Kind::Stopped));
    assert_eq!(stopped(6_000), gpu1(Standing::Stalled, Kind::Stopped));
}

#[test]
fn who_may_be_woken_by_a_child_that_sleeps_for_a_moment_is_no_stall() {
    let woken = |left_ms| with_child(vec![reads(End::Event)], vec![sleeps(left_ms)]);
    assert_eq!(told(&woken(4_000)), gpu1(Standing::Waiting, Kind::Idle));
    assert!(text(&woken(4_000)).contains("while its process 300 (python) sleeps for another 4 s"));
    assert_eq!(told(&woken(3_600_000)), gpu1(Standing::Stalled, Kind::Idle));
    assert_eq!(told(&odd(vec![reads(End::Event)])), gpu1(Standing::Stalled, Kind::Idle));
    let works = Thread { state: State::Running, cpu_ms: 300, ..Thread::default() };
    let by_thread = odd(vec![reads(End::Event), works]);
    assert_eq!(told(&by_thread), gpu1(Standing::Waiting, Kind::Idle));
}

#[test]
fn a_wait_that_nothing_explains_is_no_verdict_unless_somebody_may_end_it() {
    let signal = || waits(Waits::Unknown, &[("/job/train.py", "main")]);
    assert_eq!(told(&odd(vec![signal()])).0, Standing::CannotTell);
    assert_eq!(told(&with_child(vec![signal()], vec![sleeps(900)])).0, Standing::Waiting);
    let changes = odd(vec![reads(End::Changes)]);
    assert_eq!(told(&changes), gpu1(Standing::CannotTell, Kind::Unknown));
}

#[test]
fn what_anybody_may_send_is_waited_for_and_no_stall() {
    let datagrams = odd(vec![reads(End::Other("socket".to_owned()))]);
    assert_eq!(told(&datagrams), gpu1(Standing::Waiting, Kind::Idle));
    let (path, filesystem) = ("/dev/ttyUSB0".to_owned(), Some("devtmpfs".to_owned()));
    let instrument = odd(vec![reads(End::File { path, filesystem })]);
    assert_eq!(told(&instrument), gpu1(Standing::Waiting, Kind::Outside));
}

#[test]
fn the_end_of_a_child_is_waited_for_through_its_descriptor_too() {
    let own = with_child(vec![reads(End::Process { pid: 300 })], vec![sleeps(3_600_000)]);
    assert_eq!(told(&own), gpu1(Standing::Stalled, Kind::Sleeps));
}

#[test]
fn a_server_elsewhere_may_be_slow_and_one_of_its_own_is_not() {
    let asks = |connection| {
        let mut job = odd(vec![reads(End::Connection(0))]);
        job.processes[1].connections = vec![connection];
        told(&job)
    };
    let elsewhere = asks(stream("10.0.0.2:443", None));
    assert_eq!(elsewhere, gpu1(Standing::Waiting, Kind::Outside));
    let other = asks(stream("127.0.0.1:80", Some((7, None))));
    assert_eq!(other, gpu1(Standing::Waiting, Kind::Outside), "a process that is not of the job");
    let own = asks(stream("127.0.0.1:80", Some((200, Some("gpu1")))));
    assert_eq!(own, gpu1(Standing::Stalled, Kind::Outside));
}

#[test]
fn bytes_that_are_not_acknowledged_are_a_lost_network_unless_more_are_written() {
    let sent = |moved_bytes, peer| {
        let mut job = odd(vec![reads(End::Connection(0))]);
        job.processes[1].moved_bytes = moved_bytes;
        let connection = Connection { unsent_bytes: 6, ..stream("10.0.0.2:9000", peer) };
        job.processes[1].connections = vec![connection];
        job
    };
    assert_eq!(told(&sent(0, None)), gpu1(Standing::Stalled, Kind::Network));
    assert!(text(&sent(0, None)).contains("has not acknowledged 6 bytes"));
    assert_eq!(told(&sent(100, None)), gpu1(Standing::Waiting, Kind::Outside));
    let unread = sent(0, Some((100, Some("gpu0"))));
    assert_eq!(told(&unread).1, Some(Kind::Peer), "that one does not read");
}

#[test]
fn a_rank_whose_threads_do_something_may_answer_later() {
    let asks = |server: Vec<Thread>| {
        let mut job = job(vec![server, vec![reads(End::Connection(0))]]);
        job.processes[1].connections = vec![stream("127.0.0.1:80", Some((100, Some("gpu0"))))];
        told(&job)
    };
    let handler = Thread { frames: frames(&[("/job/serve.py", "answer")]), ..sleeps(3_000) };
    assert_eq!(asks(vec![barrier()]), gpu1(Standing::Stalled, Kind::Peer));
    assert_eq!(asks(vec![barrier(), handler]), gpu1(Standing::Waiting, Kind::Peer));
}

#[test]
fn ranks_on_other_machines_may_be_what_all_wait_for() {
    let mut job = job(vec![vec![barrier()], vec![barrier()]]);
    assert_eq!(told(&job).0, Standing::Stalled);
    job.processes[0].connections = vec![stream("10.0.0.2:29500", None)];
    assert_eq!(told(&job).0, Standing::Waiting);
    assert!(text(&job).contains("on another machine"));
}

#[test]
fn a_file_is_waited_for_as_long_as_the_kernel_waits_before_it_calls_a_task_hung() {
    let file = |millis, kind: &str| {
        let (path, filesystem) = (Some("/data/x".to_owned()), Some(kind.to_owned()));
        let wait = waits(Waits::File { path, filesystem }, &[("/job/train.py", "load")]);
        told(&odd(vec![Thread { asleep_for_ms: Some(millis), ..wait }]))
    };
    assert_eq!(file(MINUTE_MS, "nfs4"), gpu1(Standing::Waiting, Kind::File));
    assert_eq!(file(3 * MINUTE_MS, "nfs4"), gpu1(Standing::Stalled, Kind::File));
    assert_eq!(
        file(MINUTE_MS, NAMED_PIPE),
        gpu1(Standing::Stalled, Kind::File),
        "no server has it"
    );
}

#[test]
fn who_asks_a_locked_database_again_and_again_waits_for_who_has_locked_it() {
    let retries = |holder: Thread| {
        let mut again = Thread { waits_begun: 5, asleep_for_ms: Some(40), ..sleeps(60) };
        again.frames[0].code = Some("base.execute('begin immediate')".to_owned());
        let mut job = job(vec![vec![holder], vec![again]]);
        job.processes[1].locked = vec![Locked { path: "/job/runs.db".to_owned(), holder: 100 }];
        job
    };
    let stuck = retries(barrier());
    assert_eq!(told(&stuck), gpu1(Standing::Stalled, Kind::Peer));
    assert!(text(&stuck).contains("tries again and again to lock /job/runs.db, which gpu0 has"));
    let in_turn = retries(sleeps(3_000));
    assert_eq!(told(&in_turn), (Standing::Waiting, Some(Kind::Sleeps), "gpu0".to_owned()));
    let mut other = retries(barrier());
    other.processes[1].threads[0].frames[0].code = Some("time.sleep(0.1)".to_owned());
    assert_eq!(
        told(&other),
        gpu1(Standing::Waiting, Kind::Sleeps),
        "it may wait for something else"
    );
}

#[test]
fn a_child_that_has_ended_and_was_not_waited_for_is_named_and_is_no_stall() {
    let mut job = with_child(vec![sleeps(300)], Vec::new());
    job.processes[2].state = State::Zombie;
    assert_eq!(told(&job), gpu1(Standing::Waiting, Kind::Sleeps));
    assert!(
        text(&job).contains("its process 300 has ended, and is a zombie until it is waited for")
    );
}

#[test]
fn who_could_run_and_has_had_its_share_is_held_back_by_its_control_group() {
    let limited = |cpu_ms, throttled| {
        let runs = Thread { state: State::Running, cpu_ms, ..Thread::default() };
        let mut job = odd(vec![runs]);
        let cpu_limit = Some(CpuLimit { quota_us: 1_000, period_us: 1_000_000, throttled });
        job.processes[1].group = Some(Group { cpu_limit, ..Group::default() });
        job
    };
    assert_eq!(told(&limited(1, 7)), gpu1(Standing::Waiting, Kind::Throttled));
    assert!(text(&limited(1, 7)).contains("CPU time, 1 ms in each 1000 ms"));
    assert_eq!(told(&limited(1, 0)).1, Some(Kind::Works), "it was never held back");
    assert_eq!(told(&limited(300, 7)).1, Some(Kind::Works));
}

const POOL: &str = "/usr/lib/python3.12/multiprocessing/pool.py";
const QUEUES: &str = "/usr/lib/python3.12/multiprocessing/queues.py";
const THREADING: &str = "/usr/lib/python3.12/threading.py";

/// A lock of several processes, and who shares it.
fn shared_by(sharers: Option<Vec<Holder>>) -> Waits {
    Waits::Lock { address: 1, shared: true, timed: false, holder: None, sharers }
}

#[test]
fn a_lock_whose_holder_has_died_is_a_deadlock_if_all_that_share_it_wait() {
    let wants = |sharers, function| waits(shared_by(sharers), &[("/job/train.py", function)]);
    let of_rank = |pid| Holder { pid, rank: Some("gpu1".to_owned()) };
    let with = |parents: Option<Vec<Holder>>, childs: Option<Vec<Holder>>| {
        with_child(vec![wants(parents, "merge")], vec![wants(childs, "load")])
    };
    let dead = gpu1(Standing::Stalled, Kind::Deadlock);
    assert_eq!(told(&odd(vec![wants(Some(Vec::new()), "merge")])), dead);
    let both = with(Some(vec![of_rank(300)]), Some(vec![of_rank(200)]));
    assert_eq!(told(&both), dead);
    assert_ne!(told(&with(None, None)), dead, "nobody knows who shares it");
    let outside = || Some(vec![Holder { pid: 900, rank: None }]);
    assert_ne!(told(&with(outside(), outside())), dead, "nobody knows what it does");
    let mut reads = both;
    reads.processes[2].threads = vec![sleeps(4_000)];
    assert_ne!(told(&reads), dead, "it may have the lock");
}

#[test]
fn a_pool_of_which_nobody_has_the_task_has_lost_it() {
    let wants = || {
        let of = [(THREADING, "Event.wait"), (POOL, "ApplyResult.wait"), ("/job/train.py", "load")];
        waits(lock(false), &of)
    };
    let idle = || waits(shared_by(None), &[(QUEUES, "SimpleQueue.get"), (POOL, "worker")]);
    let busy = || waits(lock(false), &[("/job/train.py", "clean"), (POOL, "worker")]);
    let pool = |workers: Vec<Thread>| {
        let mut job = odd(vec![wants()]);
        let children = (300..).zip(workers);
        let children = children.map(|(pid, main)| process(pid, 200, "gpu1", vec![main]));
        job.processes.extend(children);
        job
    };
    let lost = pool(vec![idle(), idle()]);
    assert_eq!(told(&lost), gpu1(Standing::Stalled, Kind::Child));
    assert!(text(&lost).contains("all of its 2 processes wait for tasks"), "{}", text(&lost));
    assert!(!text(&pool(vec![idle(), busy()])).contains("wait for tasks"));
    let mut fresh = pool(vec![idle(), idle()]);
    fresh.processes[3].threads[0].asleep_for_ms = Some(100);
    assert_eq!(told(&fresh).0, Standing::Waiting, "it has just given its result");
    let mut feeds = pool(vec![idle(), idle()]);
    let slow = [("/job/train.py", "names"), (POOL, "Pool._handle_tasks")];
    let hands_out = waits(Waits::Time { left_ms: Some(4_000) }, &slow);
    feeds.processes[1].threads.push(Thread { tid: 201, ..hands_out });
    assert_eq!(told(&feeds).0, Standing::Waiting, "the tasks come slowly");
}

#[test]
fn what_a_task_of_dask_asks_the_cluster_for_is_named() {
    let site = "/x/lib/python3.12/site-packages/distributed";
    let (utils, client, lock_of) =
        (format!("{site}/utils.py"), format!("{site}/client.py"), format!("{site}/lock.py"));
    let run = ("/usr/lib/python3.12/concurrent/futures/thread.py", "_WorkItem.run");
    let task = |file: &str, function: &str| {
        let of = [
            (THREADING, "Event.wait"),
            (&*utils, "sync"),
            (file, function),
            ("<dynamic-code>", "outer"),
            run,
        ];
        waits(lock(true), &of)
    };
    let events = || {
        let of =
            [("/usr/lib/python3.12/selectors.py", "select"), ("/base_events.py", "run_forever")];
        waits(Waits::Any { ends: Vec::new(), timed: false }, &of)
    };
    let worker = |threads: Vec<Thread>| {
        let threads = [events()].into_iter().chain(threads).collect();
        Evidence { serves: true, ..job(vec![threads]) }
    };
    let locked = worker(vec![task(&lock_of, "Lock.acquire")]);
    assert!(text(&locked).contains("a task that is in Lock.acquire of distributed"));
    let nested = worker(vec![task(&client, "Future.result"), task(&client, "Future.result")]);
    assert!(text(&nested).contains("the result of another task (Future.result), as 2 of its"));
    let place = judge(&nested).groups[0].condition.place.clone();
    assert_eq!(place.as_deref(), Some("<dynamic-code>:1 in outer"));
}

#[test]
fn the_task_that_has_started_a_child_is_the_place() {
    let run = ("/usr/lib/python3.12/concurrent/futures/thread.py", "_WorkItem.run");
    let wait = Waits::Child { pid: Some(300) };
    let task = waits(
        wait,
        &[("/usr/lib/python3.12/subprocess.py", "run"), ("<dynamic-code>", "convert"), run],
    );
    let of = [
        ("/usr/lib/python3.12/selectors.py", "select"),
        ("/x/base_events.py", "run_forever"),
        ("/x/process.py", "_run"),
    ];
    let events = waits(Waits::Any { ends: Vec::new(), timed: false }, &of);
    let path = (Some("/job/in".to_owned()), Some(NAMED_PIPE.to_owned()));
    let opens = waits(Waits::File { path: path.0, filesystem: path.1 }, &[]);
    let mut job = with_child(vec![events, task], vec![opens]);
    job.serves = true;
    let condition = judge(&job).groups[0].condition.clone();
    assert_eq!(condition.place.as_deref(), Some("<dynamic-code>:1 in convert"), "{condition:?}");
}

#[test]
fn a_receive_of_pytorch_is_a_wait_for_a_rank_and_no_lock() {
    let c10d = "/x/site-packages/torch/distributed/distributed_c10d.py";
    let receives = waits(lock(false), &[(c10d, "recv"), ("/job/train.py", "stage")]);
    let job = odd(vec![receives, Thread::default()]);
    assert_eq!(told(&job), gpu1(Standing::Stalled, Kind::Peer));
    assert!(text(&job).contains("gpu1 is in recv (train.py:1 in stage)"));
}

#[test]
fn threads_of_which_none_can_wake_another_say_what_they_want() {
    let queue = "/usr/lib/python3.12/queue.py";
    let joins = [(THREADING, "Thread.join"), ("/job/train.py", "finish")];
    let puts = [(THREADING, "Condition.wait"), (queue, "Queue.put"), ("/job/train.py", "prefetch")];
    let job = odd(vec![waits(lock(false), &joins), waits(lock(false), &puts)]);
    assert_eq!(told(&job), gpu1(Standing::Stalled, Kind::Deadlock));
    let said = "waits for the end of a thread, another of its 2 threads for room in a queue";
    assert!(text(&job).contains(said), "{}", text(&job));
}

#[test]
fn a_server_of_its_own_is_waited_for_in_the_thread_that_serves() {
    let accepts = reads(End::Listener { address: "unix".to_owned() });
    let queue = "/usr/lib/python3.12/queue.py";
    let serves = waits(
        lock(false),
        &[(THREADING, "Condition.wait"), (queue, "Queue.get"), ("/x/managers.py", "serve_client")],
    );
    let others = vec![Holder { pid: 300, rank: Some("gpu1".to_owned()) }];
    let asks = reads(End::Pipe { inode: 1, others });
    let job = with_child(vec![asks], vec![accepts, serves]);
    assert_eq!(told(&job), gpu1(Standing::Stalled, Kind::Lock));
    assert!(text(&job).contains("waits for an entry of a queue"), "{}", text(&job));
}
