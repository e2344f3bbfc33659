//! The core against a simulated world of workers, and small scenarios.
//!
//! *Invariant:* after each event of the world, the core passes [`Core::sanity_check`].

mod machine;
mod told;
mod world;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use cuda_cluster_wire::tasks::Wishes;
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
        world.handle(Event::Submit { client: 1, task: task(number, &inputs) });
    }
    world.settle();
    // Only the last result is needed; the first one's bytes are freed, its record stays.
    for number in [0, 1] {
        world.handle(Event::Release { client: 1, object: id(number) });
    }
    world.settle();
    let worker = *ran_on(&world, id(2)).last().expect("it ran");
    world.workers.remove(&worker);
    world.handle(Event::WorkerLost { worker });
    world.settle();
    let runs = [0, 1, 2].map(|number| ran_on(&world, id(number)).len());
    assert_eq!(runs, [2, 2, 2]);
    world.handle(Event::Submit { client: 1, task: task(3, &[]) });
    world.settle();
    let worker = *ran_on(&world, id(3)).last().expect("it ran");
    let other = *world.workers.keys().find(|id| **id != worker).expect("another");
    world.workers.remove(&other);
    world.handle(Event::WorkerLost { worker: other });
    assert_eq!(ran_on(&world, id(3)).len(), 1, "its worker lives");
}

