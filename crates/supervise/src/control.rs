//! The control API: HTTP on the run directory's socket, for this user alone.
//!
//! | request | answer |
//! |---|---|
//!
//! `GET /health`
//! 200 if READY and all processes answer, otherwise 503; the phase
//!
//! | `GET /metrics` | the state as numbers, for Prometheus |
//! | `GET /v1/state` | the state |
//!
//! `GET /v1/state?fresh=true`
//! the same, after the processes have been asked, as `ps -o json`
//!
//! `GET /v1/state?wide=true`
//! the same, with threads and memory measured
//!
//! | `GET /v1/plan` | `plan.json` |
//!
//! `GET /v1/logs?process=NAME&tail=N&since=TIME`
//! lines of a log, each as `{at, text}`
//!
//!
//! `GET /v1/events`
//! server-sent events, one per record; the cluster's end is the last
//!
//! | `POST /v1/stop?how=graceful\|kill\|abandon` | 202 |
//! | `POST /v1/restart/NAME` | 202; 404 for an unknown name |
//! | `POST /v1/scale?workers=N` | 202; 400 for more than are planned |
//!
//! State, health and metrics are those after checking whether any process is stopped; for metrics
//! the processes are asked, too.
//!
//! *Invariant:* connections of other users are closed before anything is read from them.

use std::convert::Infallible;
use std::future::IntoFuture;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};

use super::gpu::GpuWatch;
use super::handle::{Ask, ControlRequest, Handle, RequestError, StartError};
use super::readings::Readings;
use super::{ClusterPhase, ClusterState, Escalation, Launch, ProcessState, Record, metrics};
use cuda_cluster_machine::os::log_file::{LogReader, Selection};
use cuda_cluster_machine::os::own_user::OwnUser;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::os::{binding, process};

struct Shared {
    handle: Handle,
    paths: Paths,
    readings: Arc<Readings>,
    /// Whether the cluster has ended, and all its records were sent.
    over: watch::Receiver<bool>,
}

/// How long to wait for a check of the processes, which takes far less than 1 ms each, or for their
/// answers.
const LOOK: Duration = Duration::from_secs(1);

/// How long to wait until subscribers have received pending records.
const FAREWELL: Duration = Duration::from_secs(2);

/// The running control API; dropping it stops it.
#[derive(Debug)]
pub(super) struct Control {
    task: JoinHandle<()>,
    over: watch::Sender<bool>,
    readings: Arc<Readings>,
}

impl Control {
    /// Starts to listen on the control socket of a cluster that has just begun, and to read what
    /// its processes use.
    pub(super) fn begin(
        paths: &Paths,
        handle: Handle,
        launch: &Launch,
        gpus: Option<Arc<dyn GpuWatch>>,
        began: SystemTime,
    ) -> Result<Self, StartError> {
        let readings = Readings::new(launch, gpus, paths, began, handle.state.clone());
        serve(paths, handle, Arc::new(readings))
            .map_err(|source| StartError::Control { path: paths.control(), source })
    }

    /// The same once more, where the socket has gone.
    pub(super) fn again(&self, paths: &Paths, handle: Handle) -> io::Result<Self> {
        serve(paths, handle, Arc::clone(&self.readings))
    }

