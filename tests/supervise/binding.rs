//! Binding at process start, on real processes.

use crate::bench;
use crate::bench::{Bench, launch};
use cuda_cluster::os::binding::observe;
use cuda_cluster::plan::MemoryPolicy;
use cuda_cluster::supervise::Escalation;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_thread_is_on_its_cpus_from_the_first_instruction() {
    let available = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("ours");
    let cpus: Vec<usize> = (0..64).filter(|cpu| available.is_set(*cpu).unwrap_or(false)).collect();
    let bench = Bench::new();
    let steps = "threads=6 sleep=50 affinity ready";
    let mut bound = launch("bound", &[steps, steps]);
    let given = [cpus[0], cpus[cpus.len() - 1]];
    for (worker, cpu) in bound.workers.iter_mut().zip(given) {
        worker.program.binding.cpus = Some(cpu.to_string().parse().expect("a set"));
        worker.program.binding.mems = Some("0".parse().expect("a set"));
        worker.program.binding.memory_policy = MemoryPolicy::Preferred;
    }
    let supervisor = bench.start(bound).await;
    supervisor.ready().await.expect("READY");
    let state = supervisor.state().borrow().clone();
    for (worker, cpu) in state.workers.iter().zip(given) {
        assert_eq!(worker.cpus, worker.asked.cpus);
        assert_eq!(worker.mems, worker.asked.mems);
        assert_eq!(worker.notes, [""; 0]);
        // What it wrote before READY goes through the guardian, and may arrive later.
        let log = || cuda_cluster::os::log_file::last_lines(&worker.log, 100);
        bench::eventually("eight lines in its log", || log().len() == 8).await;
        let log = log();
        assert_eq!(log[0], format!("at birth {:#x}", 1u64 << cpu));
        assert_eq!(log[1..], vec![format!("thread {cpu}"); 7]);
        let observed = observe(worker.pid.expect("alive"), &worker.asked).expect("alive");
        assert_eq!((observed.threads, observed.threads_outside), (7, 0));
        assert_eq!(Some(&observed.cpus), worker.asked.cpus.as_ref());
        println!("{}: {observed:?}", worker.name);
        assert!(observed.local_memory.is_none_or(|share| share > 0.99));
    }
    supervisor.stop(Escalation::Kill);
    supervisor.wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_bound_is_a_note_and_under_strict_a_refusal() {
    let bench = Bench::new();
    let mut lax = launch("lax", &["ready"]);
    lax.workers[0].program.binding.cpus = Some("8000-8003".parse().expect("a set"));
    lax.workers[0].program.binding.mems = Some("900".parse().expect("a set"));
    let mut strict = lax.clone();
    strict.name = bench::named("strict");
    strict.strict = true;

    let supervisor = bench.start(lax).await;
    supervisor.ready().await.expect("READY");
    let notes = supervisor.state().borrow().workers[0].notes.clone();
    assert_eq!(notes[0], "CPUs 8000-8003 could not be set: Invalid argument");
    assert_eq!(notes[1], "memory nodes 900 could not be set: Invalid argument");
    drop(supervisor);

    let supervisor = bench.start(strict).await;
    let cause = supervisor.ready().await.expect_err("refused").expect("a cause");
    let expected = "gpu0 could not start: under 'strict': CPUs 8000-8003 could not be set: \
                    Invalid argument; memory nodes 900 could not be set: Invalid argument; \
                    it ended with status 125";
    assert_eq!(cause.text, expected);
    supervisor.wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_is_not_there_is_named() {
    let bench = Bench::new();
    let mut absent = launch("absent", &["ready"]);
    absent.workers[0].program.argv = vec!["/no/such/program".to_owned()];
    let supervisor = bench.start(absent).await;
    let cause = supervisor.ready().await.expect_err("not READY").expect("a cause");
    let expected = "gpu0 could not start: cannot execute /no/such/program: \
                    No such file or directory; it ended with status 127";
    assert_eq!(cause.text, expected);
    supervisor.wait().await;
}
