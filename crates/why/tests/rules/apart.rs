//! Who is set apart from the others: by what all wait for, by where they are, by what they have.

use super::*;

#[test]
fn who_asks_again_and_again_waits_for_whom_has_waited_for_long() {
    let asks = || Thread { asleep_for_ms: Some(5), ..sleeps(15) };
    let with = |main: Thread| job(vec![vec![asks()], vec![main], vec![asks()]]);
    let (standing, cause, odd) = told(&with(waits(lock(false), &[("/job/train.py", "merge")])));
    assert_eq!((standing, cause, &*odd), (Standing::Stalled, Some(Kind::Deadlock), "gpu1"));
    // A frozen one is the cause whoever works or asks beside it.
    let works = || Thread { state: State::Running, cpu_ms: 400, ..Thread::default() };
    let mut frozen = job(vec![vec![asks()], vec![barrier()], vec![works()]]);
    frozen.processes[1].group = Some(Group { frozen: Some(true), ..Group::default() });
    assert_eq!(told(&frozen), gpu1(Standing::Stalled, Kind::Frozen));
    // Those that ask may do something else as well.
    let child = waits(Waits::Child { pid: Some(3) }, &[("/job/train.py", "merge")]);
    assert_eq!(told(&with(child)), (Standing::Waiting, Some(Kind::Child), "gpu1".to_owned()));
    assert_eq!(told(&with(works())).1, Some(Kind::Works));
    assert_eq!(
        told(&with(asks())),
        (Standing::Waiting, Some(Kind::Sleeps), "gpu0 gpu1 gpu2".into())
    );
}

#[test]
fn a_process_whose_pages_come_from_swap_waits_for_memory() {
    let with = |swapped_bytes, major_faults| {
        let works = Thread { state: State::Running, cpu_ms: 180, ..Thread::default() };
        let mut job = odd(vec![works]);
        let process = &mut job.processes[1];
        (process.swapped_bytes, process.major_faults) = (swapped_bytes, major_faults);
        job
    };
    let storm = with(160 << 20, 5_000);
    assert_eq!(told(&storm), gpu1(Standing::Waiting, Kind::Memory));
    assert!(text(&storm).contains("waits for pages of it from swap (160 MiB are there)"));
    assert_eq!(told(&with(0, 5_000)).1, Some(Kind::Works), "it reads a file that it has mapped");
    assert_eq!(told(&with(160 << 20, 3)).1, Some(Kind::Works), "what is there is not needed");
}

#[test]
fn a_page_that_a_child_should_provide_is_followed_to_the_child() {
    let faults = || Thread {
        call: None,
        kernel: Some("handle_userfault".to_owned()),
        ..waits(Waits::Unknown, &[("/job/train.py", "restore")])
    };
    let end = End::Pipe { inode: 7, others: Vec::new() };
    let stalled = with_child(vec![faults()], vec![reads(end)]);
    assert_eq!(told(&stalled), gpu1(Standing::Stalled, Kind::Outside));
    assert!(text(&stalled).contains("(userfaultfd)"), "{}", text(&stalled));
    let slow = with_child(vec![faults()], vec![sleeps(4_000)]);
    assert_eq!(told(&slow).0, Standing::Waiting);
    assert_eq!(told(&odd(vec![faults()])).0, Standing::CannotTell);
}

#[test]
fn a_wait_of_who_changes_a_frozen_file_system_says_so() {
    let waits_for = |kernel: &str| Thread {
        state: State::Uninterruptible,
        kernel: Some(kernel.to_owned()),
        ..waits(
            Waits::File { path: Some("/data/step-10.pt".into()), filesystem: Some("xfs".into()) },
            &[("/job/train.py", "save")],
        )
    };
    let frozen = odd(vec![waits_for("percpu_rwsem_wait")]);
    assert_eq!(told(&frozen), gpu1(Standing::Waiting, Kind::File));
    assert!(text(&frozen).contains("the file system may be frozen (fsfreeze)"));
    assert!(!text(&odd(vec![waits_for("io_schedule")])).contains("frozen"));
}

#[test]
fn of_two_that_wait_for_each_other_the_odd_one_is_where_the_others_are_not() {
    let with = |number: u32, on: u32, of: &[(&str, &str)], unread: u64| {
        let peer = Some((100 * (on + 1), Some(&*format!("gpu{on}"))));
        let mut process = process(
            100 * (number + 1),
            1,
            &format!("gpu{number}"),
            vec![waits(Waits::Descriptor { end: End::Connection(0), writes: false }, of)],
        );
        process.connections = vec![Connection { unread_bytes: unread, ..stream("unix", peer) }];
        process
    };
    let sums = [("/job/crew.py", "receive"), ("/job/crew.py", "total")];
    let pulls = [("/job/crew.py", "receive"), ("/job/train.py", "pull")];
    let mut job = job(vec![vec![], vec![], vec![], vec![]]);
    job.processes = vec![
        with(0, 1, &sums, 0),
        with(1, 3, &sums, 8),
        with(2, 0, &sums, 0),
        with(3, 1, &pulls, 0),
    ];
    let (_, cause, odd) = told(&job);
    assert_eq!((cause, &*odd), (Some(Kind::Peer), "gpu3"));
    assert!(text(&job).contains("gpu1 does not read the 8 bytes that gpu3 has sent"));
    let there = job.processes[1].threads[0].frames.clone();
    job.processes[3].threads[0].frames = there;
    assert_eq!(told(&job).2, "gpu1 gpu3");
}

#[test]
fn a_rank_whose_program_is_gone_has_not_what_all_others_have() {
    let tail = Thread { asleep_for_ms: Some(100), ..sleeps(900) };
    let mut job = job(vec![vec![barrier()], vec![tail], vec![barrier()]]);
    job.processes[1].name = "tail".to_owned();
    let said = text(&job);
    assert!(
        said.contains("all others have a process python, and gpu1 has none, but tail"),
        "{said}"
    );
    job.processes[2].name = "sh".to_owned();
    assert!(!text(&job).contains("all others"), "they have nothing in common");
}
