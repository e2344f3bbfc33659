//! What an engine's own queues add to a verdict.
#![allow(missing_docs)]

use cuda_cluster_why::evidence::{
    Call, Evidence, Fetch, Frame, Held, Paused, Placed, Process, Rank, State, Tasks, Thread, Waits,
};
use cuda_cluster_why::judge;
use cuda_cluster_why::verdict::{Kind, Standing};

fn thread(waits: Waits) -> Thread {
    let call = Call { name: "epoll_wait".to_owned(), waits, left_ms: None };
    Thread { call: Some(call), asleep_for_ms: Some(41_000), ..Thread::default() }
}

fn events() -> Thread {
    thread(Waits::Any { ends: Vec::new(), timed: false })
}

/// A scheduler and two workers whose main threads wait for events, and what their tasks are; of
/// `gpu1` thread 301 does this.
fn cluster(second: Option<Thread>, tasks: Tasks) -> Evidence {
    let mut job =
        Evidence { interval_ms: 400, serves: true, tasks: Some(tasks), ..Evidence::default() };
    for (pid, name) in [(100, "scheduler"), (200, "gpu0"), (300, "gpu1")] {
        let name = name.to_owned();
        job.ranks.push(Rank { name: name.clone(), pid: Some(pid), ..Rank::default() });
        let second = second.clone().filter(|_| pid == 300);
        let threads = [Some(events()), second].into_iter().flatten().zip(pid..);
        let threads = threads.map(|(thread, tid)| Thread { tid, ..thread }).collect();
        job.processes.push(Process { pid, rank: name, threads, ..Process::default() });
    }
    job
}

fn placed(runs: bool) -> Placed {
    Placed {
        name: "3:17 (fold)".to_owned(),
        function: "fold".to_owned(),
        rank: "gpu1".to_owned(),
        runs,
        thread: runs.then_some(301),
        for_ms: Some(41_000),
        dependents: 120,
        more: false,
    }
}

fn told(job: &Evidence) -> (Standing, Option<Kind>, String, String) {
    let verdict = judge(job);
    (verdict.standing, verdict.cause, verdict.odd.join(" "), verdict.text)
}

#[test]
fn the_thread_that_a_worker_names_is_in_a_task_and_those_that_wait_are_counted() {
    let sleeps = thread(Waits::Time { left_ms: Some(3_600_000) });
    let tasks = Tasks { placed: vec![placed(true)], waiting: 120, ..Tasks::default() };
    let (standing, cause, odd, text) = told(&cluster(Some(sleeps.clone()), tasks.clone()));
    assert_eq!((standing, cause, odd.as_str()), (Standing::Stalled, Some(Kind::Sleeps), "gpu1"));
    let said = "; task 3:17 (fold) has run on gpu1 for 41 s, and 120 others wait for it";
    assert!(text.starts_with("stalled: gpu1 has a task that sleeps") && text.ends_with(said));
    // It began after the look: what the thread was seen in was something else.
    let mut fresh = tasks;
    fresh.placed[0].for_ms = Some(100);
    let (standing, cause, ..) = told(&cluster(Some(sleeps), fresh));
    assert_eq!((standing, cause), (Standing::CannotTell, None));
}

#[test]
fn without_a_task_a_cluster_is_idle_and_with_some_that_nobody_runs_it_is_not_told() {
    assert_eq!(told(&cluster(None, Tasks::default())).0, Standing::Idle);
    let (standing, _, odd, text) = told(&cluster(None, Tasks { waiting: 3, ..Tasks::default() }));
    assert_eq!((standing, odd.as_str()), (Standing::CannotTell, ""));
    assert!(text.contains("3 tasks wait for results of others"), "{text}");
    let sent = Tasks { placed: vec![placed(false)], ..Tasks::default() };
    let (standing, _, odd, text) = told(&cluster(None, sent));
    assert_eq!((standing, odd.as_str()), (Standing::CannotTell, "gpu1"));
    assert!(text.contains("has been with gpu1 for 41 s"), "{text}");
}

#[test]
fn tasks_that_no_worker_may_run_are_a_stall_once_they_have_waited_for_long() {
    let held = |for_ms| {
        let why = "it needs gpu=8, and the most is 2".to_owned();
        let held = vec![Held { name: "train-1".to_owned(), why, for_ms }];
        told(&cluster(None, Tasks { unplaced: 12, held, ..Tasks::default() }))
    };
    let (standing, cause, _, text) = held(Some(60_000));
    assert_eq!((standing, cause), (Standing::Stalled, Some(Kind::Unplaced)));
    let said = "stalled: no worker may run task train-1 (for 60 s now), nor 11 others: it needs \
                gpu=8, and the most is 2";
    assert_eq!(text, said);
    assert_eq!(held(Some(100)).0, Standing::Waiting);
    assert_eq!(held(None).0, Standing::Waiting, "nobody knows for how long");
}

