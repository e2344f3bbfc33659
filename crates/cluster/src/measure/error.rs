//! Why a cluster can't be measured.
//!
//! *Invariant:* each error is about the whole measurement; a pair that fails has a verdict.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use crate::ControlError;
use cuda_cluster_machine::probe::ProbeError;
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_wire::links::trials;

/// Why a cluster can't be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum MeasureError {
    /// Its workers answer no questions, or not those of this program.
    #[error("{name} runs the {engine} engine")]
    Engine { name: ClusterName, engine: EngineKind },
    /// The file with its plan can't be used.
    #[error("cannot read {}", path.display())]
    Plan {
        path: PathBuf,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// This machine can't be probed.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// There is no worker of the requested name.
    #[error("there is no worker {name}")]
    NoWorker { name: String },
    /// A worker was requested as sender and receiver.
    #[error("{name} has no connection to itself")]
    Itself { name: String },
    /// A worker is not READY, and neither stopped nor given up.
    #[error("{process} is {state} all the time")]
    Unsettled { process: String, state: String },
    /// A process that is needed does not answer.
    #[error("{process} is {standing}")]
    NotAnswering { cluster: ClusterName, process: String, standing: String },
    /// Dask's workers have no result in time.
    #[error("no result for {ways} within {within:.0?}")]
    Silent { ways: String, within: Duration },
    /// The supervisor can't be asked.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The native scheduler can't be asked.
    #[cfg(feature = "native")]
    #[error(transparent)]
    Native(#[from] cuda_cluster_native::Error),
    /// The program ends while it measures.
    #[error("the measurement was ended")]
    Ended(#[source] Box<dyn Error + Send + Sync>),
}

impl MeasureError {
    /// What the user can do; `None` if that depends on the cause.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Engine { engine: EngineKind::Command, .. } => Some(
                "its ranks answer no questions: only native and Dask workers are measured"
                    .to_owned(),
            ),
            Self::Engine { .. } => {
                Some("measure it with 'cuda-cluster verify': this program can't".to_owned())
            }
            Self::Probe(error) => error.hint(),
            Self::NotAnswering { cluster, process, .. } => Some(format!(
                "let it go on (kill -CONT), or: cuda-cluster restart {cluster} {process}"
            )),
            Self::Silent { .. } => Some(trials::SILENT_HINT.to_owned()),
            Self::Control(error) => error.hint(),
            #[cfg(feature = "native")]
            Self::Native(error) => error.hint(),
            Self::Unsettled { process, .. } => {
                Some(format!("'cuda-cluster logs NAME {process}' shows what it does"))
            }
            Self::Plan { .. } | Self::NoWorker { .. } | Self::Itself { .. } | Self::Ended(_) => {
                None
            }
        }
    }
}
