//! What a page is told of a cluster's history.
//!
//! *Invariant:* the file is read beside the event loop, and an answer has a limited size.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::task::JoinError;

use crate::cluster::{NoHistory, Paths, recorded_history, recorded_pairs};
use crate::ids::ClusterName;
use crate::text::in_full;
use crate::wire::history::pairs::Flows;

/// Points of an answer, if the page does not say how many it can show.
const POINTS: usize = 240;

/// The part of the history that a page shows.
#[derive(Debug, Deserialize)]
pub(super) struct Range {
    /// Milliseconds since 1970; without them, all.
    since: Option<u64>,
    until: Option<u64>,
    /// So many milliseconds before its end, by whatever clock.
    last: Option<u64>,
    points: Option<usize>,
}

/// A cluster's history as curves; 404 as long as there is none.
pub(super) async fn curves(name: ClusterName, range: Range) -> Response {
    let Range { since, until, last, points } = range;
    let read = move || {
        let history = recorded_history(&Paths::of(&name))?;
        let since = since.or_else(|| history.before_end(last?));
        Ok(history.curves(since, until, points.unwrap_or(POINTS)))
    };
    answer(tokio::task::spawn_blocking(read).await)
}

/// What went between a cluster's workers in the same part of its time; nothing as long as nothing
/// is known, which is no error: workers say it twice a minute, and the command engine's never.
pub(super) async fn pairs(name: ClusterName, range: Range) -> Response {
    let Range { since, until, last, .. } = range;
    let read = move || {
        let history = match recorded_pairs(&Paths::of(&name)) {
            Err(NoHistory::Missing) => return Ok(Flows::default()),
            read => read?,
        };
        let since = since.or_else(|| history.before_end(last?));
        Ok(history.flows(since, until))
    };
    answer(tokio::task::spawn_blocking(read).await)
}

fn answer<T: Serialize>(read: Result<Result<T, NoHistory>, JoinError>) -> Response {
    let (status, error) = match read {
        Ok(Ok(read)) => return Json(read).into_response(),
        Ok(Err(error @ NoHistory::Missing)) => (StatusCode::NOT_FOUND, error.to_string()),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, in_full(&error)),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    (status, Json(json!({ "error": error }))).into_response()
}
