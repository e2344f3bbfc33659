//! Tests of the decisions, as sequences of events.
//!
//! *Invariant:* time passes only where a test says so.

mod hosts;
mod joined;
mod liveness;
mod restarts;
mod stalls;
mod together;

use std::time::Duration;

use super::world::{World, launch, up};
use super::{Event, GpuFinding};
use crate::record::What;
use crate::{ClusterPhase, Escalation, Launch, Outcome, ProcessPhase, ProcessState, ReadyWhen};
use cuda_cluster_model::plan::{RestartWhen, SchedulerDeath, Unresponsive};
use cuda_cluster_model::units::Span;
use cuda_cluster_wire::process::Exit;
use cuda_cluster_wire::status::{AfterLeaving, Status};

const MS: Duration = Duration::from_millis(1);

#[test]
fn workers_start_when_the_scheduler_is_ready() {
    let mut world = World::new(launch(true, 2, false));
    assert_eq!(world.living.len(), 1);
    world.ready(0);
    assert_eq!(world.living.len(), 3);
    world.ready(1);
    assert_eq!(world.phase(), ClusterPhase::Starting);
    world.ready(2);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

/// The scheduler and two workers become READY; then the scheduler dies, and its workers with it.
fn become_ready_and_die(world: &mut World) {
    (0..3).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.die(0, Exit::by_signal(9));
    world.die(1, Exit::by_signal(15));
    world.die(2, Exit::by_signal(15));
}

#[test]
fn workers_that_wait_themselves_are_started_beside_the_scheduler_the_first_time() {
    let mut world = World::new(Launch { workers_wait: true, ..launch(true, 2, false) });
    assert_eq!(world.living.len(), 3);
    become_ready_and_die(&mut world);
    assert_eq!(world.living.len(), 1, "later they follow it");
}

#[test]
fn workers_are_forked_as_soon_as_their_scheduler_says_so_the_first_time() {
    let mut world = World::new(launch(true, 2, false));
    assert_eq!(world.living.len(), 1);
    let key = world.core.key_of(0).expect("the scheduler");
    world.tell(Event::Said { key, status: Status::Forks });
    assert_eq!(world.living.len(), 3);
    become_ready_and_die(&mut world);
    let key = world.core.key_of(0).expect("the scheduler");
    world.tell(Event::Said { key, status: Status::Forks });
    assert_eq!(world.living.len(), 1, "later they follow it");
}

#[test]
fn a_first_worker_that_the_others_are_forked_from_is_started_alone() {
    let mut world = World::new(Launch { first_alone: true, ..launch(false, 3, false) });
    assert_eq!(world.living.len(), 1);
    world.ready(0);
    assert_eq!(world.living.len(), 3);
    world.ready(1);
    world.ready(2);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.die(0, Exit::by_signal(9));
    world.die(1, Exit::by_signal(9));
    assert_eq!(world.living.len(), 3, "later each for itself");
}

#[test]
fn a_cluster_that_is_to_be_verified_is_ready_when_it_is() {
    let unverified = || Launch { to_be_verified: true, ..launch(true, 2, false) };
    let mut world = World::new(unverified());
    (0..3).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Verifying);
    world.now += Duration::from_secs(3600);
    world.tell(Event::Tick);
    assert_eq!(world.phase(), ClusterPhase::Verifying, "it takes the time that it takes");
    world.tell(Event::Verified);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.die(1, Exit::by_signal(9));
    assert_eq!(world.phase(), ClusterPhase::Recovering, "later deaths are mended");

    let mut world = World::new(unverified());
    (0..3).for_each(|slot| world.ready(slot));
    world.die(2, Exit::by_signal(9));
    assert_eq!(world.phase(), ClusterPhase::Stopping, "it never was READY");
}

#[test]
fn a_death_during_the_first_start_ends_everything_with_its_cause() {
    let mut world = World::new(launch(false, 2, false));
    world.ready(0);
    world.die(1, Exit::by_signal(11));
    assert_eq!(world.phase(), ClusterPhase::Stopping);
    world.die(0, Exit::by_signal(15));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert_eq!(cause.text, "gpu1 was ended by signal 11 (SIGSEGV)");
    assert_eq!(cause.log_tail, ["last line"]);
}

