//! What is told about tasks: what waits for what, functions, and the last that ran.

use super::super::*;
use super::{done, id, lasting, one_slow_worker, runs, task};
use cuda_cluster_wire::tasks::{Wait, Waiting};

fn named(number: u64, function: &str, inputs: &[ObjectId]) -> Event {
    let task = TaskSpec { function: function.to_owned(), ..task(number, inputs) };
    Event::Submit { client: 1, task }
}

fn failed(worker: WorkerId, number: u64) -> Event {
    let (name, message) = ("gpu0".to_owned(), "no".to_owned());
    let error = TaskError::Failed { task: id(number), worker: name, message };
    Event::Failed { worker, task: id(number), error, ran: lasting(5) }
}

#[test]
fn what_waits_is_told_by_what_it_waits_for_with_examples() {
    let (mut core, worker) = one_slow_worker();
    core.handle(named(1, "load", &[]), 0);
    core.handle(named(2, "add", &[id(1)]), 0);
    core.handle(named(3, "add", &[id(2)]), 0);
    let mut elsewhere = task(4, &[]);
    elsewhere.wishes.on = Some("gpu7".to_owned());
    core.handle(Event::Submit { client: 1, task: elsewhere }, 0);
    for number in 5..50 {
        core.handle(named(number, "load", &[]), 0);
    }
    let told = core.overview();
    let of = |wait: Wait| -> Option<&Waiting> { told.waiting.iter().find(|one| one.wait == wait) };
    let inputs = of(Wait::Input).expect("two wait for inputs");
    // The third waits for one that waits itself.
    assert_eq!((inputs.tasks, &inputs.examples[..]), (2, &[id(2).to_string()][..]));
    let able = of(Wait::AbleWorker).expect("one waits for a worker that is not there");
    assert_eq!((able.tasks, &able.examples[..]), (1, &[id(4).to_string()][..]));
    let others = |wait| of(wait).map_or(0, |waiting| waiting.tasks);
    let sent = told.workers[0].in_flight;
    assert_eq!(others(Wait::Room) + others(Wait::ChosenWorker) + sent, 46);
    assert!(told.waiting.iter().all(|waiting| waiting.examples.len() <= 5));
    let load = told.functions.iter().find(|one| one.name == "load").expect("it is the most");
    assert_eq!((load.active, load.sent, load.failed, load.runs), (46, sent, 0, 0));

    // What can't run because its input failed has failed, too.
    core.handle(failed(worker, 1), 0);
    let told = core.overview();
    let of = |name: &str| told.functions.iter().find(|one| one.name == name).expect("known").failed;
    assert_eq!((of("load"), of("add")), (1, 2));
    assert!(told.waiting.iter().all(|waiting| waiting.wait != Wait::Input));
}

#[test]
fn the_last_tasks_that_ran_are_told_with_when_where_and_what_came() {
    let (mut core, worker) = one_slow_worker();
    core.handle(named(1, "load", &[]), 0);
    let ran = Ran { at: 1_000_000, micros: 70, fetched_bytes: 4096 };
    let products = vec![Product::Inline(vec![])];
    core.handle(Event::Done { worker, task: id(1), products, ran }, 0);
    let told = core.recent(0);
    assert_eq!((told.next, told.ran, told.tasks.len()), (2, 2, 2));
    let last = told.tasks[1];
    assert_eq!(told.functions[last.function as usize], "load");
    assert_eq!(told.workers[last.worker as usize], "gpu0");
    assert_eq!((last.task, last.ran, last.failed, last.stands_for), (id(1), ran, false, 1));

    // Only what is new.
    core.handle(named(2, "add", &[]), 0);
    core.handle(failed(worker, 2), 0);
    let told = core.recent(told.next);
    assert_eq!((told.tasks.len(), told.tasks[0].failed, told.tasks[0].ran.micros), (1, true, 5));
    assert_eq!(told.functions, ["add"], "names that are in use alone");
    // Of a worker that is gone, too.
    core.handle(Event::WorkerLost { worker }, 0);
    assert_eq!(core.recent(0).tasks.len(), 3);
}

#[test]
fn a_task_that_nobody_wants_any_more_has_not_failed() {
    let (mut core, worker) = one_slow_worker();
    assert_eq!(runs(&core.handle(named(1, "load", &[]), 0)), [id(1)]);
    core.handle(Event::Cancel { client: 1, task: id(1) }, 0);
    core.handle(failed(worker, 1), 0);
    let told = core.recent(1);
    assert!(!told.tasks[0].failed, "{:?}", told.tasks[0]);
    core.handle(named(2, "load", &[]), 0);
    core.handle(done(worker, 2), 0);
}
