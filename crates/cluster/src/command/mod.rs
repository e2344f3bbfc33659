//! Any program, one rank per GPU: what a rank is told about itself and the others.
//!
//! Does not start the ranks and knows nothing about the programs they run.
//!
//! *Invariant:* ranks are 0 to `WORLD_SIZE - 1`, each once; on a single machine a rank equals its
//! local rank.

pub(crate) mod crew;
pub(crate) mod devices;
mod gathering;
mod launcher;
mod meeting;
mod pmix;
mod rendezvous;

pub use gathering::{Gathering, GatheringError, gathering};
pub use launcher::told_by_launcher;
pub(crate) use meeting::{Meeting, MeetingError};
pub(crate) use pmix::SHARED_MEMORY;

/// Variables in which launchers give a process its rank on this machine; the first one set wins.
pub const LOCAL_RANK_VARIABLES: [&str; 8] = [
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "FLUX_TASK_LOCAL_ID",
    "PALS_LOCAL_RANKID",
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
}
