//! A client of a supervisor's control API: HTTP over the run directory's Unix socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_supervise::Record;

/// Maximum length of an answer.
const ANSWER_LIMIT: usize = 64 << 20;

/// Time limit for an answer, except streams.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Why a supervisor could not be asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum ControlError {
    /// There is no listener.
    #[error("cannot reach the supervisor at {}", socket.display())]
    Connect {
        socket: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The cluster has ended, and its name is another one's now.
    #[error("this cluster has ended; another one is called {name} now")]
    Replaced { name: ClusterName },
    /// It accepts connections, but does not answer.
    #[error("the supervisor at {} does not answer", socket.display())]
    Silent { socket: PathBuf },
    /// The connection broke.
    #[error("lost the connection to the supervisor")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It rejected the request.
    #[error("the supervisor refused: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        message: String,
    },
    /// This version does not understand the answer, or the supervisor not the request.
    #[error("the supervisor is of another version of this program; {path}: {reason}")]
    Answer { path: String, reason: String },
}

impl ControlError {
    pub(super) fn answer(path: &str, error: &serde_json::Error) -> Self {
        ControlError::Answer { path: path.to_owned(), reason: error.to_string() }
    }

    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            ControlError::Silent { socket } => {
                let name = socket.parent()?.file_name()?.to_string_lossy();
                Some(format!("cuda-cluster down --kill {name} ends it even so"))
            }
            ControlError::Answer { .. } => Some(
                "use the version that started the cluster; 'down', 'logs' and 'events' also work \
                 with this one"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// A text as a part of the path in a URL.
pub fn in_url(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// A supervisor, identified by its socket.
#[derive(Clone, Debug)]
pub struct Control {
    socket: PathBuf,
}

impl Control {
    /// A client of the supervisor at `socket`; does not connect yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Reads a JSON answer.
    ///
    /// # Errors
    /// If the supervisor can't be reached, rejects the request, or its answer is not understood.
    pub async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, ControlError> {
        let bytes = self.ask(Method::GET, path, ANSWER_WITHIN).await?;
        serde_json::from_slice(&bytes).map_err(|error| ControlError::answer(path, &error))
    }

    /// Reads an answer that is text.
    ///
    /// # Errors
    /// If the supervisor can't be reached, or rejects the request.
    pub async fn text(&self, path: &str) -> Result<String, ControlError> {
        let bytes = self.ask(Method::GET, path, ANSWER_WITHIN).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a request for a change; returns when the supervisor has accepted it.
    ///
    /// # Errors
    /// If the supervisor can't be reached, or rejects the request.
    pub async fn order(&self, path: &str) -> Result<(), ControlError> {
        self.order_within(path, ANSWER_WITHIN).await
    }

    /// Like [`Control::order`], with a time limit for the answer.
    ///
    /// # Errors
    /// As there.
    pub async fn order_within(&self, path: &str, within: Duration) -> Result<(), ControlError> {
        self.ask(Method::POST, path, within).await.map(drop)
    }

    /// Asks for any answer.
    ///
    /// # Errors
    /// If the supervisor can't be reached, or does not answer in time.
    pub(super) async fn ping(&self, within: Duration) -> Result<(), ControlError> {
        match self.ask(Method::GET, "/health", within).await {
            // One that is not READY says so.
            Ok(_) | Err(ControlError::Refused { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Opens a stream, such as server-sent events; see [`Lines`].
    ///
    /// # Errors
    /// As [`Control::read`].
    pub async fn stream(&self, path: &str) -> Result<Lines, ControlError> {
        let response = self.send(Method::GET, path).await?;
        Ok(Lines { body: response.into_body(), read: Vec::new(), over: false })
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        within: Duration,
    ) -> Result<Bytes, ControlError> {
        let answer = async {
            let response = self.send(method, path).await?;
            let whole = Limited::new(response.into_body(), ANSWER_LIMIT).collect().await;
            whole.map(|whole| whole.to_bytes()).map_err(ControlError::Lost)
        };
        let silent = |_| ControlError::Silent { socket: self.socket.clone() };
        tokio::time::timeout(within, answer).await.map_err(silent)?
    }

    async fn send(&self, method: Method, path: &str) -> Result<Response<Incoming>, ControlError> {
        let lost = |error: hyper::Error| ControlError::Lost(Box::new(error));
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ControlError::Connect { socket: self.socket.clone(), source })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        // Ends with the exchange, when the sender and the body are dropped.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "cuda-cluster")
            .body(Empty::<Bytes>::new())
            .map_err(|error| ControlError::Lost(Box::new(error)))?;
        let response = sender.send_request(request).await.map_err(lost)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let words = Limited::new(response.into_body(), 64 << 10).collect().await;
        let words = words.map_err(ControlError::Lost)?.to_bytes();
        let message = String::from_utf8_lossy(&words).trim().to_owned();
        // Every refusal has words, but that of a path that the supervisor does not have.
        Err(match status {
            404 | 405 if message.is_empty() => {
                let reason = "it does not know this request".to_owned();
                ControlError::Answer { path: path.to_owned(), reason }
            }
            _ => ControlError::Refused { status, message },
        })
    }
}

/// The lines of a streamed answer.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    read: Vec<u8>,
    /// Whether the cluster's end was received: then the supervisor may disconnect at any time.
    over: bool,
}

impl Lines {
    /// The data of the next server-sent event; `None` after the cluster's end. Skips keep-alive
    /// comments and blank lines.
    ///
    /// # Errors
    /// If the connection breaks.
    pub async fn next_event(&mut self) -> Result<Option<String>, ControlError> {
        while !self.over {
            let Some(line) = self.next().await? else { break };
            if let Some(data) = line.strip_prefix("data:") {
                self.over = serde_json::from_str(data).is_ok_and(|record: Record| record.is_last());
                return Ok(Some(data.trim().to_owned()));
            }
        }
        Ok(None)
    }

    /// The next line without its line feed; `None` at the end.
    ///
    /// # Errors
    /// If the connection breaks.
    pub async fn next(&mut self) -> Result<Option<String>, ControlError> {
        loop {
            if let Some(at) = self.read.iter().position(|byte| *byte == b'\n') {
                let rest = self.read.split_off(at + 1);
                let line = std::mem::replace(&mut self.read, rest);
                return Ok(Some(String::from_utf8_lossy(&line[..at]).into_owned()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.read.extend_from_slice(bytes);
                    }
                }
                Some(Err(error)) => return Err(ControlError::Lost(Box::new(error))),
                None if self.read.is_empty() => return Ok(None),
                None => {
                    let rest = std::mem::take(&mut self.read);
                    return Ok(Some(String::from_utf8_lossy(&rest).into_owned()));
                }
            }
        }
    }
}
