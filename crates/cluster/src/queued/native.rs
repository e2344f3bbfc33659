//! The native engine's scheduler and workers: what is sent, what runs, what is fetched.
//!
//! *Invariant:* a task is said to run only if its worker says so.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Answer, Told, spawn};
use crate::client::Client;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::text::in_full;
use cuda_cluster_why::evidence::{Fetch, Held, Placed, Tasks};
use cuda_cluster_wire::tasks::{AtWork, HeldTask, ObjectId, Queues, RunningTask, SentTask};

/// The most workers that are asked side by side.
const THREADS: usize = 16;

/// Asks the scheduler, if it is one of these, and then the workers; the answers go to `told`.
/// Returns what says whether a worker was not asked yet.
pub(super) fn ask(
    directory: PathBuf,
    asked: Vec<String>,
    told: Sender<Told>,
) -> impl Fn(&str) -> bool {
    let (scheduler, workers): (Vec<String>, Vec<String>) =
        asked.into_iter().partition(|name| name == SCHEDULER);
    let threads = workers.len().min(THREADS);
    let left = Arc::new(Mutex::new(workers));
    let unasked = Arc::clone(&left);
    if !scheduler.is_empty() {
        spawn(move || start(&directory, threads, &left, &told));
    }
    move |name| lock(&unasked).iter().any(|one| one == name)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the scheduler, then so many of those that are left at a time.
fn start(directory: &Path, threads: usize, left: &Arc<Mutex<Vec<String>>>, told: &Sender<Told>) {
    let client = match Client::connect(directory) {
        Ok(client) => client,
        Err(error) => {
            let _ = told.send((SCHEDULER.to_owned(), Err(in_full(&error))));
            return;
        }
    };
    let queues = client.queues().map_err(|error| in_full(&error));
    let queues = queues.map(|queues| -> Answer { Box::new(|tasks| *tasks = of(queues)) });
    let _ = told.send((SCHEDULER.to_owned(), queues));
    for _ in 0..threads {
        let (left, client, told) = (Arc::clone(left), client.clone(), told.clone());
        let next = move || lock(&left).pop();
        spawn(move || {
            while let Some(worker) = next() {
                let at_work = client.at_work(&worker).map_err(|error| in_full(&error));
                let name = worker.clone();
                let answer = at_work.map(|at_work| -> Answer {
                    Box::new(move |tasks| add(tasks, &worker, at_work))
                });
                let _ = told.send((name, answer));
            }
        });
    }
}

fn name(task: ObjectId, function: &str) -> String {
    format!("{task} ({function})")
}

/// What the scheduler says.
fn of(queues: Queues) -> Tasks {
    let held = queues.held.into_iter().map(|HeldTask { task, function, why, millis }| Held {
        name: name(task, &function),
        why,
        for_ms: Some(millis),
    });
    let placed = queues.sent.into_iter().map(|one| {
        let SentTask { task, function, worker, millis, dependents, more } = one;
        Placed {
            name: name(task, &function),
            function,
            rank: worker,
            for_ms: Some(millis),
            dependents,
            more,
            ..Placed::default()
        }
    });
    Tasks {
        waiting: queues.waiting,
        ready: queues.ready,
        unplaced: queues.parked,
        held: held.collect(),
        placed: placed.collect(),
        ..Tasks::default()
    }
}

/// Adds what a worker says.
fn add(tasks: &mut Tasks, worker: &str, AtWork { running, fetching }: AtWork) {
    for RunningTask { task, function, thread, millis } in running {
        let name = name(task, &function);
        let known = tasks.placed.iter().position(|known| known.name == name);
        let at = known.unwrap_or_else(|| {
            // It was sent since the scheduler was asked, or it is one of many.
            let rank = worker.to_owned();
            tasks.placed.push(Placed { name, function, rank, more: true, ..Placed::default() });
            tasks.placed.len() - 1
        });
        if let Some(placed) = tasks.placed.get_mut(at) {
            (placed.runs, placed.thread, placed.for_ms) = (true, Some(thread), Some(millis));
        }
    }
    tasks.fetches.extend(fetching.into_iter().map(|one| Fetch {
        name: format!("object {}", one.object),
        rank: worker.to_owned(),
        from: one.source,
        for_ms: one.millis,
        tasks: one.tasks,
        bytes: None,
    }));
}
