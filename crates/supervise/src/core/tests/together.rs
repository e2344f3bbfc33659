//! Workers that are started again together.

use super::*;
use crate::core::Moment;

fn ranks(workers: usize, spares: usize, restarts: u32) -> Launch {
    let mut launch = launch(false, workers + spares, true);
    launch.supervision.healthy_after = Span::secs(5);
    Launch { standby: spares, together: Some(restarts), run_to_completion: true, ..launch }
}

/// All become READY and stay so until a failure would be worth another start.
fn at_work(launch: Launch) -> World {
    let ranks = launch.workers.len() - launch.standby;
    let mut world = World::new(launch);
    (0..ranks).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    world.now += Duration::from_secs(6);
    world
}

/// The others end when told to, and their GPUs are free.
fn others_end(world: &mut World) {
    let living: Vec<usize> = world.living.values().copied().collect();
    for slot in living {
        world.die(slot, Exit::by_signal(15));
    }
    free(world);
}

fn free(world: &mut World) {
    for slot in std::mem::take(&mut world.awaited) {
        world.tell(Event::Gpu { slot, finding: GpuFinding::Free });
    }
}

fn meet(world: &mut World) {
    assert!(world.meeting);
    assert!(world.living.is_empty(), "nobody starts before");
    world.tell(Event::Met(Ok(Vec::new())));
}

#[test]
fn one_that_fails_takes_the_others_along_and_all_start_again() {
    let mut world = at_work(ranks(3, 0, 1));
    world.die(1, Exit::by_signal(9));
    assert_eq!(world.phase(), ClusterPhase::Recovering);
    assert_eq!(world.told.len(), 2, "the others are told to end");
    others_end(&mut world);
    meet(&mut world);
    assert_eq!(world.living.len(), 3);
    (0..3).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert!((0..3).all(|slot| world.worker(slot).restarts == 1));
    let told = |what: &What| matches!(what, What::Regrouping { restart: 1, limit: 1, .. });
    assert!(world.records.iter().any(told));
    world.die(2, Exit::status(3));
    let Some(cause) = world.core.state().cause else { panic!("a cause") };
    assert_eq!(cause.text, "gpu2 ended with status 3, and the ranks were started again once");
    others_end(&mut world);
    assert!(matches!(world.outcome, Some(Outcome::Failed(_))));
}

#[test]
fn a_failure_of_its_own_at_the_start_is_not_tried_again_and_one_from_outside_is() {
    let soon = |exit: Exit| {
        let mut world = World::new(ranks(2, 0, 3));
        (0..2).for_each(|slot| world.ready(slot));
        world.die(0, exit);
        others_end(&mut world);
        world
    };
    let world = soon(Exit::status(2));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    let expected = "it failed within 5s of its start, as it would again";
    assert!(cause.text.contains(expected), "{}", cause.text);
    let world = soon(Exit::by_signal(9));
    assert!(world.meeting && world.outcome.is_none());
}

#[test]
fn a_rank_may_fail_before_the_last_one_has_been_executed() {
    let dies_first = |exit: Exit, is_told_before: bool| {
        let mut launch = ranks(2, 0, 3);
        launch.workers.iter_mut().for_each(|worker| worker.ready = ReadyWhen::Executed);
        let mut world = World::new(launch);
        let key = world.key(0);
        let bound =
            Status::Bound { cpus: Default::default(), mems: Default::default(), notes: vec![] };
        world.tell(Event::Said { key, status: bound });
        if is_told_before {
            world.tell(Event::StatusClosed { key });
        }
        world.die(0, exit);
        others_end(&mut world);
        world
    };
    for is_told_before in [false, true] {
        let world = dies_first(Exit::status(2), is_told_before);
        let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
        assert!(cause.text.contains("it failed within 5s of its start"), "{}", cause.text);
        let world = dies_first(Exit::by_signal(9), is_told_before);
        assert!(world.meeting && world.outcome.is_none(), "{:?}", world.outcome);
    }
}

#[test]
fn starts_that_fail_soon_are_ever_further_apart() {
    let mut world = at_work(ranks(2, 0, 9));
    let mut waits = Vec::new();
    for _ in 0..5 {
        world.die(0, Exit::by_signal(9));
        others_end(&mut world);
        let before = world.now;
        if !world.meeting {
            world.wait();
        }
        waits.push(world.now - before);
        meet(&mut world);
        (0..2).for_each(|slot| world.ready(slot));
    }
    assert_eq!(waits[..2], [Moment::ZERO; 2], "it had been well, and the first is for free");
    assert!(waits[2] >= 100 * MS && waits[3] > waits[2] && waits[4] > waits[3], "{waits:?}");
}

#[test]
fn a_spare_takes_the_rank_of_a_lost_gpu_and_without_one_it_is_left_out() {
    let mut world = at_work(ranks(3, 1, 3));
    assert_eq!(world.worker(3).state, ProcessPhase::Stopped);
    let lose = |world: &mut World, slot: usize| {
        world.die(slot, Exit::status(1));
        let living: Vec<usize> = world.living.values().copied().collect();
        for other in living {
            world.die(other, Exit::by_signal(15));
        }
        world.awaited.remove(&slot);
        world.tell(Event::Gpu { slot, finding: GpuFinding::Lost("off the bus".to_owned()) });
        free(world);
    };
    lose(&mut world, 1);
    assert!(!world.meeting, "the spare's GPU is looked at, too");
    free(&mut world);
    meet(&mut world);
    let ranks = |world: &World| [0, 1, 2, 3].map(|slot| world.worker(slot).rank);
    assert_eq!(ranks(&world)[3], Some(1));
    [0, 2, 3].into_iter().for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert!(world.core.state().notes.contains(&"gpu1 is replaced by gpu3".to_owned()));
    world.now += Duration::from_secs(6);
    lose(&mut world, 3);
    meet(&mut world);
    assert_eq!(world.living.len(), 2);
    assert_eq!((ranks(&world)[0], ranks(&world)[2]), (Some(0), Some(1)));
}

#[test]
fn those_that_have_finished_start_again_with_the_others() {
    let mut world = at_work(ranks(2, 0, 1));
    world.die(0, Exit::status(0));
    assert_eq!(world.worker(0).state, ProcessPhase::Stopped);
    world.die(1, Exit::status(1));
    free(&mut world);
    meet(&mut world);
    assert_eq!(world.living.len(), 2);
    (0..2).for_each(|slot| world.ready(slot));
    (0..2).for_each(|slot| world.die(slot, Exit::status(0)));
    assert_eq!(world.outcome, Some(Outcome::Finished));
}

#[test]
fn a_restart_that_is_asked_for_is_one_of_all_and_does_not_count() {
    let mut world = at_work(ranks(2, 0, 0));
    world.tell(Event::Restart(1));
    others_end(&mut world);
    meet(&mut world);
    assert_eq!(world.living.len(), 2);
}

#[test]
fn an_end_while_ranks_are_told_of_each_other_is_one() {
    let mut world = at_work(ranks(2, 0, 1));
    world.die(1, Exit::by_signal(9));
    others_end(&mut world);
    let mut failing = at_work(ranks(2, 0, 1));
    world.tell(Event::Stop(Escalation::Graceful));
    assert!(matches!(world.outcome, Some(Outcome::Stopped { .. })));
    failing.die(1, Exit::by_signal(9));
    others_end(&mut failing);
    failing.tell(Event::Met(Err("no free port".to_owned())));
    let Some(Outcome::Failed(cause)) = failing.outcome else { panic!("{:?}", failing.outcome) };
    assert!(cause.text.ends_with("again: no free port"), "{}", cause.text);
}
