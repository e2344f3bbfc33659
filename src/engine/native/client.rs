//! A client of a running native cluster, which asks the scheduler from outside the cluster.
//!
//! Has no data plane, so it does not move objects itself.
//!
//! *Invariant:* the scheduler's address and the secret come from the run directory alone.

use std::path::Path;

use tokio::net::UnixStream;

use super::connection;
use super::error::Error;
use crate::engine::links::Measured;
use crate::engine::links::trials::Measures;
use crate::ids::SCHEDULER;
use crate::os::run_directory::Paths;
use crate::wire::frame::FRAME_LIMIT;
use crate::wire::greeting::Role;
use crate::wire::native::{FromClient, Measurement, ToClient, WorkerLanes};

/// A connection to a cluster's scheduler.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the scheduler of the cluster with this run directory.
    ///
    /// # Errors
    /// If there is no cluster, or it has another secret.
    pub async fn connect(run_directory: &Path) -> Result<Self, Error> {
        let paths = Paths::at(run_directory);
        let secret = paths.read_secret()?;
        let stream = connection::connect(&paths, SCHEDULER, &secret, Role::Client).await?;
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
    /// away.
    async fn measure(&mut self, all: &[Measurement]) -> Result<Vec<Measured>, Error> {
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