#[test]
fn a_result_that_does_not_come_names_who_has_it_and_a_paused_worker_why() {
    let fetch = Fetch {
        name: "object 3:4".to_owned(),
        rank: "gpu1".to_owned(),
        from: "gpu0".to_owned(),
        for_ms: 41_000,
        tasks: 2,
        bytes: Some(128 << 20),
    };
    let mut tasks = Tasks { placed: vec![placed(false)], ..Tasks::default() };
    tasks.fetches = vec![fetch];
    let (standing, cause, odd, text) = told(&cluster(None, tasks.clone()));
    assert_eq!((standing, cause, odd.as_str()), (Standing::Waiting, Some(Kind::Peer), "gpu0"));
    assert!(
        text.contains("gpu1 has been fetching object 3:4 (128 MiB) from gpu0 for 41 s"),
        "{text}"
    );
    assert!(text.contains("for which 2 tasks wait there"), "{text}");
    let mut stopped = cluster(None, tasks);
    stopped.processes[1].state = State::Stopped;
    let (_, cause, odd, text) = told(&stopped);
    assert_eq!((cause, odd.as_str()), (Some(Kind::Stopped), "gpu0"));
    assert!(text.contains("gpu1 has been fetching object 3:4 (128 MiB) from gpu0"), "{text}");
    let why = "Dask has paused, because its memory is full".to_owned();
    let paused = vec![Paused { rank: "gpu1".to_owned(), why }];
    let paused = Tasks { placed: vec![placed(false)], paused, ..Tasks::default() };
    let (standing, cause, odd, text) = told(&cluster(None, paused));
    assert_eq!((standing, cause, odd.as_str()), (Standing::Waiting, Some(Kind::Memory), "gpu1"));
    assert!(text.contains("gpu1 for 41 s, and 120 others wait for it, which Dask"), "{text}");
}

#[test]
fn of_several_tasks_that_in_whose_function_a_rank_is_is_named() {
    let pool = |function: &str, file: &str| Frame {
        function: function.to_owned(),
        file: file.to_owned(),
        line: 1,
        code: None,
    };
    let mut in_task = thread(Waits::Time { left_ms: Some(3_600_000) });
    in_task.frames = vec![
        pool("load", "/job/work.py"),
        pool("_WorkItem.run", "/usr/lib/python3.12/concurrent/futures/thread.py"),
    ];
    let other = Placed { thread: None, ..placed(true) };
    let wanted = Placed {
        name: "load-1".to_owned(),
        function: "load".to_owned(),
        for_ms: Some(9_000),
        dependents: 0,
        ..other.clone()
    };
    let tasks = Tasks { placed: vec![other, wanted], ..Tasks::default() };
    let (.., text) = told(&cluster(Some(in_task), tasks));
    assert!(text.ends_with("task load-1 has run on gpu1 for 9 s"), "{text}");
}

#[test]
fn what_was_saved_before_there_were_queues_is_read_as_it_was() {
    let mut job = cluster(None, Tasks::default());
    let text = serde_json::to_string(&job).expect("a text");
    let again: Evidence = serde_json::from_str(&text).expect("read");
    assert_eq!(again, job);
    job.tasks = None;
    let text = serde_json::to_string(&job).expect("a text");
    assert!(!text.contains("tasks"));
    let old: Evidence = serde_json::from_str(&text).expect("read");
    assert_eq!(judge(&old).standing, Standing::CannotTell);
}

#[test]
fn a_thread_of_the_workers_own_that_wakes_up_for_a_moment_explains_no_lock() {
    let lock =
        || Waits::Lock { address: 1, shared: false, timed: false, holder: None, sharers: None };
    let tasks = Tasks { placed: vec![placed(true)], waiting: 1, ..Tasks::default() };
    let mut job = cluster(Some(thread(lock())), tasks);
    let wakes = |cpu_ms| Thread { tid: 302, state: State::Running, cpu_ms, ..Thread::default() };
    job.processes[2].threads.push(wakes(5));
    let (standing, cause, odd, _) = told(&job);
    assert_eq!((standing, cause, &*odd), (Standing::Stalled, Some(Kind::Lock), "gpu1"));
    job.processes[2].threads[2] = wakes(300);
    assert_eq!(told(&job).1, Some(Kind::Works), "it may be one of the task's");
}

#[test]
fn a_paused_worker_explains_tasks_that_only_it_may_run_and_no_others() {
    let held = |why: &str| {
        let held = vec![Held { name: "score".into(), why: why.into(), for_ms: Some(60_000) }];
        let paused = vec![Paused { rank: "gpu1".into(), why: "Dask has paused".into() }];
        told(&cluster(None, Tasks { unplaced: 1, held, paused, ..Tasks::default() }))
    };
    let (standing, cause, odd, text) = held("it must run on gpu0 or gpu1");
    assert_eq!((standing, cause, &*odd), (Standing::Waiting, Some(Kind::Memory), "gpu1"));
    assert!(text.contains("tasks wait for gpu1, which Dask has paused"), "{text}");
    for other in ["it must run on gpu10", "it needs gpu=8, and the most is 2"] {
        let (standing, cause, odd, _) = held(other);
        assert_eq!((standing, cause, &*odd), (Standing::Stalled, Some(Kind::Unplaced), ""));
    }
}
