//! What the kernel's messages add to a verdict: lines as public threads have them, with the places
//! of a job's own.
#![allow(missing_docs)]

use cuda_cluster_why::evidence::{
    Call, Evidence, Frame, KernelMessage, Process, Rank, Thread, Waits,
};
use cuda_cluster_why::judge;
use cuda_cluster_why::verdict::{Kind, Standing};

/// Three ranks in the same operation, with these messages 41 seconds ago.
fn job(messages: &[&str]) -> Evidence {
    let mut job = Evidence { interval_ms: 400, ..Evidence::default() };
    for (pid, gpu) in [(100, "0000:07:00.0"), (200, "0000:3b:00.0"), (300, "0008:06:00.0")] {
        let name = format!("gpu{}", pid / 100 - 1);
        let gpu = Some(gpu.to_owned());
        job.ranks.push(Rank { name: name.clone(), pid: Some(pid), gpu, ..Rank::default() });
        let (function, file) = ("all_reduce".to_owned(), "/job/team.py".to_owned());
        let waits = Call { name: "futex".to_owned(), waits: Waits::Unknown, left_ms: None };
        let thread = Thread {
            tid: pid,
            call: Some(waits),
            asleep_for_ms: Some(60_000),
            frames: vec![Frame { function, file, line: 1, code: None }],
            ..Thread::default()
        };
        job.processes.push(Process {
            pid,
            rank: name,
            threads: vec![thread],
            ..Process::default()
        });
    }
    let message = |text: &&str| KernelMessage { ago_ms: 41_000, text: (*text).to_owned() };
    job.kernel = messages.iter().map(message).collect();
    job
}

fn told(job: &Evidence) -> (Standing, Option<Kind>, String, String) {
    let verdict = judge(job);
    (verdict.standing, verdict.cause, verdict.odd.join(" "), verdict.text)
}

#[test]
fn the_rank_whose_gpu_is_gone_is_named_where_all_wait_alike() {
    let all = told(&job(&[]));
    assert_eq!((all.0, all.1, all.2.as_str()), (Standing::Stalled, Some(Kind::Collective), ""));
    let line = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off \
                the bus.";
    let (standing, cause, odd, text) = told(&job(&[line, line]));
    assert_eq!((standing, cause, odd.as_str()), (Standing::Stalled, Some(Kind::Device), "gpu1"));
    let said =
        "the driver reported Xid 79 (GPU has fallen off the bus) of the GPU of gpu1, 41 s ago";
    assert_eq!(text.matches(said).count(), 1, "{text}");
}

#[test]
fn what_concerns_nobody_of_the_job_is_not_told() {
    let other = job(&[
        "NVRM: Xid (PCI:0000:99:00): 79, pid=4711, GPU has fallen off the bus.",
        "INFO: task systemd:1 blocked for more than 120 seconds.",
        "Out of memory: Killed process 4711 (postgres) total-vm:7934kB",
    ]);
    assert_eq!(told(&other), told(&job(&[])));
}

#[test]
fn hung_threads_and_killed_processes_are_told_with_their_ranks() {
    let line = "INFO: task python3:300 blocked for more than 122 seconds.";
    let (_, _, odd, text) = told(&job(&[line]));
    assert_eq!(odd, "gpu2");
    assert!(text.contains("thread 300 (python3) of gpu2 had been blocked for more than 122 s"));
    let line = "Memory cgroup out of memory: Killed process 777 (python) total-vm:7934kB";
    let mut dead = job(&[line]);
    dead.ranks[0].pid = None;
    dead.ranks[0].last_pid = Some(777);
    dead.ranks[0].ended = Some("was killed by SIGKILL".to_owned());
    let (standing, cause, odd, text) = told(&dead);
    assert_eq!((standing, cause, odd.as_str()), (Standing::Stalled, Some(Kind::Gone), "gpu0"));
    let said = "the kernel killed process 777 (python) of gpu0, because the memory of its control \
                group had run out, 41 s ago";
    assert!(text.contains(said), "{text}");
}
