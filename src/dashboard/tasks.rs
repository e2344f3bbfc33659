//! What a page may ask about tasks, and the answers.
//!
//! *Invariant:* nothing is kept between two requests: a page says what it has by a number, and a
//! scheduler is asked only for a page that shows its tasks.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::cluster::{self, Client, ClientError, Control, Paths, dask};
use crate::ids::ClusterName;
use crate::supervise::ClusterState;
use crate::text::in_full;
use crate::wire::tasks::{ObjectId, Recent, TaskRan};

/// Questions at a time: one that is not answered keeps a thread.
static QUESTIONS: Semaphore = Semaphore::const_new(8);

/// Processes that are sampled at a time.
static PROFILES: Semaphore = Semaphore::const_new(2);

/// How long a page waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The requests below a cluster's address.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/tasks", get(tasks))
        .route("/tasks/{task}", get(explain))
        .route("/dask", get(of_dask))
        .route("/profile/{process}", post(profile))
}

#[derive(Deserialize)]
struct Named {
    name: ClusterName,
}

#[derive(Deserialize)]
struct NamedTask {
    name: ClusterName,
    task: String,
}

#[derive(Deserialize)]
struct NamedProcess {
    name: ClusterName,
    process: String,
}

#[derive(Deserialize)]
struct After {
    #[serde(default)]
    after: u64,
}

async fn tasks(
    Path(Named { name }): Path<Named>,
    Query(After { after }): Query<After>,
) -> Response {
    match ask(name, move |client| client.recent(after)).await {
        Ok(recent) => Json(told(&recent)).into_response(),
        Err(refused) => refused,
    }
}

async fn explain(Path(NamedTask { name, task }): Path<NamedTask>) -> Response {
    let task: ObjectId = match task.parse() {
        Ok(task) => task,
        Err(error) => return refused(StatusCode::BAD_REQUEST, &in_full(&error)),
    };
    match ask(name, move |client| client.explain(task)).await {
        Ok(why) => Json(json!({ "task": task.to_string(), "why": why })).into_response(),
        Err(refused) => refused,
    }
}

/// What Dask's scheduler counts.
async fn of_dask(Path(Named { name }): Path<Named>) -> Response {
    let client = dask::Client::new(Paths::of(&name).root());
    match tokio::time::timeout(PATIENCE, client.tasks()).await {
        Ok(Ok(tasks)) => Json(tasks).into_response(),
        Ok(Err(error)) => refused(StatusCode::NOT_FOUND, &error),
        Err(_) => refused(StatusCode::GATEWAY_TIMEOUT, "the scheduler does not answer"),
    }
}

/// Samples a process of the cluster: not any process, and only one that its supervisor knows now.
async fn profile(Path(NamedProcess { name, process }): Path<NamedProcess>) -> Response {
    let Ok(_permit) = PROFILES.try_acquire() else {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "other processes are being sampled");
    };
    let control = Control::new(Paths::of(&name).control());
    let state = match control.read::<ClusterState>("/v1/state").await {
        Ok(state) => state,
        Err(error) => return refused(StatusCode::BAD_GATEWAY, &in_full(&error)),
    };
    let mut all = state.scheduler.iter().chain(&state.workers);
    let Some(pid) = all.find(|one| one.name == process).and_then(|one| one.pid) else {
        return refused(StatusCode::NOT_FOUND, "there is no such process now");
    };
    match cluster::profile_of(pid).await {
        Ok(profile) => Json(profile).into_response(),
        Err(why) => refused(StatusCode::BAD_GATEWAY, &why),
    }
}

/// Tasks as a page reads them: rows without names, because there may be thousands; and the time.
fn told(recent: &Recent) -> Value {
    let row = |one: &TaskRan| {
        let TaskRan { task, function, worker, ran, failed, stands_for } = one;
        let failed = u8::from(*failed);
        let (at, micros, bytes) = (ran.at, ran.micros, ran.fetched_bytes);
        json!([task.to_string(), function, worker, at, micros, bytes, failed, stands_for])
    };
    let rows: Vec<Value> = recent.tasks.iter().map(row).collect();
    let Recent { next, ran, functions, workers, .. } = recent;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    json!({ "next": next, "ran": ran, "now": now, "functions": functions, "workers": workers,
            "tasks": rows })
}

fn refused(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

/// Asks a cluster's scheduler, on a thread of its own.
async fn ask<T: Send + 'static>(
    name: ClusterName,
    question: impl FnOnce(&Client) -> Result<T, ClientError> + Send + 'static,
) -> Result<T, Response> {
    let Ok(permit) = QUESTIONS.try_acquire() else {
        let text = "the scheduler has not answered earlier questions";
        return Err(refused(StatusCode::SERVICE_UNAVAILABLE, text));
    };
    let asked = tokio::task::spawn_blocking(move || {
        let _until_it_is_answered = permit;
        question(&Client::connect(Paths::of(&name).root())?)
    });
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(Ok(answer))) => Ok(answer),
        Ok(Ok(Err(error))) => Err(refused(StatusCode::NOT_FOUND, &in_full(&error))),
        Ok(Err(error)) => Err(refused(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())),
        Err(_) => Err(refused(StatusCode::GATEWAY_TIMEOUT, "the scheduler does not answer")),
    }
}