#[test]
fn a_task_that_kills_three_workers_is_failed_and_its_neighbours_are_not() {
    let mut world = two_workers();
    for number in 0..6 {
        world.handle(Event::Submit { client: 1, task: task(number, &[]) });
    }
    for _ in 0..3 {
        // Every worker that gets the killer dies; then the others do their work.
        let worker = world.out[&id(0)];
        world.workers.remove(&worker);
        world.handle(Event::WorkerLost { worker });
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
    world.handle(Event::Submit { client: 1, task: task(0, &[]) });
    world.settle();
    let home = ran_on(&world, id(0))[0];
    for number in 1..4 {
        world.handle(Event::Submit { client: 1, task: task(number, &[id(0)]) });
        world.settle();
    }
    let homes: BTreeSet<WorkerId> = (1..4).flat_map(|number| ran_on(&world, id(number))).collect();
    assert_eq!(homes, [home].into(), "{}", world.core.explain(id(3)));
}

#[test]
fn explain_says_what_a_task_waits_for() {
    let mut world = World::new(0, false);
    world.handle(Event::Submit { client: 1, task: task(0, &[]) });
    world.handle(Event::Submit { client: 1, task: task(1, &[id(0)]) });
    let why = world.core.explain(id(1));
    assert!(why.contains("waits for an input: 1:0"), "{why}");
    world.handle(Event::Submit { client: 1, task: task(3, &[id(0), id(1)]) });
    let why = world.core.explain(id(3));
    assert!(why.contains("waits for 2 inputs: 1:0, 1:1"), "{why}");
    let mut pinned = task(2, &[]);
    pinned.wishes.on = Some("gpu9".to_owned());
    world.join();
    world.handle(Event::Submit { client: 1, task: pinned });
    let why = world.core.explain(id(2));
    assert!(why.contains("no present worker may run it: it must run on gpu9"), "{why}");
    world.settle();
    let why = world.core.explain(id(1));
    assert!(why.contains("has run; gpu1 was chosen as the first to finish"), "{why}");
}

/// Four or eight workers in two halves: between the halves a link is a tenth as fast. Placement
/// can save the transfer of the tables to their splits (the inputs of a join come from everywhere,
/// wherever it runs), unless their number is a multiple of the workers': then taking turns chooses
/// by accident the worker that made them.
#[test]
fn placement_by_learned_bandwidth_beats_taking_turns_on_merge() {
    for (workers, parts) in [(4, 5), (4, 11), (4, 17), (4, 31), (8, 13), (8, 30), (8, 61)] {
        let rate = |a: usize, b: usize| {
            if (a < workers / 2) == (b < workers / 2) { 10e9 } else { 1e9 }
        };
        let took = |placement| {
            let settings = Settings { placement, ..Settings::default() };
            machine::merge(&settings, workers, parts, 64 << 20, rate)
        };
        let (learned, in_turn) = (took(Placement::EstimatedFinish), took(Placement::RoundRobin));
        let both = format!("µs and bytes: {learned:?} by learned bandwidth, {in_turn:?} in turn");
        assert!(2 * learned.0 < in_turn.0, "{workers} workers, {parts} parts, {both}");
    }
}

fn runs(actions: &[Action]) -> Vec<ObjectId> {
    let run = |action: &Action| match action {
        Action::Run { task, .. } => Some(*task),
        _ => None,
    };
    actions.iter().filter_map(run).collect()
}

/// A core with one worker, whose function takes a second.
fn one_slow_worker() -> (Core, WorkerId) {
    let mut core = Core::new(Settings::default());
    let resources = [("GPU".to_owned(), 1)].into();
    core.handle(Event::WorkerJoined { worker: 9, name: "gpu0".into(), threads: 1, resources }, 0);
    core.handle(Event::Submit { client: 1, task: task(0, &[]) }, 0);
    core.handle(done(9, 0), 0);
    (core, 9)
}

pub(super) fn lasting(micros: u64) -> Ran {
    Ran { micros, ..Ran::default() }
}

fn done(worker: WorkerId, number: u64) -> Event {
    let products = vec![Product::Inline(vec![])];
    Event::Done { worker, task: id(number), products, ran: lasting(1_000_000) }
}

#[test]
fn what_is_urgent_goes_first() {
    let (mut core, worker) = one_slow_worker();
    let mut begun = Vec::new();
    for number in 1..7 {
        let mut task = task(number, &[]);
        task.wishes.priority = if number == 6 { 5 } else { 0 };
        begun.extend(runs(&core.handle(Event::Submit { client: 1, task }, 0)));
    }
    for at in 0..6 {
        let next = id(0).distance(begun[at]);
        begun.extend(runs(&core.handle(done(worker, next), 0)));
    }
    // A second one waits at the worker behind the first; both were sent before the urgent one came.
    assert_eq!(begun, [1, 2, 6, 3, 4, 5].map(id));
}

#[test]
fn a_resource_is_promised_to_one_task_at_a_time() {
    let (mut core, worker) = one_slow_worker();
    let needy = |number| {
        let mut task = task(number, &[]);
        task.wishes.resources = [("GPU".to_owned(), 1)].into();
        Event::Submit { client: 1, task }
    };
    assert_eq!(runs(&core.handle(needy(1), 0)), [id(1)]);
    assert_eq!(runs(&core.handle(needy(2), 0)), []);
    let plain = Event::Submit { client: 1, task: task(3, &[]) };
    assert_eq!(runs(&core.handle(plain, 0)), [id(3)], "it needs none");
    assert_eq!(runs(&core.handle(done(worker, 1), 0)), [id(2)]);
}

#[test]
fn an_error_is_tried_again_as_often_as_was_asked_for() {
    let (mut core, worker) = one_slow_worker();
    let mut twice = task(1, &[]);
    twice.wishes.retries = 1;
    assert_eq!(runs(&core.handle(Event::Submit { client: 1, task: twice }, 0)), [id(1)]);
    let failed = || {
        let (worker_name, message) = ("gpu0".to_owned(), "no".to_owned());
        let error = TaskError::Failed { task: id(1), worker: worker_name, message };
        Event::Failed { worker, task: id(1), error, ran: lasting(1) }
    };
    assert_eq!(runs(&core.handle(failed(), 0)), [id(1)]);
    let actions = core.handle(failed(), 0);
    assert!(matches!(&actions[..], [Action::Unavailable { client: 1, .. }]), "{actions:?}");
}

#[test]
fn an_overview_has_the_functions_with_their_runs_and_what_waits() {
    let (mut core, worker) = one_slow_worker();
    for (number, function) in [(1, "rare"), (2, "often"), (3, "often"), (4, "waits")] {
        let task = TaskSpec { function: function.to_owned(), ..task(number, &[]) };
        core.handle(Event::Submit { client: 1, task }, 0);
    }
    for number in 1..4 {
        core.handle(done(worker, number), 0);
    }
    let overview = core.overview();
    let told = overview.functions.iter();
    let told: Vec<_> =
        told.map(|one| (one.name.as_str(), one.runs, one.active, one.seconds)).collect();
    assert_eq!(told[0], ("often", 2, 0, Some(1.0)), "{told:?}");
    assert!(told.contains(&("rare", 1, 0, Some(1.0))), "{told:?}");
    assert!(told.contains(&("waits", 0, 1, None)), "{told:?}");
    core.handle(done(worker, 4), 0);
    let after = core.overview().functions;
    let waits = after.iter().find(|one| one.name == "waits").map(|one| (one.runs, one.active));
    assert_eq!(waits, Some((1, 0)));
}

#[test]
fn an_idle_worker_asks_for_what_waits_at_a_busy_one() {
    let (mut core, worker) = one_slow_worker();
    for number in 1..3 {
        let event = Event::Submit { client: 1, task: task(number, &[]) };
        assert_eq!(runs(&core.handle(event, 0)), [id(number)]);
    }
    let (name, resources) = ("gpu1".to_owned(), BTreeMap::new());
    let joined = Event::WorkerJoined { worker: 10, name, threads: 1, resources };
    assert_eq!(core.handle(joined, 0), [Action::Retract { worker, task: id(2), unwanted: false }]);
    let actions = core.handle(Event::Returned { worker, task: id(2) }, 0);
    assert!(matches!(&actions[..], [Action::Run { worker: 10, .. }]), "{actions:?}");
    assert_eq!(core.overview().stolen, 1);
}

#[test]
fn what_no_planned_worker_can_run_is_refused_and_what_an_absent_one_can_waits() {
    let planned = ["gpu0", "gpu1"].map(|name| (name.to_owned(), [("GPU".to_owned(), 1)].into()));
    let mut core = Core::new(Settings { planned: planned.into(), ..Settings::default() });
    let mut submit = |number, on: Option<&str>, gpus| {
        let mut task = task(number, &[]);
        task.wishes.on = on.map(str::to_owned);
        task.wishes.resources = [("GPU".to_owned(), gpus)].into();
        core.handle(Event::Submit { client: 1, task }, 0)
    };
    let reason = |actions: Vec<Action>| match &actions[..] {
        [Action::Unavailable { error, .. }] => error.to_string(),
        _ => panic!("{actions:?}"),
    };
    assert!(reason(submit(0, None, 2)).ends_with("no worker that may run it has GPU=2"));
    assert!(reason(submit(1, Some("gpu7"), 1)).ends_with("there is no worker gpu7"));
    assert_eq!(submit(2, Some("gpu1"), 1), []);
}

#[test]
fn an_input_that_can_never_be_fetched_fails_its_task_in_the_end() {
    let mut world = two_workers();
    world.handle(Event::Submit { client: 1, task: task(0, &[]) });
    world.settle();
    world.handle(Event::Submit { client: 1, task: task(1, &[id(0)]) });
    for _ in 0..1000 {
        if let Some(&worker) = world.out.get(&id(1)) {
            world.worker(worker).runs.remove(&id(1));
            world.worker(worker).orders.clear();
            let (task, object) = (id(1), id(0));
            let (source, missing) = (None, false);
            world.handle(Event::Unreachable { worker, task, object, source, missing });
        }
    }
    let error = &world.clients[&1].failed[&id(1)];
    assert!(error.to_string().contains("input 1:0 could not be fetched, 100 times"), "{error}");
}

#[test]
fn a_copy_that_could_not_be_fetched_is_asked_for_again_and_does_not_count() {
    let mut world = two_workers();
    world.handle(Event::Put { client: 1, object: id(0), product: Product::Stored(5000), on: None });
    world.settle();
    let holders = |world: &World| -> Vec<_> {
        let workers = world.workers.iter().filter(|(_, worker)| worker.has.contains(&id(0)));
        workers.map(|(id, _)| *id).collect()
    };
    let home = holders(&world);
    let other = *world.workers.keys().find(|worker| !home.contains(worker)).expect("another");
    world.handle(Event::Replicate { client: 1, object: id(0), copies: 2 });
    world.worker(other).orders.clear();
    world.handle(Event::NotFetched { worker: other, object: id(0) });
    world.handle(Event::Replicate { client: 1, object: id(0), copies: 2 });
    world.settle();
    assert_eq!(holders(&world).len(), 2, "the second time it is fetched");
}

#[test]
fn a_given_object_outlives_a_way_that_is_broken_for_a_while() {
    let mut world = two_workers();
    world.handle(Event::Put { client: 1, object: id(0), product: Product::Stored(5000), on: None });
    world.settle();
    let home = *world.workers.iter().find(|(_, w)| w.has.contains(&id(0))).expect("it is there").0;
    let mut elsewhere = task(1, &[id(0)]);
    let other = world.workers.iter().find(|(id, _)| **id != home).expect("another");
    let (worker, name) = (*other.0, other.1.name.clone());
    elsewhere.wishes.on = Some(name);
    world.handle(Event::Submit { client: 1, task: elsewhere });
    for _ in 0..20 {
        world.worker(worker).orders.clear();
        let (task, object, source) = (id(1), id(0), Some(home));
        world.handle(Event::Unreachable { worker, task, object, source, missing: false });
    }
    world.settle();
    let client = &world.clients[&1];
    assert!(client.available.contains(&id(1)), "{:?}", client.failed);
}

#[test]
fn a_given_object_that_its_only_holder_does_not_have_is_lost() {
    let mut world = two_workers();
    world.handle(Event::Put { client: 1, object: id(0), product: Product::Stored(5000), on: None });
    world.settle();
    let home = *world.workers.iter().find(|(_, w)| w.has.contains(&id(0))).expect("it is there").0;
    world.handle(Event::Submit { client: 1, task: task(1, &[id(0)]) });
    let (worker, object, source) = (world.out[&id(1)], id(0), Some(home));
    world.worker(worker).orders.clear();
    world.handle(Event::Unreachable { worker, task: id(1), object, source, missing: true });
    let failed = &world.clients[&1].failed;
    assert!(matches!(failed.get(&id(1)), Some(TaskError::Lost { .. })), "{failed:?}");
}

#[test]
fn a_scheduler_that_holds_enough_takes_no_more_until_something_is_released() {
    let settings = Settings { task_limit: 2, bytes_limit: 10, ..Settings::default() };
    let mut core = Core::new(settings);
    let refused = |actions: Vec<Action>| {
        actions.iter().any(|action| matches!(action, Action::Unavailable { .. }))
    };
    let put = |number| {
        let product = Product::Inline(vec![1; 11]);
        Event::Put { client: 1, object: id(number), product, on: None }
    };
    let submit = |number| Event::Submit { client: 1, task: task(number, &[]) };
    assert!(!refused(core.handle(put(0), 0)));
    assert!(refused(core.handle(put(1), 0)), "eleven bytes are more than ten");
    assert!(refused(core.handle(submit(2), 0)));
    core.handle(Event::Release { client: 1, object: id(0) }, 0);
    assert!(!refused(core.handle(submit(3), 0)));
    assert!(!refused(core.handle(submit(4), 0)));
    assert!(refused(core.handle(submit(5), 0)), "three tasks are more than two");
    core.sanity_check();
}

#[test]
fn arguments_may_be_as_long_as_the_limit() {
    let (mut core, _) = one_slow_worker();
    let mut submit = |number, length| {
        let task = TaskSpec { arguments: vec![0; length], ..task(number, &[]) };
        let actions = core.handle(Event::Submit { client: 1, task }, 0);
        actions.iter().any(|action| matches!(action, Action::Unavailable { .. }))
    };
    assert!(!submit(1, ARGUMENTS_LIMIT));
    assert!(submit(2, ARGUMENTS_LIMIT + 1));
}

#[test]
fn what_another_client_holds_outlives_its_maker() {
    let mut world = two_workers();
    world.handle(Event::Put { client: 1, object: id(0), product: Product::Stored(5000), on: None });
    world.settle();
    world.handle(Event::Hold { client: 2, object: id(0) });
    assert!(world.clients[&2].available.contains(&id(0)));
    world.handle(Event::Release { client: 1, object: id(0) });
    world.settle();
    assert_eq!(world.core.overview().objects, 1);
    world.handle(Event::Release { client: 2, object: id(0) });
    world.settle();
    assert_eq!(world.core.overview().objects, 0);
}

#[test]
fn copies_are_fetched_by_workers_that_have_none() {
    let mut world = World::new(3, false);
    world.handle(Event::Put { client: 1, object: id(0), product: Product::Stored(5000), on: None });
    world.settle();
    world.handle(Event::Replicate { client: 1, object: id(0), copies: 2 });
    let fetches = |world: &World| {
        let actions = world.decisions.iter().flatten();
        actions.filter(|action| matches!(action, Action::Fetch { .. })).count()
    };
    assert_eq!(fetches(&world), 1, "one has it already");
    world.settle();
    world.handle(Event::Replicate { client: 1, object: id(0), copies: 2 });
    assert_eq!(fetches(&world), 1, "there are as many as were asked for");
}

#[test]
fn the_duration_of_a_function_follows_its_runs() {
    let (mut core, worker) = one_slow_worker();
    let learned = |core: &Core| core.functions[0].seconds.expect("it has run");
    assert!((learned(&core) - 1.0).abs() < 1e-9);
    core.handle(Event::Submit { client: 1, task: task(1, &[]) }, 0);
    let products = vec![Product::Inline(vec![])];
    core.handle(Event::Done { worker, task: id(1), products, ran: lasting(3_000_000) }, 0);
    assert!((1.0..3.0).contains(&learned(&core)), "{}", learned(&core));
    let before = learned(&core);
    core.handle(Event::Submit { client: 1, task: task(2, &[]) }, 0);
    let products = vec![Product::Inline(vec![])];
    core.handle(Event::Done { worker, task: id(2), products, ran: lasting(1_000) }, 0);
    assert!(learned(&core) < before);
}

#[test]
fn a_worker_expects_the_data_of_the_tasks_that_it_still_has() {
    let mut core = Core::new(Settings::default());
    for (worker, name) in [(1, "gpu0"), (2, "gpu1")] {
        let (name, resources) = (name.to_owned(), BTreeMap::new());
        core.handle(Event::WorkerJoined { worker, name, threads: 2, resources }, 0);
    }
    core.handle(Event::Submit { client: 1, task: task(0, &[]) }, 0);
    let home = core.tasks.iter().find_map(|(_, task)| match task.state {
        State::Sent => Some(task.placed.worker),
        _ => None,
    });
    let home = home.expect("it was sent");
    let products = vec![Product::Stored(1 << 30)];
    core.handle(Event::Done { worker: home, task: id(0), products, ran: lasting(1) }, 0);
    let other = if home == 1 { 2 } else { 1 };
    for number in [1, 2] {
        let mut task = task(number, &[id(0)]);
        task.wishes.on = Some(if other == 1 { "gpu0" } else { "gpu1" }.to_owned());
        core.handle(Event::Submit { client: 1, task }, 0);
    }
    let expected = |core: &Core| core.workers[&other].incoming_seconds;
    let both = expected(&core);
    assert!(both > 0.0);
    let products = vec![Product::Inline(vec![])];
    core.handle(Event::Done { worker: other, task: id(1), products, ran: lasting(1) }, 0);
    assert!(expected(&core) < both, "{} after {both}", expected(&core));
}

#[test]
fn a_record_is_small() {
    // A million tasks that wait are a million of both, and their places in a queue and a table.
    assert!(size_of::<Task>() <= 152, "{}", size_of::<Task>());
    assert!(size_of::<Object>() <= 88, "{}", size_of::<Object>());
    assert_eq!(size_of::<Entry>(), 16);
}
