//! The core against a world of workers, and small stories.

mod world;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::wire::tasks::Wishes;
use world::World;

proptest! {
    #[test]
    fn whatever_happens_nothing_is_lost_and_nothing_is_left(
        workers in 0usize..4, inline: bool,
        choices in proptest::collection::vec(any::<u32>(), 1..400),
    ) {
        let mut world = World::new(workers, inline);
        for choice in choices {
            world.step(choice);
        }
        world.settle();
        world.check_promises();
        world.release_all();
        let overview = world.core.overview();
        prop_assert_eq!((overview.tasks, overview.objects), (0, 0));
        for worker in world.workers.values() {
            prop_assert_eq!(worker.has.len(), 0, "{} keeps what nobody needs", worker.name);
        }
    }

    #[test]
    fn a_replayed_log_gives_the_same_decisions(
        choices in proptest::collection::vec(any::<u32>(), 1..300),
    ) {
        let mut world = World::new(3, false);
        for choice in choices {
            world.step(choice);
        }
        let log = postcard::to_stdvec(&world.log).expect("events are plain values");
        let log: Vec<(Event, u64)> = postcard::from_bytes(&log).expect("as written");
        let mut core = Core::new(Settings::default());
        let again: Vec<Vec<Action>> =
            log.into_iter().map(|(event, now)| core.handle(event, now)).collect();
        prop_assert_eq!(again, world.decisions);
    }
}

fn two_workers() -> World {
    World::new(2, false)
}

fn task(number: u64, inputs: &[ObjectId]) -> TaskSpec {
    TaskSpec {
        id: ObjectId::new(1, number),
        outputs: 1,
        function: "f".to_owned(),
        arguments: vec![],
        inputs: inputs.to_vec(),
        wishes: Wishes::default(),
    }
}

fn id(number: u64) -> ObjectId {
    ObjectId::new(1, number)
}

fn ran_on(world: &World, task: ObjectId) -> Vec<WorkerId> {
    let runs = world.decisions.iter().flatten().filter_map(|action| match action {
        Action::Run { worker, task: run, .. } if *run == task => Some(*worker),
        _ => None,
    });
    runs.collect()
}

#[test]
fn a_lost_result_is_computed_again_and_nothing_else_is() {
    let mut world = two_workers();
    for (number, inputs) in [(0, vec![]), (1, vec![id(0)]), (2, vec![id(1)])] {
        world.tell(Event::Submit { client: 1, task: task(number, &inputs) });
    }
    world.settle();
    // Only the last result is needed; the first one's bytes are freed, its record stays.
    for number in [0, 1] {
        world.tell(Event::Release { client: 1, object: id(number) });
    }
    world.settle();
    let worker = *ran_on(&world, id(2)).last().expect("it ran");
    world.workers.remove(&worker);
    world.tell(Event::WorkerLost { worker });
    world.settle();
    let runs = [0, 1, 2].map(|number| ran_on(&world, id(number)).len());
    assert_eq!(runs, [2, 2, 2]);
    world.tell(Event::Submit { client: 1, task: task(3, &[]) });
    world.settle();
    let worker = *ran_on(&world, id(3)).last().expect("it ran");
    let other = *world.workers.keys().find(|id| **id != worker).expect("another");
    world.workers.remove(&other);
    world.tell(Event::WorkerLost { worker: other });
    assert_eq!(ran_on(&world, id(3)).len(), 1, "its worker lives");
}

#[test]
fn a_task_that_kills_three_workers_is_failed_and_its_neighbours_are_not() {
    let mut world = two_workers();
    for number in 0..6 {
        world.tell(Event::Submit { client: 1, task: task(number, &[]) });
    }
    for _ in 0..3 {
        // Whoever has the killer dies; then the others do their work.
        let worker = world.out[&id(0)];
        world.workers.remove(&worker);
        world.tell(Event::WorkerLost { worker });
        world.join();
        for _ in 0..50 {
            let at = |world: &World| world.out.get(&id(0)).copied();
            for choice in 0..2 {
                let id = *world.workers.keys().nth(choice).expect("two workers");
                if at(&world) != Some(id) {
                    let choice = u32::try_from(choice).expect("small");
                    world.obey(choice);
                    world.end(choice, false);
                    world.report(choice);
                }
            }
        }
    }
    world.settle();
    let client = &world.clients[&1];
    assert!(matches!(client.failed.get(&id(0)), Some(TaskError::WorkersDied { deaths: 3, .. })));
    assert_eq!(client.failed.len(), 1, "{:?}", client.failed);
    assert_eq!(client.available.len(), 5);
}

#[test]
fn data_is_not_moved_when_moving_it_takes_longer_than_waiting() {
    let mut world = two_workers();
    world.tell(Event::Submit { client: 1, task: task(0, &[]) });
    world.settle();
    let home = ran_on(&world, id(0))[0];
    for number in 1..4 {
        world.tell(Event::Submit { client: 1, task: task(number, &[id(0)]) });
        world.settle();
    }
    let homes: BTreeSet<WorkerId> = (1..4).flat_map(|number| ran_on(&world, id(number))).collect();
    assert_eq!(homes, [home].into(), "{}", world.core.explain(id(3)));
}

#[test]
fn explain_says_what_a_task_waits_for() {
    let mut world = World::new(0, false);
    world.tell(Event::Submit { client: 1, task: task(0, &[]) });
    world.tell(Event::Submit { client: 1, task: task(1, &[id(0)]) });
    let why = world.core.explain(id(1));
    assert!(why.contains("waits for 1 inputs: 1:0"), "{why}");
    let mut pinned = task(2, &[]);
    pinned.wishes.on = Some("gpu9".to_owned());
    world.join();
    world.tell(Event::Submit { client: 1, task: pinned });
    let why = world.core.explain(id(2));
    assert!(why.contains("no present worker may run it: it must run on gpu9"), "{why}");
    world.settle();
    let why = world.core.explain(id(1));
    assert!(why.contains("has run; gpu1 was chosen as the first to finish"), "{why}");
}
