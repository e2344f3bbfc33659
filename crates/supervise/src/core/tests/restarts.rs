//! When a worker that died is started again.

use super::*;

#[test]
fn what_was_ready_is_started_again_at_once_the_first_time() {
    let mut world = up(launch(false, 1, false));
    world.die(0, Exit::status(1));
    assert_eq!(world.worker(0).state, ProcessPhase::Starting);
    world.die(0, Exit::status(1));
    assert_eq!(world.worker(0).state, ProcessPhase::Restarting, "it was not READY since");
}

#[test]
fn a_worker_that_dies_of_a_task_is_back_at_once_however_often_and_one_that_dies_idle_waits() {
    let mut world = up(launch(false, 1, false));
    for _ in 0..50 {
        let key = world.key(0);
        world.tell(Event::Said { key, status: Status::Working });
        world.die(0, Exit::status(1));
        assert_eq!(world.worker(0).state, ProcessPhase::Starting, "without any delay");
        world.ready(0);
    }
    assert_eq!(world.worker(0).deaths_at_work, 50);
    world.die(0, Exit::status(1));
    assert_eq!(world.worker(0).state, ProcessPhase::Starting, "its first end by itself");
    world.ready(0);
    world.die(0, Exit::status(1));
    assert_eq!(world.worker(0).state, ProcessPhase::Restarting);
}

#[test]
fn what_was_healthy_is_started_again_at_once_and_forgiven() {
    let mut world = up(launch(false, 1, false));
    for _ in 0..10 {
        world.now += Duration::from_secs(6);
        world.die(0, Exit::status(1));
        assert_eq!(world.worker(0).state, ProcessPhase::Starting);
        world.ready(0);
        let death = world.now;
        world.die(0, Exit::status(1));
        world.wait();
        assert!(world.now > death && world.now - death < 200 * MS, "the first delay again");
        world.ready(0);
    }
}

#[test]
fn workers_that_a_scheduler_sends_away_before_it_ends_return_to_the_next_one() {
    let mut world = up(launch(true, 3, false));
    leaves(&mut world, 3, AfterLeaving::Rest);
    world.now += Duration::from_secs(60);
    leaves(&mut world, 1, AfterLeaving::Rest);
    world.die(0, Exit::status(0));
    world.die(2, Exit::by_signal(15));
    world.now += Duration::from_millis(500);
    world.tell(Event::Tick);
    world.ready(0);
    world.ready(1);
    world.ready(2);
    assert_eq!(world.worker(2).state, ProcessPhase::Stopped, "it was retired long before");
    assert_eq!(world.phase(), ClusterPhase::Ready);
}
