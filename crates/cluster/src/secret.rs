//! New secrets, from the system's random numbers.
//!
//! *Invariant:* no two are the same.

use std::io;

use cuda_cluster_wire::secret::{LENGTH, Secret};

/// A secret that nobody else has.
///
/// # Errors
/// If the system has no random numbers.
pub(crate) fn fresh() -> io::Result<Secret> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(Secret::new(bytes))
}
