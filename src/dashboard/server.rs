//! The requests of a page and their answers.
//!
//! | request | answer |
//! |---|---|
//! | `GET /`, `GET /FILE` | the page's files |
//! | `GET /metrics` | all running clusters, GPUs and NICs, for Prometheus |
//! | `GET /api/clusters` | the names of running and ended clusters |
//! | `GET /api/overview` | more of all of them, and this machine's devices with who holds them |
//! | `GET /api/clusters/NAME/about` | the machine's picture, and the plan with its reasons |
//! | `GET /api/clusters/NAME/live` | server-sent events: state, lanes, figures, records, the end |
//! | `GET /api/clusters/NAME/events` | the last records |
//! | `GET …/NAME/history?last=MS&points=N`, `…?since=MS&until=MS` | what the processes used |
//! | `GET …/NAME/history/pairs?last=MS`, the same | what went from which worker to which |
//! | `GET /api/clusters/NAME/log`, `…/log/line`, `…/log/file` | lines of all logs; one; a file |
//! | `GET …/tasks?after=N`, `…/tasks/TASK` | the last tasks that ran; why one waits or ran there |
//! | `GET /api/clusters/NAME/dask` | what Dask's scheduler counts |
//! | `GET /api/clusters/NAME/crashes` | the last crash bundles |
//! | `GET /api/clusters/NAME/report` | a file to attach to an issue |
//! | `POST /api/clusters/NAME/restart/PROCESS`, `…/scale?workers=N`, `…/stop`, `…/verify` | 202 |
//! | `POST /api/clusters/NAME/profile/PROCESS` | its stacks over some seconds |
//!
//! *Invariant:* secrets in plans, logs and crashes are masked.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::Stream;

use super::assets::{Asset, notice};
use super::feed::{Feeds, Message, Subject};
use super::guard::{self, CONTENT_SECURITY_POLICY, Door, OWN_HEADER, Refusal, Visit};
use super::history::Range;
use super::measure::processes_of;
use super::{history, log_requests, measure, metrics, overview, scrape, tasks};
use crate::cluster::{
    self, BugReport, Control, ControlError, FindError, Handle, Paths, Verification,
    recorded_machine, recorded_plan, recorded_preflight,
};
use crate::ids::ClusterName;
use crate::supervise::{ClusterState, metrics as supervise_metrics};
use crate::text::{in_full, masked_json};

/// Longest time for a cluster's metrics: Prometheus waits for ten seconds, for all of them.
const SCRAPE: Duration = Duration::from_secs(4);

/// Number of records that a page gets first.
const RECORDS: usize = 500;

struct Shared {
    door: Door,
    feeds: Feeds,
    /// Clusters whose links are being measured.
    verifying: std::sync::Mutex<std::collections::BTreeSet<ClusterName>>,
}

type Here = State<Arc<Shared>>;

/// The page behind its door.
pub(super) fn router(door: Door, feeds: Feeds) -> Router {
    let shared = Arc::new(Shared { door, feeds, verifying: std::sync::Mutex::default() });
    let of_cluster = Router::new()
        .route("/about", get(about))
        .route("/live", get(live))
        .route("/events", get(events))
        .route("/history", get(history))
        .route("/history/pairs", get(pairs))
        .merge(log_requests::routes())
        .merge(tasks::routes())
        .route("/crashes", get(crashes))
        .route("/report", get(report))
        .route("/restart/{process}", post(restart))
        .route("/scale", post(scale))
        .route("/stop", post(stop))
        .route("/verify", post(verify));
    Router::new()
        .route("/", get(|| asset(Path(String::new()))))
        .route("/{asset}", get(asset))
        .route("/metrics", get(metrics))
        .route("/api/clusters", get(clusters))
        .route("/api/overview", get(overview::overview))
        .nest("/api/clusters/{name}", of_cluster)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&shared), at_the_door))
        .with_state(shared)
}

