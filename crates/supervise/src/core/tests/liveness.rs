//! Tests of processes that do not answer.

use std::collections::BTreeMap;

use super::*;
use cuda_cluster_wire::status::{Condition, DevicePool, MissingPort, PeerLanes, Work};

/// Three processes that are asked every second, and must answer within one.
fn asked() -> World {
    let mut launch = launch(true, 2, false);
    launch.supervision.answer_within = Span::secs(1);
    up(launch)
}

#[test]
fn who_answers_stays_ready_however_long() {
    let mut world = asked();
    for _ in 0..100 {
        world.wait();
        world.answer();
        assert_eq!(world.phase(), ClusterPhase::Ready);
    }
    let telling = |what: &&What| matches!(what, What::NotAnswering { .. } | What::Answers { .. });
    assert_eq!(world.records.iter().find(telling), None);
}

#[test]
fn a_process_that_hangs_is_not_ready_until_it_answers_again() {
    let mut world = asked();
    world.hung.insert(2);
    while world.phase() == ClusterPhase::Ready {
        world.wait();
        world.answer();
    }
    assert_eq!(world.phase(), ClusterPhase::Unresponsive);
    assert_eq!(world.worker(1).state, ProcessPhase::Unresponsive);
    assert_eq!(world.worker(1).not_answering_since.as_deref(), Some("1970-01-01T00:00:01.000Z"));
    assert_eq!(world.worker(0).state, ProcessPhase::Ready);
    world.now += Duration::from_secs(3600);
    world.tell(Event::Tick);
    world.answer();
    assert_eq!(world.worker(1).state, ProcessPhase::Unresponsive, "it is waited for");
    world.hung.clear();
    world.answer();
    assert_eq!(world.phase(), ClusterPhase::Ready);
    assert!(matches!(world.records.last(), Some(What::Cluster { .. })));
    assert!(world.records.iter().any(|what| matches!(what, What::Answers { .. })));
}