#[test]
fn the_blame_is_the_processs_own_word() {
    let mut world = World::new(launch(false, 1, false));
    let key = world.key(0);
    let reason = "no shared memory: /dev/shm is full".to_owned();
    world.tell(Event::Said { key, status: Status::Failed { reason } });
    world.die(0, Exit::status(1));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    let expected =
        "gpu0 could not start: no shared memory: /dev/shm is full; it ended with status 1";
    assert_eq!(cause.text, expected);
}

#[test]
fn a_crash_loop_has_growing_gaps_and_an_end() {
    let mut world = up(launch(false, 2, false));
    let mut gaps = Vec::new();
    world.die(1, Exit::status(1));
    for _ in 0..3 {
        let death = world.now;
        world.die(1, Exit::status(1));
        assert_eq!(world.phase(), ClusterPhase::Recovering);
        world.wait_for_restart(1);
        gaps.push(world.now - death);
    }
    assert!(gaps.windows(2).all(|pair| pair[0] < pair[1]), "{gaps:?}");
    world.die(1, Exit::status(1));
    assert_eq!(world.phase(), ClusterPhase::Degraded);
    assert_eq!(world.worker(1).state, ProcessPhase::Failed);
    let cause = world.core.state().cause.expect("a cause");
    let expected = "gpu1 ended with status 1, and it was restarted 3 times within 10s without \
                    becoming READY";
    assert_eq!(cause.text, expected);

    world.tell(Event::Restart(1));
    world.ready(1);
    assert_eq!(world.phase(), ClusterPhase::Ready, "a person's word starts it afresh");
    assert_eq!(world.core.state().cause, None);
}

#[test]
fn a_worker_that_its_work_ends_comes_back_more_slowly_each_time_and_always() {
    let mut launch = launch(true, 2, false);
    launch.supervision.backoff_max = Span::secs(60);
    let mut world = up(launch);
    let mut gaps = Vec::new();
    for deaths in 1..=30 {
        let death = world.now;
        world.die(2, Exit::status(1));
        assert_eq!(world.worker(1).deaths_at_work, deaths);
        let starts_at = world.worker(1).starts_at;
        assert_eq!(starts_at.is_some(), world.worker(1).state == ProcessPhase::Restarting);
        world.wait_for_restart(1);
        gaps.push(world.now - death);
        world.ready(2);
        assert_eq!(world.phase(), ClusterPhase::Ready);
    }
    let grows = |pair: &[Duration]| pair[0] < pair[1] || pair[1] > Duration::from_secs(2);
    assert!(gaps.windows(2).all(grows), "{gaps:?}");
    assert!(gaps.iter().all(|gap| *gap <= Duration::from_secs(5)), "{gaps:?}");
    assert_eq!(world.told.len(), 0, "the scheduler and the other worker live on");

    world.now += Duration::from_secs(6);
    world.die(2, Exit::status(1));
    assert_eq!(world.worker(1).deaths_at_work, 1, "a healthy while forgives");
}

#[test]
fn a_worker_that_its_work_ends_too_often_within_the_window_stays_away() {
    let mut launch = launch(true, 2, false);
    launch.supervision.limit_at_work = Some(2);
    launch.supervision.window = Span::secs(60);
    let mut world = up(launch);
    // It is healthy before each death, which does not make the deaths fewer.
    let live_and_die = |world: &mut World, seconds| {
        world.now += Duration::from_secs(seconds);
        world.die(2, Exit::status(1));
    };
    let come_back = |world: &mut World| {
        world.wait_for_restart(1);
        world.ready(2);
    };
    for _ in 0..2 {
        live_and_die(&mut world, 6);
        come_back(&mut world);
    }
    live_and_die(&mut world, 56);
    come_back(&mut world);
    live_and_die(&mut world, 1);
    assert_eq!(world.worker(1).state, ProcessPhase::Failed);
    let cause = world.core.state().cause.as_ref().expect("a cause").text.clone();
    let reason = "and it was restarted 2 times within 1m after deaths at work";
    assert!(cause.ends_with(reason), "{cause}");
    assert_eq!((world.phase(), world.told.len()), (ClusterPhase::Degraded, 0), "the rest goes on");

    world.tell(Event::Restart(2));
    world.ready(2);
    live_and_die(&mut world, 0);
    assert_ne!(world.worker(1).state, ProcessPhase::Failed, "a person's word starts it afresh");
}

