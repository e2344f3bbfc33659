//! Finds clusters by their run directories.
//!
//! *Invariant:* a directory that can't be read is an error, not "no cluster".

use super::{Ended, Handle};
use cuda_cluster_machine::os::run_directory::{self, RunDirectoryError};
use cuda_cluster_model::ids::ClusterName;

/// Why a name does not identify exactly one running cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum FindError {
    /// No cluster is running.
    #[error("no cluster is running")]
    None {
        /// Clusters that have ended, and left files.
        ended: Vec<ClusterName>,
    },
    /// No cluster of this name is running.
    #[error("no cluster named {name} is running")]
    Unknown {
        name: ClusterName,
        /// The running clusters.
        running: Vec<ClusterName>,
    },
    /// The cluster of this name has ended.
    #[error("{} is not running: it {}", .0.name, .0.summary())]
    Ended(Box<Ended>),
    /// Several are running, and no name was given.
    #[error("several clusters are running: {}", list(running))]
    Several {
        /// The running clusters.
        running: Vec<ClusterName>,
    },
    /// It can't be determined whether the cluster of this name is running.
    #[error("cannot tell whether {name} is running")]
    Unclear {
        name: ClusterName,
        #[source]
        source: RunDirectoryError,
    },
    /// It can't be determined which clusters are running.
    #[error("cannot tell which clusters are running")]
    Unreadable(#[source] RunDirectoryError),
}

impl FindError {
    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            FindError::None { ended } if ended.is_empty() => {
                Some("bring one up: cuda-cluster up".to_owned())
            }
            FindError::None { ended } => {
                Some(format!("ended: {}; cuda-cluster ps -a says why", list(ended)))
            }
            FindError::Unknown { running, .. } if running.is_empty() => {
                Some("none is running; bring one up: cuda-cluster up --name NAME".to_owned())
            }
            FindError::Unknown { running, .. } => Some(format!("running: {}", list(running))),
            FindError::Ended(ended) => {
                let name = &ended.name;
                Some(format!("cuda-cluster events {name}, and cuda-cluster logs {name}, say more"))
            }
            FindError::Several { .. } => Some("name one of them".to_owned()),
            FindError::Unreadable(source) | FindError::Unclear { source, .. } => source.hint(),
        }
    }
}

fn list(names: &[ClusterName]) -> String {
    names.iter().map(ClusterName::as_str).collect::<Vec<_>>().join(", ")
}

impl Handle {
    /// The running cluster of this name, whoever launched it.
    ///
    /// # Errors
    /// If no cluster of this name is running; the error tells how it ended, if that is known.
    pub fn attach(name: &ClusterName) -> Result<Self, FindError> {
        super::find(Some(name))
    }
}

/// This user's clusters, by name.
#[derive(Debug, Default)]
pub struct Clusters {
    /// Running clusters.
    pub running: Vec<Handle>,
    /// Clusters that have ended, and whose names have not been used again.
    pub ended: Vec<Ended>,
    /// Why the state of others is unknown.
    pub unreadable: Vec<RunDirectoryError>,
}

impl Clusters {
    fn running_names(&self) -> Vec<ClusterName> {
        self.running.iter().map(|cluster| cluster.name.clone()).collect()
    }
}

/// Finds all of this user's clusters.
///
/// # Errors
/// If the run directories can't be read.
pub fn clusters() -> Result<Clusters, FindError> {
    let mut clusters = Clusters::default();
    for name in run_directory::names().map_err(FindError::Unreadable)? {
        let cluster = Handle::new(name);
        match cluster.paths.look() {
            Ok(true) => clusters.running.push(cluster),
            Ok(false) => clusters.ended.extend(Ended::read(&cluster.name)),
            Err(error) => clusters.unreadable.push(error),
        }
    }
    Ok(clusters)
}

/// The running cluster of this name, or the only one.
///
/// # Errors
/// If it is not running or, without a name, if not exactly one is running.
pub fn find(name: Option<&ClusterName>) -> Result<Handle, FindError> {
    match name {
        Some(name) => named(name),
        None => only(),
    }
}

fn named(name: &ClusterName) -> Result<Handle, FindError> {
    // If the directory above were unreadable, this one would seem not to exist.
    run_directory::names().map_err(FindError::Unreadable)?;
    let cluster = Handle::new(name.clone());
    let unclear = |source| FindError::Unclear { name: name.clone(), source };
    if cluster.paths.look().map_err(unclear)? {
        return Ok(cluster);
    }
    Err(match Ended::read(name) {
        Some(ended) => FindError::Ended(Box::new(ended)),
        None => FindError::Unknown { name: name.clone(), running: clusters()?.running_names() },
    })
}

fn only() -> Result<Handle, FindError> {
    let mut clusters = clusters()?;
    if clusters.running.len() > 1 {
        return Err(FindError::Several { running: clusters.running_names() });
    }
    if let Some(only) = clusters.running.pop() {
        return Ok(only);
    }
    Err(match clusters.unreadable.pop() {
        Some(error) => FindError::Unreadable(error),
        None => FindError::None { ended: clusters.ended.into_iter().map(|one| one.name).collect() },
    })
}