    /// Stops accepting connections, and lets existing ones finish.
    pub(super) async fn finish(&mut self) {
        if !self.over.send_replace(true) {
            self.readings.end();
            // Connections that do not read are not waited for any longer.
            let _ = tokio::time::timeout(FAREWELL, &mut self.task).await;
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts to listen on the control socket, and reads what the processes use as long as it does.
fn serve(paths: &Paths, handle: Handle, readings: Arc<Readings>) -> io::Result<Control> {
    let listener = OwnUser::bind(&paths.control())?;
    let (over, ended) = watch::channel(false);
    let (kept, read) = (Arc::clone(&readings), Arc::clone(&readings));
    let shared = Shared { handle, paths: paths.clone(), readings: read, over: ended.clone() };
    let router = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/state", get(state))
        .route("/v1/logs", get(logs))
        .route("/v1/plan", get(plan))
        .route("/v1/events", get(events))
        .route("/v1/stop", post(stop))
        .route("/v1/restart/{process}", post(restart))
        .route("/v1/scale", post(scale))
        .fallback(|| async { (StatusCode::NOT_FOUND, "there is no such request") })
        .with_state(Arc::new(shared));
    let serve = axum::serve(listener, router).with_graceful_shutdown(told(ended));
    let task = tokio::spawn(async move {
        tokio::select! {
            // The server runs until it is stopped, and does not fail before.
            _ = serve.into_future() => {}
            () = kept.keep() => {}
        }
    });
    Ok(Control { task, over, readings })
}

/// Completes when the cluster has ended; never if another server has taken over.
async fn told(mut over: watch::Receiver<bool>) {
    if over.wait_for(|over| *over).await.is_err() {
        std::future::pending().await
    }
}

impl Shared {
    /// The state after a check of the processes.
    async fn checked_state(&self) -> ClusterState {
        self.state_after(|answer| ControlRequest::Look { answer }).await
    }

    /// The state with what the processes report about themselves now.
    async fn fresh_state(&self) -> ClusterState {
        self.checked_state().await;
        self.state_after(|answer| ControlRequest::Ask { answer }).await
    }

    async fn state_after(
        &self,
        request: impl FnOnce(oneshot::Sender<()>) -> ControlRequest,
    ) -> ClusterState {
        let (answer, done) = oneshot::channel();
        if self.handle.requests.send(request(answer)).is_ok() {
            // An ending cluster does not check any more, and its last state is correct.
            let _ = tokio::time::timeout(LOOK, done).await;
        }
        self.handle.state.borrow().clone()
    }
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let phase = shared.checked_state().await.state;
    let status = match phase {
        ClusterPhase::Ready => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(serde_json::json!({ "state": phase }))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let text = metrics::render(&shared.fresh_state().await);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

#[derive(Deserialize)]
struct StateQuery {
    #[serde(default)]
    fresh: bool,
    #[serde(default)]
    wide: bool,
}

async fn state(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<StateQuery>,
) -> Json<ClusterState> {
    let mut state = match query.fresh || query.wide {
        true => shared.fresh_state().await,
        false => shared.checked_state().await,
    };
    state.notes.extend(process::own_program_note());
    shared.readings.add_to(&mut state);
    for process in state.processes_mut() {
        if query.fresh || query.wide {
            measure(process);
        }
        if query.wide {
            observe(process);
        }
    }
    Json(state)
}

/// Measures the placement of running processes. A process that ends meanwhile is skipped.
fn observe(process: &mut ProcessState) {
    let Some(pid) = process.pid else { return };
    process.observed = binding::observe(pid, &process.asked).ok();
}

/// Measures what running processes use.
fn measure(process: &mut ProcessState) {
    let Some(pid) = process.pid else { return };
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).ok();
    process.resident_bytes = process::resident_bytes(pid);
    process.cpu_ms = process::cpu_time(pid).and_then(milliseconds);
    process.age_ms = process::age(pid).and_then(milliseconds);
}

#[derive(Deserialize)]
struct LogsQuery {
    process: String,
    tail: Option<usize>,
    since: Option<String>,
}

async fn logs(State(shared): State<Arc<Shared>>, Query(query): Query<LogsQuery>) -> Response {
    let known = {
        let state = shared.handle.state.borrow();
        state.processes().any(|process| process.name == query.process)
    };
    if !known {
        let text = format!("there is no process {:?}\n", query.process);
        return (StatusCode::NOT_FOUND, text).into_response();
    }
    let since = query.since.as_deref().map(humantime::parse_rfc3339_weak).transpose();
    let Ok(since) = since else {
        let text = "since is not a time like 2026-01-31T12:00:00Z\n";
        return (StatusCode::BAD_REQUEST, text).into_response();
    };
    let wanted = Selection { tail: query.tail, since };
    match LogReader::open(&shared.paths.log(&query.process), wanted) {
        Ok((_, lines)) => Json(lines).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn plan(State(shared): State<Arc<Shared>>) -> Response {
    match tokio::fs::read(shared.paths.plan()).await {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::NOT_FOUND, format!("no plan: {error}\n")).into_response(),
    }
}

async fn events(
    State(shared): State<Arc<Shared>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let events = until_the_end(shared.handle.records.subscribe(), shared.over.clone())
        .filter_map(|record| Event::default().json_data(record).ok())
        .map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::default())
}

/// The events from now on, up to the cluster's end; none after it.
fn until_the_end(
    mut records: broadcast::Receiver<Record>,
    over: watch::Receiver<bool>,
) -> ReceiverStream<Record> {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut over = std::pin::pin!(told(over));
        loop {
            let record = tokio::select! {
                // Send earlier records before the end.
                biased;
                record = records.recv() => record,
                () = &mut over => return,
                () = sender.closed() => return,
            };
            let record = match record {
                Ok(record) => record,
                // A subscriber that lags behind misses records, and finds them in `events.jsonl`.
                Err(broadcast::error::RecvError::Lagged(_)) => continue,
                Err(broadcast::error::RecvError::Closed) => return,
            };
            let last = record.is_last();
            if sender.send(record).await.is_err() || last {
                return;
            }
        }
    });
    ReceiverStream::new(receiver)
}

#[derive(Deserialize)]
struct StopQuery {
    how: Option<Escalation>,
}

async fn stop(State(shared): State<Arc<Shared>>, Query(query): Query<StopQuery>) -> StatusCode {
    let how = query.how.unwrap_or(Escalation::Graceful);
    // An ended supervisor ignores the request.
    let _ = shared.handle.requests.send(ControlRequest::Stop { how, signal: None });
    StatusCode::ACCEPTED
}

async fn restart(State(shared): State<Arc<Shared>>, Path(process): Path<String>) -> Response {
    answer(shared.handle.requests.restart(&process).await)
}

#[derive(Deserialize)]
struct ScaleQuery {
    workers: usize,
}

async fn scale(State(shared): State<Arc<Shared>>, Query(query): Query<ScaleQuery>) -> Response {
    answer(shared.handle.requests.scale(query.workers).await)
}

fn answer(granted: Result<(), RequestError>) -> Response {
    let Err(error) = granted else { return StatusCode::ACCEPTED.into_response() };
    let status = match &error {
        RequestError::Unknown { .. } => StatusCode::NOT_FOUND,
        RequestError::TooMany { .. } => StatusCode::BAD_REQUEST,
        RequestError::Ending => StatusCode::CONFLICT,
    };
    (status, format!("{error}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::What;

    fn record(state: ClusterPhase) -> Record {
        let at = "2026-01-31T12:00:00.000Z".to_owned();
        Record { at, process: None, what: What::Cluster { state, cause: None } }
    }

    #[tokio::test]
    async fn a_stream_tells_all_that_was_sent_before_the_end() {
        let (records, listener) = broadcast::channel(16);
        let (over, ended) = watch::channel(false);
        let sent = [ClusterPhase::Ready, ClusterPhase::Stopping, ClusterPhase::Stopped].map(record);
        for record in &sent {
            records.send(record.clone()).expect("a listener");
        }
        over.send_replace(true);
        let heard: Vec<Record> = until_the_end(listener, ended).collect().await;
        assert_eq!(heard, sent);
    }

    #[tokio::test]
    async fn a_stream_that_begins_after_the_end_ends() {
        let (records, _) = broadcast::channel(16);
        let (over, ended) = watch::channel(false);
        over.send_replace(true);
        let heard: Vec<Record> = until_the_end(records.subscribe(), ended).collect().await;
        assert_eq!(heard, []);
    }
}
