//! What an engine needs beyond the shared parts, in its own words.
//!
//! Decides the Dask engine's protocol; everything else is passed on as it was asked for.
//!
//! *Invariant:* only what was set is there, so that an engine's own defaults stay its own.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::decide::Context;
use super::{EngineKind, rates, ucx};
use crate::spec::{DaskSpec, SchedulerSpec, TlsSpec, WorkerSpec};
use crate::units::Size;

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
            let mut set = |key: &str, value: Option<Value>| {
                options.extend(value.map(|value| (key.to_owned(), value)));
            };
            set("local_directory", spec.worker.local_directory.as_ref().map(|path| json!(path)));
            set("resources", spec.worker.resources.as_ref().map(whole));
            set("program", spec.native.program.as_ref().map(|path| json!(path)));
            set("placement", spec.native.placement.map(|placement| json!(placement)));
            set("record_events", spec.native.record_events.as_ref().map(|path| json!(path)));
            let limit = spec.native.disk_limit.and_then(|limit| match limit {
                Size::Bytes(bytes) => Some(json!(bytes)),
                Size::Fraction(_) => None,
            });
            set("disk_limit_bytes", limit);
            let rates = rates::between(context);
            set("gb_per_s", rates.values().any(|to| !to.is_empty()).then(|| json!(rates)));
            if options.is_empty() { Value::Null } else { Value::Object(options) }
        }
    }
}

/// Amounts that the spec's own check found to be whole numbers from 0.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked by `spec`")]
fn whole(resources: &BTreeMap<String, f64>) -> Value {
    json!(resources.iter().map(|(name, n)| (name.clone(), *n as u64)).collect::<BTreeMap<_, _>>())
}
