//! Processes that bring up the workers of other machines.

use super::*;

/// A scheduler, one worker, and two hosts.
fn on_three_hosts() -> Launch {
    let mut launch = launch(true, 3, false);
    launch.hosts = launch.workers.split_off(1);
    launch.hosts[0].name = "host-b".to_owned();
    launch.hosts[1].name = "host-c".to_owned();
    launch.scheduler_stays = true;
    launch
}

#[test]
fn it_is_ready_when_all_hosts_are() {
    let mut world = World::new(on_three_hosts());
    assert_eq!(world.living.len(), 3, "the hosts are reached meanwhile");
    world.ready(0);
    assert_eq!(world.living.len(), 4);
    (1..3).for_each(|slot| world.ready(slot));
    assert_eq!(world.phase(), ClusterPhase::Starting);
    world.ready(3);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    let state = world.core.state();
    let names = |all: &[ProcessState]| all.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&state.workers), ["gpu0"]);
    assert_eq!(names(&state.hosts), ["host-b", "host-c"]);
}

#[test]
fn a_host_that_fails_at_the_start_ends_the_others_and_is_the_cause() {
    let mut world = World::new(on_three_hosts());
    (0..3).for_each(|slot| world.ready(slot));
    let key = world.core.key_of(3).expect("a host");
    let reason = "ssh c: connection refused".to_owned();
    world.tell(Event::Said { key, status: Status::Failed { reason } });
    world.die(3, Exit::status(1));
    assert_eq!(world.phase(), ClusterPhase::Stopping);
    (0..3).for_each(|slot| world.die(slot, Exit::by_signal(15)));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert!(cause.text.starts_with("host-c could not start: ssh c: connection refused"));
}

#[test]
fn scaling_does_not_concern_hosts_and_one_that_is_lost_is_tried_again() {
    let mut world = World::new(on_three_hosts());
    (0..4).for_each(|slot| world.ready(slot));
    world.tell(Event::Scale(0));
    world.die(1, Exit::by_signal(15));
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert_eq!(world.living.len(), 3);
    world.die(2, Exit::status(1));
    assert_eq!(world.phase(), ClusterPhase::Recovering);
    assert_eq!(world.living.len(), 3, "it has been started again");
    world.ready(2);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn a_host_has_more_time_to_end_than_a_worker() {
    let mut world = World::new(on_three_hosts());
    (0..4).for_each(|slot| world.ready(slot));
    world.tell(Event::Stop(Escalation::Graceful));
    world.now += Duration::from_secs(2);
    world.tell(Event::Tick);
    assert!(world.core.slots[2].kill_at.is_some(), "not yet");
    assert!(world.core.slots[1].kill_at.is_none(), "killed");
}