#[test]
fn a_worker_that_its_work_ends_without_restarts_allowed_stays_away_at_once() {
    let mut launch = launch(true, 1, false);
    launch.supervision.limit_at_work = Some(0);
    let mut world = up(launch);
    world.die(1, Exit::status(1));
    assert_eq!(world.worker(0).state, ProcessPhase::Failed);
}

#[test]
fn a_worker_that_ends_unasked_comes_back_whatever_its_status() {
    let mut world = up(launch(true, 1, false));
    world.die(1, Exit::status(0));
    assert_eq!(world.worker(0).state, ProcessPhase::Starting);
    let mut executed = launch(false, 2, false);
    executed.workers.iter_mut().for_each(|worker| worker.ready = ReadyWhen::Executed);
    let mut world = up(executed);
    world.die(1, Exit::status(0));
    assert_eq!(world.worker(1).state, ProcessPhase::Stopped, "a program may have done its work");
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.die(0, Exit::status(0));
    assert_eq!(world.outcome, Some(Outcome::Stopped { degraded: None }), "nobody is READY");
}

#[test]
fn a_scheduler_that_stays_waits_for_a_persons_word_when_every_worker_is_failed() {
    let mut launch = Launch { scheduler_stays: true, ..launch(true, 1, false) };
    launch.supervision.restart = RestartWhen::Never;
    let mut world = up(launch);
    world.die(1, Exit::status(9));
    assert_eq!((world.phase(), world.living.len()), (ClusterPhase::Degraded, 1));
    world.tell(Event::Restart(1));
    world.ready(1);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.die(1, Exit::status(9));
    world.tell(Event::Stop(Escalation::Graceful));
    world.die(0, Exit::status(0));
    assert!(matches!(world.outcome, Some(Outcome::Stopped { degraded: Some(_) })));
}

#[test]
fn when_no_worker_is_left_the_cluster_has_failed() {
    let mut alone = launch(true, 1, false);
    alone.supervision.restart = RestartWhen::Never;
    let mut world = up(alone);
    world.die(1, Exit::status(9));
    world.die(0, Exit::by_signal(15));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert_eq!(cause.process.as_deref(), Some("gpu0"));
}

