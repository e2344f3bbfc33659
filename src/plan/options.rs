//! What an engine needs beyond the shared parts, in its own words.
//!
//! Decides the Dask engine's protocol; everything else is passed on as it was asked for.
//!
//! *Invariant:* only what was set is there, so that an engine's own defaults stay its own.

use serde_json::{Map, Value, json};

use super::decide::Context;
use super::{EngineKind, ucx};
use crate::spec::{DaskSpec, SchedulerSpec, TlsSpec, WorkerSpec};

/// The options of the Dask engine, as they stand in `Plan::engine_options`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct DaskOptions {
    /// The section `dask` of the spec, with its protocol decided.
    #[serde(default)]
    pub dask: DaskSpec,
    /// The section `scheduler`.
    #[serde(default)]
    pub scheduler: SchedulerSpec,
    /// The section `worker`, without its environment, which is in the workers' plans.
    #[serde(default)]
    pub worker: WorkerSpec,
    /// The section `tls`.
    #[serde(default)]
    pub tls: TlsSpec,
}

/// The options for the context's engine; `null` for none.
pub(super) fn of(context: &Context<'_>) -> Value {
    let spec = context.spec;
    match context.engine {
        EngineKind::Dask => {
            let mut options = DaskOptions {
                dask: spec.dask.clone(),
                scheduler: spec.scheduler.clone(),
                worker: spec.worker.clone(),
                tls: spec.tls.clone(),
            };
            options.dask.protocol = Some(ucx::protocol(spec));
            options.worker.env = None;
            json!(options)
        }
        EngineKind::Command => {
            let mut options = Map::new();
            options.extend(spec.command.argv.as_ref().map(|argv| ("argv".to_owned(), json!(argv))));
            Value::Object(options)
        }
        EngineKind::Native => {
            let mut options = Map::new();
            let directory = spec.worker.local_directory.as_ref();
            options.extend(directory.map(|path| ("local_directory".to_owned(), json!(path))));
            let program = spec.native.program.as_ref();
            options.extend(program.map(|path| ("program".to_owned(), json!(path))));
            if options.is_empty() { Value::Null } else { Value::Object(options) }
        }
    }
}