#[derive(Deserialize)]
struct Link {
    token: Option<String>,
    /// The cluster to show first.
    cluster: Option<ClusterName>,
}

/// Lets a request in, or refuses it; every answer gets the headers that protect the page.
async fn at_the_door(State(shared): Here, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|text| text.strip_prefix("Bearer "));
    let link = Query::<Link>::try_from_uri(request.uri()).ok().map(|link| link.0);
    let link = link.filter(|link| link.token.is_some() && request.uri().path() == "/");
    let cookie = cookie(headers, &shared.door.cookie());
    let visit = Visit {
        looks: matches!(*request.method(), Method::GET | Method::HEAD),
        host: text(header::HOST),
        origin: text(header::ORIGIN),
        own_header: headers.contains_key(OWN_HEADER),
        token: link.as_ref().and_then(|link| link.token.as_deref()).or(cookie).or(bearer),
    };
    let mut response = match guard::check(&shared.door, visit) {
        Ok(()) => match link {
            Some(link) => welcome(&shared.door, &link),
            None => next.run(request).await,
        },
        Err(refusal) => refused(refusal),
    };
    if matches!(
        response.status(),
        StatusCode::MISDIRECTED_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN
    ) {
        // Who does not know the token keeps no connection.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|text| text.split(';')).filter_map(|pair| pair.split_once('='));
    pairs.find(|(own, _)| own.trim() == name).map(|(_, value)| value.trim())
}

/// Keeps the token in a cookie, and goes on to the page without it in the address.
fn welcome(door: &Door, link: &Link) -> Response {
    // A name has no characters that mean anything in an address or in HTML.
    let next = link.cluster.as_ref().map_or("./".to_owned(), |name| format!("./#cluster={name}"));
    let (kind, page) = notice("Opening the page…", Some(&next));
    let token = link.token.as_deref().unwrap_or_default();
    let cookie = format!("{}={token}; Path=/; HttpOnly; SameSite=Strict", door.cookie());
    ([(header::CONTENT_TYPE, kind.to_owned()), (header::SET_COOKIE, cookie)], page).into_response()
}

fn refused(refusal: Refusal) -> Response {
    let status = match refusal {
        Refusal::Host => StatusCode::MISDIRECTED_REQUEST,
        Refusal::Token => StatusCode::UNAUTHORIZED,
        Refusal::Origin | Refusal::Header => StatusCode::FORBIDDEN,
    };
    let (kind, page) = notice(&refusal.to_string(), None);
    (status, [(header::CONTENT_TYPE, kind)], page).into_response()
}

