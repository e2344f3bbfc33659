//! What is said of processes that can't go on, and what becomes of them.

use crate::core::Event;
use crate::core::world::{launch, stall, up};
use crate::record::What;
use crate::{ClusterPhase, Outcome};
use cuda_cluster_wire::process::Exit;

#[test]
fn a_stall_is_shown_until_it_is_over() {
    let mut world = up(launch(false, 2, false));
    world.tell(Event::Stalled(Some(stall())));
    assert_eq!(world.core.state().notes, [stall().text]);
    assert_eq!(world.phase(), ClusterPhase::Ready, "nothing has failed");
    world.tell(Event::Stalled(None));
    assert!(world.core.state().notes.is_empty());
    let said = |what: &What| matches!(what, What::Stalled(_) | What::GoesOn);
    assert_eq!(world.records.iter().filter(|what| said(what)).count(), 2);
}

#[test]
fn that_nobody_can_look_is_said_until_somebody_can() {
    let mut world = up(launch(false, 2, false));
    world.tell(Event::unseen(Some("no process can be started".to_owned())));
    let note = "supervision.stalled_after: stalls are not noticed: no process can be started";
    assert_eq!(world.core.state().notes, [note]);
    world.tell(Event::Stalled(Some(stall())));
    assert_eq!(world.core.state().notes.len(), 2, "one does not take the other's place");
    world.tell(Event::unseen(None));
    assert_eq!(world.core.state().notes, [stall().text]);
    let said = |what: &What| matches!(what, What::Note { text } if text.contains("noticed"));
    assert_eq!(world.records.iter().filter(|what| said(what)).count(), 2);
}

#[test]
fn what_was_seen_before_something_died_is_nothing_now() {
    let mut launch = launch(false, 2, false);
    launch.supervision.end_when_stalled = true;
    let mut world = up(launch);
    world.die(1, Exit::by_signal(9));
    assert_eq!(world.phase(), ClusterPhase::Recovering);
    world.tell(Event::Stalled(Some(stall())));
    assert_eq!(world.phase(), ClusterPhase::Recovering);
    assert!(world.core.state().notes.is_empty());
}

#[test]
fn a_cluster_that_is_to_end_when_it_is_stalled_ends_with_that_as_its_cause() {
    let mut launch = launch(false, 2, false);
    launch.supervision.end_when_stalled = true;
    let mut world = up(launch);
    world.tell(Event::Stalled(Some(stall())));
    assert_eq!(world.phase(), ClusterPhase::Stopping);
    world.tell(Event::Stalled(None));
    world.die(1, Exit::by_signal(15));
    world.die(0, Exit::by_signal(9));
    let Some(Outcome::Failed(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert!(cause.stalled);
    assert_eq!((&*cause.text, cause.process.as_deref()), (&*stall().text, Some("gpu1")));
}
