//! The client's calls for programs with an event loop. They need tokio, do not block its threads,
//! and may be dropped at any time: a wait is given up then, and a transfer ends unseen.
//!
//! *Invariant:* each does what its counterpart without `_async` does.

use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::session::Status;
use super::{AsCompleted, Client, ClientError, Remote};
use cuda_cluster_wire::numbers::{self, Number};
use cuda_cluster_wire::tasks::{Product, Request};
use cuda_cluster_wire::value;

/// Runs blocking work on tokio's threads for it.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ClientError> + Send + 'static,
) -> Result<T, ClientError> {
    // The work does not panic; a runtime that is shutting down does not run it.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(ClientError::Gone))
}

impl Client {
    /// [`Client::connect`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn connect_async(run_directory: impl Into<PathBuf>) -> Result<Self, ClientError> {
        let run_directory = run_directory.into();
        aside(move || Self::connect(&run_directory)).await
    }

    /// [`Client::put`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn put_async(&self, bytes: Vec<u8>) -> Result<Remote, ClientError> {
        let client = self.clone();
        aside(move || client.put(&bytes)).await
    }

    /// [`Client::put_value`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn put_value_async(&self, value: &impl Serialize) -> Result<Remote, ClientError> {
        self.put_async(value::encode(value)?).await
    }

    /// [`Client::gather`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn gather_async(&self, remotes: &[Remote]) -> Result<Vec<Vec<u8>>, ClientError> {
        for remote in remotes {
            remote.wait_async().await?;
        }
        let held = remotes.iter().map(Remote::held).collect::<Result<Vec<Remote>, _>>()?;
        let client = self.clone();
        aside(move || client.gather(&held)).await
    }
}

impl Remote {
    /// The same object once more: work aside may go on when the caller has dropped its own.
    fn held(&self) -> Result<Remote, ClientError> {
        self.session.hold(self.object);
        let held = Remote { session: self.session.clone(), object: self.object };
        self.session.ask(Request::Hold { object: self.object })?;
        Ok(held)
    }

    /// [`Remote::wait`] for a program with an event loop; `tokio::time::timeout` limits it.
    ///
    /// # Errors
    /// As there.
    pub async fn wait_async(&self) -> Result<u64, ClientError> {
        self.session.wait_async(self.object).await?.size()
    }

    /// [`Remote::bytes`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn bytes_async(&self) -> Result<Vec<u8>, ClientError> {
        match self.session.wait_async(self.object).await? {
            Status::Available(Product::Inline(bytes)) => Ok(bytes),
            Status::Available(Product::Stored(_)) => {
                let held = self.held()?;
                aside(move || held.bytes()).await
            }
            Status::Failed(error) => Err(error.into()),
            Status::Pending => Err(ClientError::Gone),
        }
    }

    /// [`Remote::value`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn value_async<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        Ok(value::decode(&self.bytes_async().await?)?)
    }

    /// [`Remote::numbers`] for a program with an event loop.
    ///
    /// # Errors
    /// As there.
    pub async fn numbers_async<N: Number>(&self) -> Result<Vec<N>, ClientError> {
        Ok(numbers::read(&self.bytes_async().await?)?.into_owned())
    }
}

impl AsCompleted {
    /// [`Iterator::next`] for a program with an event loop.
    pub async fn next_async(&mut self) -> Option<Remote> {
        while self.came.is_empty() && !self.waiting.is_empty() {
            let object = self.session.next_of_async(self.stream).await?;
            self.came = self.waiting.remove(&object).unwrap_or_default();
        }
        self.came.pop()
    }
}
