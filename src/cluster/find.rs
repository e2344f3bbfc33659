//! Finds running clusters by their run directories.

use super::{Client, ClientError, Control};
use crate::ids::ClusterName;
use crate::os::run_directory::{self, Paths};

/// Why no one cluster is meant.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    /// None runs.
    #[error("no cluster is running")]
    None,
    /// None of this name runs.
    #[error("no cluster named {name} is running")]
    Unknown {
        /// The name.
        name: ClusterName,
        /// Those that run.
        running: Vec<ClusterName>,
    },
    /// Several run, and none was named.
    #[error("several clusters are running: {}", list(running))]
    Several {
        /// Those that run.
        running: Vec<ClusterName>,
    },
}

impl FindError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            FindError::None => Some("bring one up: cuda-cluster up".to_owned()),
            FindError::Unknown { running, .. } if running.is_empty() => {
                Some("none is running; bring one up: cuda-cluster up --name NAME".to_owned())
            }
            FindError::Unknown { running, .. } => Some(format!("running: {}", list(running))),
            FindError::Several { .. } => Some("name one of them".to_owned()),
        }
    }
}

fn list(names: &[ClusterName]) -> String {
    names.iter().map(ClusterName::as_str).collect::<Vec<_>>().join(", ")
}

/// A running cluster.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its name.
    pub name: ClusterName,
    /// Its files.
    pub paths: Paths,
}

impl Found {
    fn new(name: ClusterName) -> Self {
        Self { paths: Paths::of(&name), name }
    }

    /// A client of its tasks.
    ///
    /// # Errors
    /// If its scheduler cannot be reached, or it is of another engine.
    pub fn client(&self) -> Result<Client, ClientError> {
        Client::connect(self.paths.root())
    }

    /// Its control API.
    pub fn control(&self) -> Control {
        Control::new(self.paths.control())
    }
}

/// This user's clusters whose supervisors live, by name.
pub fn running() -> Vec<Found> {
    let found = run_directory::names().into_iter().map(Found::new);
    found.filter(|cluster| cluster.paths.is_alive()).collect()
}

/// The running cluster of this name, or the only one.
///
/// # Errors
/// If it is not running, or without a name not exactly one is.
pub fn find(name: Option<&ClusterName>) -> Result<Found, FindError> {
    let mut running = running();
    let names = |found: &[Found]| found.iter().map(|cluster| cluster.name.clone()).collect();
    match name {
        Some(name) => {
            let running_names = names(&running);
            running
                .into_iter()
                .find(|cluster| cluster.name == *name)
                .ok_or_else(|| FindError::Unknown { name: name.clone(), running: running_names })
        }
        None if running.len() > 1 => Err(FindError::Several { running: names(&running) }),
        None => running.pop().ok_or(FindError::None),
    }
}
