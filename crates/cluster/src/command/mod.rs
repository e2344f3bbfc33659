//! Any program, one rank per GPU: what a rank is told about itself and the others.
//!
//! Does not start the ranks and knows nothing about the programs they run.
//!
//! *Invariant:* ranks are 0 to `WORLD_SIZE - 1`, each once; on a single machine a rank equals its
//! local rank.

mod launcher;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

pub use launcher::told_by_launcher;

/// The variables that `torchrun` gives its ranks: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
/// `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`.
pub fn rank_environment(rank: u32, world: usize, master: SocketAddr) -> BTreeMap<String, String> {
    let variables = [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("LOCAL_WORLD_SIZE", world.to_string()),
        ("MASTER_ADDR", master.ip().to_string()),
        ("MASTER_PORT", master.port().to_string()),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The address on which rank 0 is to listen: a port of this machine that is free now.
///
/// The port is released before this returns, as with `torchrun`: rank 0 binds it itself.
///
/// # Errors
/// If the system has no free port, or `port` is taken.
pub fn rendezvous(port: Option<u16>) -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port.unwrap_or(0)))?.local_addr()
}

/// Variables in which launchers give a process its rank on this machine; the first one set wins.
pub const LOCAL_RANK_VARIABLES: [&str; 5] = [
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
];

/// Why this process's rank is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocalRankError {
    /// No launcher provided it.
    #[error("no variable tells this process its rank on this machine")]
    Unknown,
    /// The variable does not hold a number.
    #[error("{variable}={value:?} is not a rank")]
    Odd { variable: &'static str, value: String },
}

impl LocalRankError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        let names = LOCAL_RANK_VARIABLES.join(", ");
        Some(format!("give --rank N, or start this under a launcher that sets one of {names}"))
    }
}

/// The rank of this process on this machine, as given by its launcher.
///
/// # Errors
/// If no launcher gave one, or the value is not a number.
pub fn local_rank(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(&'static str, u32), LocalRankError> {
    let found = LOCAL_RANK_VARIABLES.into_iter().find_map(|name| Some((name, variable(name)?)));
    let (variable, value) = found.ok_or(LocalRankError::Unknown)?;
    match value.trim().parse() {
        Ok(rank) => Ok((variable, rank)),
        Err(_) => Err(LocalRankError::Odd { variable, value }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_launcher_that_speaks_is_believed() {
        let slurm = |name: &str| (name == "SLURM_LOCALID").then(|| "3".to_owned());
        assert_eq!(local_rank(slurm), Ok(("SLURM_LOCALID", 3)));
        assert_eq!(local_rank(|_| None), Err(LocalRankError::Unknown));
        let odd = local_rank(|name| (name == "LOCAL_RANK").then(|| "-1".to_owned()));
        assert!(matches!(odd, Err(LocalRankError::Odd { variable: "LOCAL_RANK", .. })), "{odd:?}");
    }

    #[test]
    fn a_taken_port_is_refused() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = taken.local_addr().expect("its address").port();
        assert!(rendezvous(Some(port)).is_err());
        assert_ne!(rendezvous(None).expect("another").port(), 0);
    }
}
