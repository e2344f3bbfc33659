//! What a page may ask about logs, and the answers.
//!
//! *Invariant:* no part of a request becomes part of a path: a process is one of those that have
//! logs.

use std::collections::BTreeSet;
use std::io;

use axum::body::Body;
use axum::extract::{Path, Query};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::log_view::{self, Ask, Begin, Filter};
use crate::cluster::{Paths, logged};
use crate::ids::ClusterName;
use crate::os::log_pages::Place;

/// Searches at a time: each may take a core for a moment.
static SEARCHES: Semaphore = Semaphore::const_new(4);

/// Files that are sent at a time: each keeps a thread until its reader has it.
static FILES: Semaphore = Semaphore::const_new(4);

/// Pieces of a file that are ready before they are taken.
const AHEAD: usize = 2;

/// The requests below a cluster's address.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/log", get(lines))
        .route("/log/line", get(line))
        .route("/log/file", get(file))
}

#[derive(Deserialize)]
struct Named {
    name: ClusterName,
}

#[derive(Deserialize)]
struct Asked {
    /// Names with commas between them; all if there is none.
    #[serde(default)]
    process: String,
    text: Option<String>,
    level: Option<String>,
    before: Option<String>,
    after: Option<String>,
    /// A process and a place in its log.
    line: Option<String>,
}

impl Asked {
    fn processes(&self) -> BTreeSet<String> {
        self.process.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }

    fn meant(&self) -> Result<Ask, String> {
        let level = self.level.as_deref().filter(|word| !word.is_empty());
        let level = level.map(str::parse).transpose();
        let level = level.map_err(|error| crate::text::in_full(&error))?;
        let cursor = |text: &str| log_view::cursor(text).map_err(|error| error.to_string());
        let from = match (&self.before, &self.after, &self.line) {
            (None, None, None) => Begin::End,
            (Some(text), None, None) => Begin::Before(cursor(text)?),
            (None, Some(text), None) => Begin::After(cursor(text)?),
            (None, None, Some(text)) => {
                let (process, place) = the_line(text)?;
                Begin::Line(process, place)
            }
            _ => return Err("'before', 'after' and 'line' exclude each other".to_owned()),
        };
        let filter = Filter::new(self.text.as_deref(), level);
        Ok(Ask { processes: self.processes(), filter, from })
    }
}

/// A line's address: `gpu0:0:1234`.
fn the_line(text: &str) -> Result<(String, Place), String> {
    let cursor = log_view::cursor(text).map_err(|error| error.to_string())?;
    let only = cursor.into_iter().next();
    only.ok_or_else(|| "a line is named by its process and place, such as gpu0:0:1234".to_owned())
}

fn refused(text: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({ "error": text }))).into_response()
}

fn no_logs(name: &ClusterName, error: &io::Error) -> Response {
    let text = format!("the logs of {name} can't be read: {error}");
    (StatusCode::NOT_FOUND, Json(json!({ "error": text }))).into_response()
}

/// Does what blocks on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

async fn lines(Path(Named { name }): Path<Named>, Query(asked): Query<Asked>) -> Response {
    let ask = match asked.meant() {
        Ok(ask) => ask,
        Err(text) => return refused(&text),
    };
    // It is never closed.
    let _permit = SEARCHES.acquire().await;
    let paths = Paths::of(&name);
    match blocking(move || log_view::look(&paths, &ask)).await {
        Ok(told) => Json(told).into_response(),
        Err(error) => no_logs(&name, &error),
    }
}

async fn line(Path(Named { name }): Path<Named>, Query(asked): Query<Asked>) -> Response {
    let (process, place) = match the_line(asked.line.as_deref().unwrap_or_default()) {
        Ok(line) => line,
        Err(text) => return refused(&text),
    };
    let paths = Paths::of(&name);
    let read = move || match logged(&paths)?.contains(&process) {
        true => log_view::whole(&paths.log(&process), place),
        false => Ok(None),
    };
    match blocking(read).await {
        Ok(Some((text, more))) => Json(json!({ "text": text, "more": more })).into_response(),
        Ok(None) => {
            let text = "the line is not there any more: the log was rotated";
            (StatusCode::NOT_FOUND, Json(json!({ "error": text }))).into_response()
        }
        Err(error) => no_logs(&name, &error),
    }
}

/// The logs as a file, which is sent while it is read.
async fn file(Path(Named { name }): Path<Named>, Query(asked): Query<Asked>) -> Response {
    let Ok(permit) = FILES.try_acquire() else {
        let text = "four logs are being sent; try again when one is there";
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": text }))).into_response();
    };
    let paths = Paths::of(&name);
    let of = paths.clone();
    let processes = match blocking(move || logged(&of)).await {
        Ok(processes) => processes,
        Err(error) => return no_logs(&name, &error),
    };
    let asked = asked.processes();
    let is_wanted = |name: &String| asked.is_empty() || asked.contains(name);
    let processes: Vec<String> = processes.into_iter().filter(is_wanted).collect();
    let what = match &processes[..] {
        [] => return refused("no process of this name has a log"),
        [one] => one.clone(),
        _ => "logs".to_owned(),
    };
    let (sender, pieces) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let _until_it_is_sent = permit;
        let take = |piece| sender.blocking_send(Ok::<_, io::Error>(piece)).is_ok();
        if let Err(error) = log_view::pour(&paths, &processes, take) {
            // A file that ends here must not pass for all of it.
            let _ = sender.blocking_send(Err(error));
        }
    });
    let disposition = format!("attachment; filename=\"cuda-cluster-{name}-{what}.log\"");
    let headers = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()),
        (header::CONTENT_DISPOSITION, disposition),
    ];
    (headers, Body::from_stream(ReceiverStream::new(pieces))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(pairs: &str) -> Result<Ask, String> {
        let uri = format!("/log?{pairs}").parse().expect("an address");
        Query::<Asked>::try_from_uri(&uri).expect("a query").0.meant()
    }

    #[test]
    fn requests_read_as_they_are_meant_and_others_are_refused() {
        let ask = asked("process=gpu0,gpu1&text=a%20b&level=warning").expect("readable");
        assert_eq!(ask.processes.len(), 2);
        assert!(matches!(ask.from, Begin::End));
        let ask = asked("before=gpu0:0:12,gpu1:3:4").expect("readable");
        assert!(matches!(ask.from, Begin::Before(cursor) if cursor["gpu1"].offset == 4));
        let ask = asked("line=gpu.1:3:4&level=").expect("readable");
        assert!(matches!(ask.from, Begin::Line(process, _) if process == "gpu.1"));
        for wrong in ["before=gpu0", "after=gpu0:x:1", "line=", "level=loud", "before=&after="] {
            assert!(asked(wrong).is_err(), "{wrong}");
        }
    }
}