#[test]
fn a_dead_scheduler_takes_the_workers_with_it_and_brings_them_back() {
    let mut world = up(launch(true, 2, false));
    world.die(0, Exit::by_signal(9));
    assert_eq!(world.told.len(), 2);
    let lost = |what: &What| matches!(what, What::Note { text } if text.contains("are lost"));
    assert!(world.records.iter().any(lost), "what the workers held");
    world.die(1, Exit::by_signal(15));
    world.now += Duration::from_millis(500);
    world.tell(Event::Tick);
    assert_eq!(world.living.len(), 1, "the scheduler waits for the last worker");
    world.die(2, Exit::by_signal(15));
    assert_eq!(world.living.len(), 1, "the scheduler");
    world.ready(0);
    world.ready(1);
    world.ready(2);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn a_scheduler_may_end_the_cluster_instead() {
    let mut ends = launch(true, 1, false);
    ends.supervision.scheduler_death = SchedulerDeath::EndCluster;
    let mut world = up(ends);
    world.die(0, Exit::status(0));
    world.die(1, Exit::status(0));
    assert!(matches!(world.outcome, Some(Outcome::Failed(_))));
}

fn leaves(world: &mut World, slot: usize, then: AfterLeaving) {
    let key = world.key(slot);
    world.tell(Event::Said {
        key,
        status: Status::Leaving { then, reason: "asked".to_owned(), lost: false },
    });
    world.die(slot, Exit::status(0));
}

#[test]
fn who_leaves_to_return_is_back_at_once_however_often() {
    let mut world = up(launch(true, 1, false));
    for _ in 0..10 {
        leaves(&mut world, 1, AfterLeaving::Return);
        assert_eq!(world.living.len(), 2, "without any delay");
        world.ready(1);
    }
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn who_is_retired_rests_and_a_scheduler_can_end_its_cluster() {
    let mut always = launch(true, 2, false);
    always.supervision.restart = RestartWhen::Always;
    let mut world = up(always);
    leaves(&mut world, 2, AfterLeaving::Rest);
    assert_eq!(world.worker(1).state, ProcessPhase::Stopped);
    leaves(&mut world, 0, AfterLeaving::EndCluster);
    world.die(1, Exit::status(0));
    assert!(matches!(world.outcome, Some(Outcome::Stopped { degraded: None })));
}

#[test]
fn what_does_not_end_is_killed_and_then_given_up() {
    let mut world = up(launch(false, 1, false));
    world.tell(Event::Stop(Escalation::Graceful));
    assert!(world.killed.is_empty());
    world.wait();
    assert_eq!(world.killed.len(), 1);
    world.wait();
    assert_eq!(world.outcome, Some(Outcome::Stopped { degraded: None }));
}

#[test]
fn a_second_request_kills_and_a_third_does_not_wait() {
    let mut world = up(launch(false, 2, false));
    world.tell(Event::Stop(Escalation::of_request(1)));
    world.tell(Event::Stop(Escalation::of_request(2)));
    assert_eq!((world.killed.len(), world.outcome.is_none()), (2, true));
    world.tell(Event::Stop(Escalation::of_request(3)));
    assert_eq!(world.outcome, Some(Outcome::Stopped { degraded: None }));
}

#[test]
fn a_gpu_is_waited_for_and_a_lost_one_is_not_tried_again() {
    let mut world = up(launch(false, 2, true));
    world.die(0, Exit::by_signal(9));
    world.now += Duration::from_secs(1);
    world.tell(Event::Tick);
    assert_eq!(world.living.len(), 1, "its GPU is not free yet");
    let held = GpuFinding::Held("GPU 0 is still held by process 9".to_owned());
    world.tell(Event::Gpu { slot: 0, finding: held });
    assert_eq!(world.living.len(), 2, "and is tried after the longest wait");
    world.ready(0);
    world.die(0, Exit::by_signal(9));
    let lost = GpuFinding::Lost("GPU 0 has fallen off the bus (Xid 79)".to_owned());
    world.tell(Event::Gpu { slot: 0, finding: lost });
    assert_eq!(world.phase(), ClusterPhase::Degraded);
    let cause = world.core.state().cause.expect("a cause");
    assert_eq!(cause.text, "gpu0 cannot be started again: GPU 0 has fallen off the bus (Xid 79)");
}

#[test]
fn a_worker_that_says_so_is_killed_at_another_share_of_its_memory_limit_or_never() {
    for percent in [Some(60.0), None] {
        let mut world = up(launch(false, 1, false));
        let key = world.key(0);
        world.tell(Event::Said { key, status: Status::KilledAt { percent } });
        assert_eq!(world.core.kill_percent(0), percent);
        world.tell(Event::MemoryReached { key, resident_bytes: 60, limit_bytes: 100 });
        assert_eq!(world.killed.contains(&key), percent.is_some());
        if percent.is_some() {
            world.die(0, Exit::by_signal(9));
            let exit = world.worker(0).last_exit.expect("an exit");
            assert!(exit.reason.starts_with("reached 60 % of its memory limit"), "{exit:?}");
        }
    }
}

#[test]
fn a_worker_at_its_memory_limit_is_killed_and_restarted_with_the_reason() {
    let mut world = up(launch(false, 1, false));
    let key = world.key(0);
    let event = Event::MemoryReached { key, resident_bytes: 95 << 20, limit_bytes: 100 << 20 };
    world.tell(event);
    assert!(world.killed.contains(&key), "a scheduler must see a death, not an end in order");
    world.die(0, Exit::by_signal(9));
    let exit = world.worker(0).last_exit.expect("an exit");
    let expected = "reached 95 % of its memory limit of 100 MiB (95.0 MiB in use); it was ended \
                    by signal 9 (SIGKILL)";
    assert_eq!(exit.reason, expected);
    world.wait_for_restart(0);
    world.ready(0);
}

#[test]
fn a_run_finishes_with_its_last_rank_and_fails_with_its_first() {
    let mut run = launch(false, 2, false);
    run.run_to_completion = true;
    let mut good = World::new(run.clone());
    good.ready(0);
    good.die(0, Exit::status(0));
    good.ready(1);
    good.die(1, Exit::status(0));
    assert_eq!(good.outcome, Some(Outcome::Finished));

    let mut bad = up(run);
    bad.die(1, Exit::status(5));
    bad.die(0, Exit::by_signal(15));
    let Some(Outcome::Failed(cause)) = &bad.outcome else { panic!("{:?}", bad.outcome) };
    assert_eq!((cause.process.as_deref(), cause.exit), (Some("gpu1"), Some(Exit::status(5))));
}

#[test]
fn workers_are_drained_and_added_in_their_order() {
    let mut world = up(launch(false, 4, false));
    world.tell(Event::Scale(2));
    world.die(2, Exit::by_signal(15));
    world.die(3, Exit::by_signal(15));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert_eq!(world.worker(3).state, ProcessPhase::Stopped);
    world.tell(Event::Scale(3));
    world.ready(2);
    assert_eq!((world.phase(), world.living.len()), (ClusterPhase::Ready, 3));
    assert_eq!(world.worker(2).restarts, 0, "it was wanted again, and had not died");
}

#[test]
fn standby_workers_start_when_they_are_asked_for() {
    let mut world = World::new(Launch { standby: 2, ..launch(true, 4, false) });
    (0..3).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert_eq!(world.worker(3).state, ProcessPhase::Stopped);
    world.tell(Event::Restart(4));
    world.ready(4);
    assert_eq!((world.worker(2).state, world.living.len()), (ProcessPhase::Stopped, 4));
    assert_eq!(world.worker(3).restarts, 0, "it is its first start");
    world.tell(Event::Scale(4));
    world.ready(3);
    assert_eq!((world.phase(), world.living.len()), (ClusterPhase::Ready, 5));
}

#[test]
fn without_its_guardian_a_cluster_ends_at_once() {
    let mut world = up(launch(false, 1, false));
    world.tell(Event::GuardianLost);
    assert!(matches!(world.outcome, Some(Outcome::Failed(_))));
}

#[test]
fn a_program_that_says_nothing_is_ready_when_it_is_executed() {
    let mut launch = launch(false, 1, false);
    launch.workers[0].ready = ReadyWhen::Executed;
    let mut world = World::new(launch);
    let key = world.key(0);
    world.tell(Event::StatusClosed { key });
    assert_eq!(world.phase(), ClusterPhase::Starting, "the shim has not reported yet");

    let mut launch = crate::core::world::launch(false, 1, false);
    launch.workers[0].ready = ReadyWhen::Executed;
    let mut world = World::new(launch);
    let key = world.key(0);
    let bound = Status::Bound { cpus: Default::default(), mems: Default::default(), notes: vec![] };
    world.tell(Event::Said { key, status: bound });
    world.tell(Event::StatusClosed { key });
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn the_first_start_has_one_time_limit_for_all() {
    let mut world = World::new(launch(true, 1, false));
    world.now += 2000 * MS;
    world.ready(0);
    // The worker began late, and what is left is its time.
    world.now += 1500 * MS;
    world.tell(Event::Tick);
    assert_eq!(world.phase(), ClusterPhase::Stopping);
}

#[test]
fn a_crash_bundle_belongs_to_its_exit() {
    let mut world = up(launch(false, 1, false));
    world.die(0, Exit::by_signal(11));
    let at = world.worker(0).last_exit.as_ref().expect("it died").at.clone();
    let bundled = |world: &mut World, at: &str| {
        let (at, path) = (at.to_owned(), "crashes/1".into());
        world.tell(Event::Bundled { slot: 0, at, path, gpu_errors: vec![] });
        world.worker(0).last_exit.as_ref().and_then(|exit| exit.bundle.clone())
    };
    assert_eq!(bundled(&mut world, "another time"), None);
    assert_eq!(bundled(&mut world, &at), Some("crashes/1".into()));
}

#[test]
fn a_worker_that_ends_because_fewer_were_wanted_returns_if_more_are() {
    let mut world = up(launch(false, 2, false));
    world.tell(Event::Scale(1));
    assert_eq!(world.worker(1).state, ProcessPhase::Stopping);
    world.tell(Event::Scale(2));
    world.die(1, Exit::by_signal(15));
    assert_eq!(world.living.len(), 2, "it was started again");
    world.ready(1);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}
