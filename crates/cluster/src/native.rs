//! Features of native clusters: clients of their tasks, functions provided by programs, and the
//! processes that run them.

use std::process::ExitCode;

use super::{Client, ClientError, Cluster, Handle, blocking, doctor};
use cuda_cluster_native::worker::registry::Registry;
use cuda_cluster_native::{scheduler, worker};

/// Like [`super::dispatch`], for a program whose workers run its own functions.
pub fn dispatch_with(registry: impl FnOnce() -> Registry) -> Option<ExitCode> {
    if let Some(code) = super::supervision() {
        return Some(code);
    }
    let worked = match std::env::args_os().nth(1)?.to_str() {
        Some("__scheduler") => scheduler::main(),
        Some("__worker") => worker::main(registry()),
        Some(doctor::cuda::SUBCOMMAND) => return Some(doctor::cuda::main()),
        Some(doctor::ucx::SUBCOMMAND) => return Some(doctor::ucx::main()),
        Some(doctor::bandwidth::SUBCOMMAND) => return Some(doctor::bandwidth::main()),
        _ => return None,
    };
    Some(match worked {
        Ok(()) => ExitCode::SUCCESS,
        // The error has been logged and reported to the supervisor.
        Err(_) => ExitCode::FAILURE,
    })
}

impl Cluster {
    /// A client of its tasks.
    ///
    /// # Errors
    /// If its scheduler can't be reached, or it runs another engine.
    pub fn client(&self) -> Result<Client, ClientError> {
        self.handle().client()
    }
}

impl blocking::Cluster {
    /// A client of its tasks.
    ///
    /// # Errors
    /// If its scheduler can't be reached, or it runs another engine.
    pub fn client(&self) -> Result<Client, ClientError> {
        self.handle().client()
    }
}

impl Handle {
    /// A client of its tasks.
    ///
    /// # Errors
    /// If its scheduler can't be reached, or it runs another engine.
    pub fn client(&self) -> Result<Client, ClientError> {
        self.current().map_err(|_| ClientError::Gone)?;
        Client::connect(self.paths.root())
    }
}
