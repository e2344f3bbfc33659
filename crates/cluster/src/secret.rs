//! What nobody else has: from the system's random numbers.
//!
//! *Invariant:* no two are the same.

use std::io;

use cuda_cluster_wire::secret::{LENGTH, Secret};

/// A new secret.
///
/// # Errors
/// If the system has no random numbers.
pub(crate) fn fresh() -> io::Result<Secret> {
    Ok(Secret::new(random::<LENGTH>()?))
}

/// A new name, which is no secret.
///
/// # Errors
/// As [`fresh`].
pub(crate) fn random_name() -> io::Result<String> {
    Ok(format!("{:016x}", u64::from_ne_bytes(random()?)))
}

fn random<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}
