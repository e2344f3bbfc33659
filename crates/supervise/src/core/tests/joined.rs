//! Workers that have joined a scheduler elsewhere, on both sides.

use super::super::Event;
use super::super::world::{World, launch, up};
use super::leaves;
use crate::record::What;
use crate::state::JoinedPhase;
use crate::{ClusterPhase, Escalation, Outcome, ProcessPhase};
use cuda_cluster_wire::process::Exit;
use cuda_cluster_wire::status::{AfterLeaving, JoinedWorker, Status};

#[test]
fn workers_that_a_scheduler_elsewhere_lets_go_end_their_cluster_which_says_why() {
    let mut world = up(launch(false, 2, false));
    leaves(&mut world, 0, AfterLeaving::Rest);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    leaves(&mut world, 1, AfterLeaving::Rest);
    assert_eq!(world.outcome, Some(Outcome::Stopped { degraded: None }));
    assert!(world.core.ended_from_elsewhere());
    let notes = world.core.state().notes;
    assert_eq!(notes, ["its workers are not wanted any more: asked"]);
}

#[test]
fn workers_whose_scheduler_elsewhere_is_lost_fail_for_that() {
    let mut world = up(launch(false, 2, false));
    leaves(&mut world, 0, AfterLeaving::Rest);
    let key = world.key(1);
    let (then, reason) = (AfterLeaving::Rest, "nobody answers".to_owned());
    world.tell(Event::Said { key, status: Status::Leaving { then, reason, lost: true } });
    world.die(1, Exit::status(0));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert!(cause.scheduler_lost && cause.text.ends_with("is lost: nobody answers"), "{cause:?}");
}

#[test]
fn one_that_starts_again_while_its_scheduler_elsewhere_ends_does_not_join_the_next_one_alone() {
    let mut world = up(launch(false, 3, false));
    world.die(0, Exit::by_signal(9));
    leaves(&mut world, 1, AfterLeaving::Disband);
    assert_eq!(world.outcome, None, "the third has not heard of it yet");
    leaves(&mut world, 2, AfterLeaving::Disband);
    assert_eq!(world.phase(), ClusterPhase::Stopping);
    world.die(0, Exit::by_signal(15));
    assert_eq!(world.outcome, Some(Outcome::Stopped { degraded: None }));
    assert!(world.core.ended_from_elsewhere());
    // One that was released alone is no reason for the others to end.
    let mut world = up(launch(false, 2, false));
    world.die(0, Exit::by_signal(9));
    leaves(&mut world, 1, AfterLeaving::Rest);
    assert_eq!(world.outcome, None);
}

#[test]
fn who_has_given_a_scheduler_elsewhere_up_looks_again_when_another_finds_it() {
    let mut world = up(launch(false, 2, false));
    world.die(1, Exit::by_signal(9));
    let key = world.key(0);
    let (then, reason) = (AfterLeaving::Rest, "nobody answers".to_owned());
    world.tell(Event::Said { key, status: Status::Leaving { then, reason, lost: true } });
    world.die(0, Exit::status(0));
    assert_eq!(world.outcome, None);
    assert_eq!(world.worker(0).state, ProcessPhase::Stopped);
    world.ready(1);
    world.ready(0);
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert_eq!(world.worker(0).state, ProcessPhase::Ready);
}

#[test]
fn who_joins_from_elsewhere_is_shown_and_who_goes_is_remembered_with_the_reason() {
    let mut world = up(launch(true, 1, false));
    let key = world.key(0);
    let joins = |world: &mut World, name: &str| {
        let worker =
            JoinedWorker { name: name.to_owned(), host: "h".to_owned(), ..JoinedWorker::default() };
        world.tell(Event::Said { key, status: Status::Joined { worker } });
    };
    let parts = |world: &mut World, name: &str, lost| {
        let (name, reason) = (name.to_owned(), "r".to_owned());
        world.tell(Event::Said { key, status: Status::Parted { name, lost, reason } });
    };
    let phases = |world: &World| -> Vec<(String, JoinedPhase)> {
        world.core.state().joined.into_iter().map(|one| (one.worker.name, one.state)).collect()
    };
    joins(&mut world, "a");
    joins(&mut world, "b");
    parts(&mut world, "a", true);
    parts(&mut world, "nobody", true);
    let (a, b) = ("a".to_owned(), "b".to_owned());
    assert_eq!(phases(&world), [(a.clone(), JoinedPhase::Lost), (b.clone(), JoinedPhase::Ready)]);
    joins(&mut world, "a");
    parts(&mut world, "b", false);
    assert_eq!(phases(&world), [(a, JoinedPhase::Ready), (b, JoinedPhase::Left)]);
    // However many come and go.
    for number in 0..200 {
        joins(&mut world, &number.to_string());
        parts(&mut world, &number.to_string(), false);
    }
    assert_eq!(phases(&world).len(), 65);
    world.die(0, Exit::by_signal(9));
    assert!(phases(&world).iter().all(|(_, phase)| *phase != JoinedPhase::Ready));
    let said = |what: &What| matches!(what, What::Parted { name, lost: true, .. } if name == "a");
    assert_eq!(world.records.iter().filter(|what| said(what)).count(), 2);
}

#[test]
fn whose_scheduler_ends_in_order_are_not_lost() {
    let mut world = up(launch(true, 1, false));
    let key = world.key(0);
    for name in ["a", "b"] {
        let worker = JoinedWorker { name: name.to_owned(), ..JoinedWorker::default() };
        world.tell(Event::Said { key, status: Status::Joined { worker } });
    }
    world.tell(Event::Stop(Escalation::Graceful));
    // The scheduler says so while it closes its connections, and of the second no more.
    let (name, reason) = ("a".to_owned(), "its connection broke".to_owned());
    world.tell(Event::Said { key, status: Status::Parted { name, lost: true, reason } });
    world.die(1, Exit::status(0));
    world.die(0, Exit::status(0));
    let parted: Vec<_> = world
        .records
        .iter()
        .filter_map(|what| match what {
            What::Parted { name, lost, reason, .. } => {
                Some((name.as_str(), *lost, reason.as_str()))
            }
            _ => None,
        })
        .collect();
    let why = "the scheduler ends with its cluster";
    assert_eq!(parted, [("a", false, why), ("b", false, why)]);
}