#[test]
fn a_stopped_process_is_not_ready_at_once_and_its_answer_tells_that_it_goes_on() {
    let mut world = asked();
    world.hung.insert(1);
    world.look(&[1]);
    assert_eq!(world.worker(0).standing(), "not answering since 00:00:00");
    world.look(&[]);
    assert_eq!(world.worker(0).state, ProcessPhase::Unresponsive, "it has not answered yet");
    world.hung.clear();
    world.answer();
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn a_program_that_hears_no_questions_is_ready_unless_it_is_stopped() {
    let mut ranks = launch(false, 2, false);
    ranks.supervision.answer_within = Span::secs(1);
    ranks.workers.iter_mut().for_each(|rank| rank.ready = ReadyWhen::Executed);
    let mut world = up(ranks);
    for _ in 0..10 {
        world.wait();
        world.answer();
        assert_eq!(world.phase(), ClusterPhase::Ready);
    }
    world.look(&[0]);
    assert_eq!(world.phase(), ClusterPhase::Unresponsive);
    world.look(&[]);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn a_process_that_hangs_too_long_is_restarted_where_that_is_wanted() {
    let mut launch = launch(false, 1, false);
    launch.supervision.answer_within = Span::secs(1);
    launch.supervision.unresponsive = Unresponsive::Restart;
    let mut world = up(launch);
    world.hung.insert(0);
    while world.told.is_empty() {
        world.wait();
        world.answer();
    }
    world.die(0, Exit::by_signal(9));
    let exit = world.worker(0).last_exit.expect("an exit");
    assert_eq!(exit.reason, "did not answer for 1s; it was ended by signal 9 (SIGKILL)");
    world.hung.clear();
    world.ready(0);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn an_end_that_the_guardian_does_not_report_is_told_all_the_same() {
    let mut world = asked();
    let key = world.key(1);
    world.tell(Event::Gone { key });
    assert_eq!(world.phase(), ClusterPhase::Ready, "the guardian is about to tell how it ended");
    world.guardian_hung = true;
    while world.worker(0).state == ProcessPhase::Ready {
        world.hung.insert(1);
        world.wait();
        world.answer();
    }
    while world.core.state().guardian_not_answering_since.is_none() {
        world.wait();
        world.answer();
    }
    assert_eq!(world.phase(), ClusterPhase::Unresponsive);
    world.guardian_hung = false;
    world.hung.clear();
    world.answer();
    world.die(1, Exit::by_signal(9));
    assert_eq!(world.phase(), ClusterPhase::Recovering, "it is restarted");
    world.ready(1);
    assert_eq!(world.phase(), ClusterPhase::Ready);
}

#[test]
fn a_first_start_does_not_wait_for_ever_for_one_that_stopped_answering() {
    let mut launch = launch(false, 2, false);
    launch.supervision.answer_within = Span::secs(1);
    let mut world = World::new(launch);
    world.ready(0);
    world.hung.insert(0);
    world.look(&[0]);
    world.ready(1);
    while world.phase() == ClusterPhase::Starting {
        world.wait();
        world.answer();
    }
    assert_eq!(world.logs_read, [0]);
    world.tell(Event::LogRead { slot: 0, log_tail: vec!["no memory".to_owned()] });
    world.die(0, Exit::by_signal(15));
    world.die(1, Exit::by_signal(15));
    let Some(Outcome::NotReady(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert_eq!(cause.text, "not ready within 3s: gpu0 (does not answer)");
    assert_eq!(cause.log_tail, ["no memory"]);
    let state = world.core.state();
    assert_eq!(state.cause.map(|cause| cause.log_tail), Some(vec!["no memory".to_owned()]));
}

#[test]
fn what_a_worker_reports_of_itself_is_shown_and_goes_with_its_process() {
    let mut world = up(launch(false, 2, false));
    let port = MissingPort { port: "mlx5_0:1".to_owned(), why: "it is DOWN".to_owned() };
    let lanes = vec![PeerLanes { peer: "gpu1".to_owned(), lanes: vec!["posix/memory".to_owned()] }];
    let condition = Condition {
        device_pool: Some(DevicePool { slabs: 3, ..DevicePool::default() }),
        missing_ports: vec![port.clone()],
        peers: Some(lanes.clone()),
        work: Some(Work { tasks: 7, ..Work::default() }),
        received_from: BTreeMap::from([("gpu1".to_owned(), 70)]),
    };
    let key = world.key(0);
    world.tell(Event::Said { key, status: Status::Alive { condition } });
    let shown = world.core.state().workers[0].clone();
    assert_eq!(shown.device_pool.map(|pool| pool.slabs), Some(3));
    assert_eq!(shown.work.map(|work| work.tasks), Some(7));
    assert_eq!(shown.received_from["gpu1"], 70);
    assert_eq!((shown.missing_ports, shown.peers.clone()), (vec![port], lanes));
    world.tell(Event::Said { key, status: Status::Alive { condition: Condition::default() } });
    let shown = world.core.state().workers[0].clone();
    assert_eq!((shown.device_pool, shown.missing_ports.len()), (None, 0));
    assert_eq!(shown.peers.len(), 1, "lanes that are not reported are as they were");
    world.die(0, Exit::by_signal(11));
    let shown = world.worker(0);
    assert_eq!((shown.device_pool, shown.peers.len()), (None, 0), "it is gone");
    assert_eq!((shown.work, shown.received_from.len()), (None, 0));
}

#[test]
fn answers_are_awaited_only_from_those_that_may_give_them() {
    let mut world = up(launch(false, 2, false));
    assert!(!world.core.awaits_answers());
    world.hung.insert(0);
    world.tell(Event::AskAll);
    assert!(world.core.awaits_answers());
    world.answer();
    assert!(world.core.awaits_answers(), "gpu0 has not answered yet");
    world.look(&[0]);
    assert!(!world.core.awaits_answers(), "a stopped process answers when it goes on");
}

#[test]
fn who_answered_while_the_supervisor_itself_was_stopped_is_not_blamed() {
    let mut launch = launch(false, 1, false);
    launch.supervision.answer_within = Span::secs(1);
    launch.supervision.unresponsive = Unresponsive::Restart;
    let mut world = up(launch);
    world.wait();
    assert!(!world.asked.is_empty(), "a question is on its way");
    world.now += Duration::from_secs(3600);
    world.tell(Event::Tick);
    assert_eq!(world.phase(), ClusterPhase::Ready, "its answer may wait to be read");
    world.answer();
    assert_eq!((world.phase(), world.told.len()), (ClusterPhase::Ready, 0));
}

#[test]
fn a_guardians_silence_lasts_from_the_question_to_the_answer() {
    let mut world = asked();
    world.now += Duration::from_secs(1000);
    world.guardian_hung = true;
    let silent = |what: &What| matches!(what, What::NotAnswering { .. });
    while !world.records.iter().any(silent) {
        world.wait();
        world.answer();
    }
    world.now += Duration::from_secs(5);
    world.guardian_hung = false;
    world.answer();
    let lasted = world.records.iter().find_map(|what| match what {
        What::Answers { after_ms } => Some(*after_ms),
        _ => None,
    });
    let lasted = lasted.expect("it answered");
    assert!((5_000..60_000).contains(&lasted), "{lasted}");
}

#[test]
fn of_many_processes_that_are_not_ready_in_time_a_few_are_named() {
    let mut world = World::new(launch(false, 300, false));
    while world.phase() == ClusterPhase::Starting {
        world.wait();
        world.answer();
    }
    for slot in 0..300 {
        world.die(slot, Exit::by_signal(15));
    }
    let Some(Outcome::NotReady(cause)) = &world.outcome else { panic!("{:?}", world.outcome) };
    assert!(
        cause.text.starts_with("not ready within ") && cause.text.contains(": gpu0 ("),
        "{}",
        cause.text
    );
    assert!(cause.text.ends_with(", and 292 more"), "{}", cause.text);
}