async fn asset(Path(name): Path<String>) -> Response {
    match Asset::find(&name) {
        Some(asset) => {
            ([(header::CONTENT_TYPE, asset.kind)], asset.content().into_owned()).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// An error as a page shows it.
fn failed(status: StatusCode, error: &dyn std::error::Error) -> Response {
    (status, Json(json!({ "error": error.to_string() }))).into_response()
}

async fn clusters() -> Response {
    let found = match cluster::clusters() {
        Ok(found) => found,
        Err(error) => return failed(StatusCode::INTERNAL_SERVER_ERROR, &error),
    };
    let row = |name: &ClusterName, runs| json!({ "name": name.as_str(), "is_running": runs });
    let running = found.running.iter().map(|one| row(&one.name, true));
    let all: Vec<Value> =
        running.chain(found.ended.iter().map(|one| row(&one.name, false))).collect();
    Json(json!({ "clusters": all, "version": env!("CARGO_PKG_VERSION") })).into_response()
}

async fn metrics() -> Response {
    let found = match cluster::clusters() {
        Ok(found) => found,
        Err(error) => return failed(StatusCode::INTERNAL_SERVER_ERROR, &error),
    };
    // One that does not answer keeps no other.
    let mut asked = tokio::task::JoinSet::new();
    for one in found.running {
        asked.spawn(async move {
            let name = one.name.clone();
            let texts = tokio::time::timeout(SCRAPE, texts_of(one)).await;
            texts.unwrap_or_else(|_| vec![supervise_metrics::unanswered(name.as_str())])
        });
    }
    let mut texts = asked.join_all().await.concat();
    let ended = found.ended.iter().filter_map(|one| one.state.as_ref());
    texts.extend(ended.map(supervise_metrics::ended));
    texts.sort();
    let devices = tokio::task::spawn_blocking(|| {
        let (gpus, nics) = measure::devices();
        metrics::devices(&gpus, &nics)
    });
    texts.extend(devices.await);
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics::merged(&texts)).into_response()
}

/// The metrics of a cluster and of its lanes.
async fn texts_of(one: Handle) -> Vec<String> {
    let control = one.control();
    let mut texts = Vec::new();
    match control.text("/metrics").await {
        Ok(text) => texts.push(text),
        Err(_) => texts.push(supervise_metrics::unanswered(one.name.as_str())),
    }
    if let Ok(state) = control.read::<ClusterState>("/v1/state").await {
        let subject = Subject::of(&one.paths);
        let missing = subject.missing(&state.workers).len();
        texts.push(metrics::lanes(&state, missing));
        texts.push(scrape::plan_and_audit(&subject, &one.paths, state.name.as_str()));
        texts.extend(scrape::native(&subject, &one.paths, &state).await);
    }
    texts
}

#[derive(Deserialize)]
struct Named {
    name: ClusterName,
}

#[derive(Deserialize)]
struct NamedProcess {
    name: ClusterName,
    process: String,
}

async fn about(Path(Named { name }): Path<Named>) -> Response {
    let paths = Paths::of(&name);
    let Some(plan) = recorded_plan(&paths) else {
        let error = json!({ "error": format!("there is no cluster named {name}") });
        return (StatusCode::NOT_FOUND, Json(error)).into_response();
    };
    let machine = recorded_machine(&paths);
    let picture = machine.as_ref().map(|machine| machine.to_live_svg(&plan.occupants()));
    Json(json!({
        "picture": picture,
        "machine": machine,
        "preflight": recorded_preflight(&paths),
        "plan": serde_json::to_value(&plan).map(masked_json).unwrap_or_default(),
    }))
    .into_response()
}

async fn live(State(shared): Here, Path(Named { name }): Path<Named>) -> Response {
    let (first, receiver) = shared.feeds.of(&name).open();
    Sse::new(stream(first, receiver)).keep_alive(KeepAlive::default()).into_response()
}

/// What is known, then what happens. A page that is too far behind is told to begin again.
fn stream(
    first: Vec<Message>,
    mut receiver: broadcast::Receiver<Message>,
) -> impl Stream<Item = Result<Event, Infallible>> {
    let (sender, messages) = tokio::sync::mpsc::channel(16);
    tokio::spawn(async move {
        for message in first {
            if sender.send(message).await.is_err() {
                return;
            }
        }
        loop {
            let message = tokio::select! {
                message = receiver.recv() => message,
                () = sender.closed() => return,
            };
            let message = match message {
                Ok(message) => message,
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    Message { kind: "begin", text: "{}".into() }
                }
                Err(broadcast::error::RecvError::Closed) => return,
            };
            if sender.send(message).await.is_err() {
                return;
            }
        }
    });
    let event = |message: Message| Ok(Event::default().event(message.kind).data(&*message.text));
    tokio_stream::StreamExt::map(tokio_stream::wrappers::ReceiverStream::new(messages), event)
}

async fn events(Path(Named { name }): Path<Named>) -> Json<Vec<Value>> {
    let text = std::fs::read_to_string(Paths::of(&name).events()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(RECORDS)..];
    // The last line may be incomplete.
    Json(last.iter().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

async fn history(Path(Named { name }): Path<Named>, Query(range): Query<Range>) -> Response {
    history::curves(name, range).await
}

async fn pairs(Path(Named { name }): Path<Named>, Query(range): Query<Range>) -> Response {
    history::pairs(name, range).await
}

async fn crashes(Path(Named { name }): Path<Named>) -> Response {
    Json(cluster::crashes(&Paths::of(&name))).into_response()
}

async fn report(Path(Named { name }): Path<Named>) -> Response {
    let paths = Paths::of(&name);
    let state: Option<ClusterState> = match cluster::find(Some(&name)) {
        Ok(found) => found.control().read("/v1/state?fresh=true").await.ok(),
        Err(FindError::Ended(ended)) => ended.state,
        Err(error) => return failed(StatusCode::NOT_FOUND, &error),
    };
    let report = BugReport::collect(&name, &paths, state.as_ref());
    let disposition = format!("attachment; filename=\"cuda-cluster-{name}-report.json\"");
    ([(header::CONTENT_DISPOSITION, disposition)], Json(report)).into_response()
}

async fn restart(Path(NamedProcess { name, process }): Path<NamedProcess>) -> Response {
    order(&name, &format!("/v1/restart/{}", cluster::in_url(&process))).await
}

#[derive(Deserialize)]
struct Scale {
    workers: usize,
}

async fn scale(
    Path(Named { name }): Path<Named>,
    Query(Scale { workers }): Query<Scale>,
) -> Response {
    order(&name, &format!("/v1/scale?workers={workers}")).await
}

async fn stop(Path(Named { name }): Path<Named>) -> Response {
    order(&name, "/v1/stop").await
}

/// Passes a request for a change on to the supervisor.
async fn order(name: &ClusterName, path: &str) -> Response {
    match Control::new(Paths::of(name).control()).order(path).await {
        Ok(()) => StatusCode::ACCEPTED.into_response(),
        Err(ControlError::Refused { status, message }) => {
            // The supervisor has sent it, so it is a status.
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
            (status, Json(json!({ "error": message }))).into_response()
        }
        Err(error) => failed(StatusCode::BAD_GATEWAY, &error),
    }
}

/// Starts a measurement of all pairs; its result goes to all pages.
async fn verify(State(shared): Here, Path(Named { name }): Path<Named>) -> Response {
    let verifying = || shared.verifying.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !verifying().insert(name.clone()) {
        let error = json!({ "error": "the links are being measured" });
        return (StatusCode::CONFLICT, Json(error)).into_response();
    }
    let (feed, keeper) = (shared.feeds.of(&name), Arc::clone(&shared));
    tokio::spawn(async move {
        feed.tell("verification", &json!({ "state": "running" }));
        feed.tell("verification", &verified(&name).await);
        let mut verifying =
            keeper.verifying.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        verifying.remove(&name);
    });
    StatusCode::ACCEPTED.into_response()
}

/// The result of a measurement, with the processes that were measured: it says nothing about those
/// that take their places later.
async fn verified(name: &ClusterName) -> Value {
    let control = Control::new(Paths::of(name).control());
    let state = control.read::<ClusterState>("/v1/state").await.ok();
    let processes = state.as_ref().map(processes_of).unwrap_or_default();
    let processes: BTreeMap<String, u32> = processes.into_iter().collect();
    let failed = |error: &(dyn std::error::Error + 'static), hint: Option<String>| {
        let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
        json!({ "state": "failed", "text": format!("{}{hint}", in_full(error)) })
    };
    let found = match Handle::attach(name) {
        Ok(found) => found,
        Err(error) => return failed(&error, error.hint()),
    };
    match found.verify().await {
        Ok(Verification { pairs, .. }) => {
            let at = humantime::format_rfc3339_millis(std::time::SystemTime::now()).to_string();
            json!({ "state": "done", "at": at, "pairs": pairs, "processes": processes })
        }
        Err(error) => failed(&error, error.hint()),
    }
}
