//! A client of a running native cluster, which asks the scheduler from outside the cluster.
//!
//! Has no data plane, so it does not move objects itself.
//!
//! *Invariant:* the scheduler's address and the secret come from the run directory alone.

use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;

use super::connection;
use super::error::{ConversationError, Error};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::links::Measured;
use cuda_cluster_wire::links::trials::{self, Measures};
use cuda_cluster_wire::native::{FromClient, Measurement, ToClient, WorkerLanes};

/// How long a scheduler may take to authenticate: it is stopped or hangs if it takes longer.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);

/// A connection to a cluster's scheduler.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the scheduler of the cluster with this run directory.
    ///
    /// # Errors
    /// If there is no cluster, it has another secret, or its scheduler does not answer.
    pub async fn connect(run_directory: &Path) -> Result<Self, Error> {
        let paths = Paths::at(run_directory);
        let secret = paths.read_secret()?;
        let connecting = connection::connect(&paths, SCHEDULER, &secret, Role::Client);
        let slow = |_| Error::Conversation(ConversationError::Slow);
        let stream = tokio::time::timeout(CONNECT_WITHIN, connecting).await.map_err(slow)??;
        Ok(Self { stream })
    }

    /// The workers and the lanes of their connections.
    ///
    /// # Errors
    /// If the scheduler goes away.
    pub async fn workers(&mut self) -> Result<Vec<WorkerLanes>, Error> {
        connection::send(&mut self.stream, &FromClient::List).await?;
        loop {
            if let ToClient::Workers { workers } =
                connection::receive(&mut self.stream, FRAME_LIMIT).await?
            {
                return Ok(workers);
            }
        }
    }
}

impl Measures for Client {
    type Error = Error;

    /// Results come in the order in which the measurements end; it fails if the scheduler goes
    /// away. After it was not in time, the client is of no more use.
    async fn measure(
        &mut self,
        all: &[Measurement],
        within: Duration,
    ) -> Result<Vec<Measured>, Error> {
        let measured = tokio::time::timeout(within, self.results(all)).await;
        measured.unwrap_or_else(|_| Err(Error::Silent { ways: trials::named(all), within }))
    }
}

impl Client {
    async fn results(&mut self, all: &[Measurement]) -> Result<Vec<Measured>, Error> {
        for measurement in all {
            let message = FromClient::Measure(measurement.clone());
            connection::send(&mut self.stream, &message).await?;
        }
        let mut results = Vec::with_capacity(all.len());
        while results.len() < all.len() {
            if let ToClient::Measured { from, to, result } =
                connection::receive(&mut self.stream, FRAME_LIMIT).await?
            {
                results.push(Measured { from, to, result, cause: None });
            }
        }
        Ok(results)
    }
}
