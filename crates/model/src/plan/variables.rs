//! UCX's variables while they are collected, and what they depend on.
//!
//! Decides the Dask engine's protocol, and thereby whether UCX is used; `ucx` decides the rest.
//!
//! *Invariant:* every variable that is set here has a reason.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::context::CallerEnvironment;
use super::form::Why;
use super::rates::Peers;
use crate::spec::{ClusterSpec, EngineKind, Origin};
use crate::topology::Note;

/// The variable that lists transports.
pub const TLS: &str = "UCX_TLS";
/// The variable that lists network devices.
pub const NET_DEVICES: &str = "UCX_NET_DEVICES";
/// The variable that says how connections are set up.
pub(super) const PRIORITY: &str = "UCX_SOCKADDR_TLS_PRIORITY";

/// Whether a name of UCX's, in a list of transports, is one over RDMA: `rc`, `rc_mlx5`, `ib`.
pub(super) fn is_rdma(transport: &str) -> bool {
    ["rc", "ud", "dc", "ib", "srd"].iter().any(|kind| transport.starts_with(kind))
}

/// Whether UCX may use TCP, and so listen, with this list of transports; without one it may.
pub(super) fn may_use_tcp(env: &BTreeMap<String, String>) -> bool {
    let list = env.get(TLS).map_or("all", String::as_str);
    let (names, listed) = list.strip_prefix('^').map_or((list, true), |names| (names, false));
    names.split(',').any(|name| matches!(name.trim(), "tcp" | "all")) == listed
}

/// What the variables depend on.
pub(super) struct Situation<'a> {
    pub(super) spec: &'a ClusterSpec,
    pub(super) caller: &'a CallerEnvironment,
    pub(super) engine: EngineKind,
    /// Whether any worker has a GPU.
    pub(super) gpus: bool,
    /// Whether every GPU worker has a MIG instance.
    pub(super) all_mig: bool,
    /// Whether NICs reach all of each GPU's memory at once; `None` if the source does not tell.
    pub(super) large_windows: Option<bool>,
    /// The GPUs that access each other's memory.
    pub(super) peers: Vec<Peers>,
    /// The largest number of NICs of one worker.
    pub(super) rails: usize,
    /// Whether any RDMA port can be used.
    pub(super) rdma: bool,
    /// Elastic Fabric Adapters among the NICs, by name.
    pub(super) elastic: Vec<String>,
    /// Whether there are other NICs.
    pub(super) other_nics: bool,
    /// Whether any two GPUs are joined by NVLink; `None` if the source does not tell.
    pub(super) nvlink: Option<bool>,
}

/// The variables common to all processes.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    pub(super) env: BTreeMap<String, String>,
    pub(super) why: Vec<Why>,
    pub(super) origins: BTreeMap<String, Origin>,
    /// Objections under `strict`.
    pub(super) notes: Vec<Note>,
    /// Notes that follow from what was asked for: no objections.
    pub(super) told: Vec<Note>,
}

impl Variables {
    pub(super) fn set(&mut self, name: &str, value: impl Into<String>, reason: impl Into<String>) {
        let value = value.into();
        self.why.push(Why {
            choice: format!("env.{name}"),
            chosen: value.clone(),
            reason: reason.into(),
            rejected: Vec::new(),
        });
        self.env.insert(name.to_owned(), value);
    }

    pub(super) fn unset(&mut self, name: &str, reason: impl Into<String>) {
        self.why.push(Why {
            choice: format!("env.{name}"),
            chosen: "unset".to_owned(),
            reason: reason.into(),
            rejected: Vec::new(),
        });
    }
}

/// Whether UCX carries data of the cluster, so that its variables matter.
pub(super) fn is_used(spec: &ClusterSpec, engine: EngineKind) -> bool {
    match engine {
        EngineKind::Native | EngineKind::Command => true,
        // `direct` has it for device memory.
        EngineKind::Dask => connects(spec, engine) || protocol(spec) == "direct",
    }
}

/// Whether UCX listens on addresses and ports, and connects Dask's processes.
pub(super) fn connects(spec: &ClusterSpec, engine: EngineKind) -> bool {
    engine == EngineKind::Dask && protocol(spec).starts_with("ucx")
}

/// The spec, with `direct` as Dask's protocol where it would be `tcp` by default and this machine's
/// Python has `direct`, which is faster. On a network anybody's `tcp` is expected.
pub(super) fn with_protocol<'a>(
    spec: &'a ClusterSpec,
    caller: &CallerEnvironment,
) -> Cow<'a, ClusterSpec> {
    let dask = &spec.dask;
    let open = spec.engine == Some(EngineKind::Dask)
        && dask.protocol.is_none()
        && dask.python.is_none()
        && dask.join.is_none()
        && spec.hosts().is_empty()
        && spec.scheduler.host.is_none()
        && spec.scheduler.interface.is_none()
        && protocol(spec) == "tcp";
    let here = spec.topology.is_none() || spec.simulate == Some(true);
    if !(open && here && caller.dask_has_direct) {
        return Cow::Borrowed(spec);
    }
    let mut spec = spec.clone();
    spec.dask.protocol = Some("direct".to_owned());
    Cow::Owned(spec)
}

/// The Dask engine's protocol: UCX if any of its options was requested, else that of a scheduler to
/// join.
pub(super) fn protocol(spec: &ClusterSpec) -> String {
    let ucx = &spec.ucx;
    let asked = [ucx.nvlink, ucx.infiniband, ucx.tcp, ucx.rdmacm].iter().any(Option::is_some)
        || ucx.net_devices.is_some()
        || ucx.library.is_some()
        || ucx.compat.is_some();
    match &spec.dask.protocol {
        Some(protocol) => protocol.clone(),
        None if asked => "ucxx".to_owned(),
        None if spec.tls.cert.is_some() => "tls".to_owned(),
        None if let Some((theirs, _)) =
            spec.dask.join.as_deref().and_then(|at| at.split_once("://")) =>
        {
            theirs.to_owned()
        }
        None => "tcp".to_owned(),
    }
}
