//! Compares the NIC ports that the plan gives a worker with those that its UCX has opened.
//!
//! UCX leaves out what it can't open, without an error. Pure, apart from [`Ports::of`].
//!
//! *Invariant:* a planned port that can't be used is always reported, with its cause.

use crate::error::Error;
use cuda_cluster_data::ucx::lane_transports;
use cuda_cluster_machine::probe::PortError;
use cuda_cluster_model::ids::NicPort;
use cuda_cluster_model::plan::{NET_DEVICES, TLS, WorkerPlan};
use cuda_cluster_wire::status::MissingPort;

/// Transports that carry messages to no other process by themselves.
const NOT_TO_OTHERS: [&str; 7] =
    ["self", "cuda_copy", "cuda_ipc", "gdr_copy", "cma", "knem", "rocm_copy"];

/// UCX's module with the transports for InfiniBand and RoCE.
const VERBS: &str = "libuct_ib";

/// The planned ports of a worker, and what its UCX has opened.
pub(super) struct Ports {
    planned: Vec<NicPort>,
    /// `transport/device` each.
    resources: Vec<String>,
    /// `UCX_TLS`, if it is set.
    transports: Option<String>,
    /// Whether UCX has loaded its module for InfiniBand.
    has_verbs: bool,
    /// The libucp, for messages.
    library: String,
}

impl Ports {
    /// The ports of this process's worker. Those of a simulated machine are not expected.
    pub(super) fn of(
        worker: Option<&WorkerPlan>,
        simulated: bool,
        resources: Vec<String>,
        library: String,
    ) -> Self {
        let planned = worker.filter(|_| !simulated).map(planned).unwrap_or_default();
        let transports = std::env::var(TLS).ok();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self { planned, resources, transports, has_verbs: maps.contains(VERBS), library }
    }

    /// The planned ports that can't be used. `check` tells whether a port can be used now.
    pub(super) fn missing(
        &self,
        check: impl Fn(&NicPort) -> Result<(), PortError>,
    ) -> Vec<MissingPort> {
        let missing = |port: &NicPort| {
            let name = port.to_string();
            let opened = self
                .resources
                .iter()
                .any(|resource| resource.split_once('/').is_some_and(|(_, device)| device == name));
            let why = match check(port) {
                Err(error @ (PortError::Absent | PortError::Down { .. })) => in_full(&error),
                Ok(()) | Err(PortError::Closed { .. }) if opened => return None,
                _ if !self.has_verbs => format!(
                    "{} has no transports for InfiniBand and RoCE: {VERBS} is not there, or could \
                     not be loaded",
                    self.library
                ),
                Err(error) => in_full(&error),
                Ok(()) => {
                    let set = self.transports.as_ref().map(|list| format!("{TLS}={list}"));
                    let set = set.unwrap_or_else(|| format!("{TLS} is not set"));
                    format!("UCX has not opened it, and {set}: UCX_LOG_LEVEL=info tells more")
                }
            };
            Some(MissingPort { port: name, why })
        };
        self.planned.iter().filter_map(missing).collect()
    }

    /// Decides whether the worker can go on without some planned ports: not if the plan is strict,
    /// or if what UCX has opened reaches no peer.
    ///
    /// # Errors
    /// If it can't.
    pub(super) fn judge(
        &self,
        missing: &[MissingPort],
        strict: bool,
        has_peers: bool,
    ) -> Result<(), Error> {
        let carries = |transport: &&str| !NOT_TO_OTHERS.contains(transport);
        let reaches = lane_transports(&self.resources).iter().any(carries);
        if has_peers && !reaches {
            let opened = self.resources.join(" ");
            return Err(Error::Unreachable { opened, missing: missing.to_vec() });
        }
        if strict && !missing.is_empty() {
            return Err(Error::Ports { missing: missing.to_vec() });
        }
        Ok(())
    }
}

/// The planned ports, and those that someone named in `UCX_NET_DEVICES`.
fn planned(worker: &WorkerPlan) -> Vec<NicPort> {
    let named = worker.env.get(NET_DEVICES).into_iter().flat_map(|value| value.split(','));
    let named = named.filter_map(|name| name.trim().parse().ok());
    let mut planned: Vec<NicPort> = Vec::new();
    for port in worker.nics.iter().cloned().chain(named) {
        // A device without a port is a network interface, or known by its column alone.
        if port.port.is_some() && !planned.contains(&port) {
            planned.push(port);
        }
    }
    planned
}

fn in_full(error: &PortError) -> String {
    let hint = error.hint().map(|hint| format!(": {hint}")).unwrap_or_default();
    format!("{error}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str) -> NicPort {
        name.parse().expect("a port")
    }

    /// A worker whose plan has `mlx5_0:1`, with what UCX opened.
    fn ports(resources: &str) -> Ports {
        Ports {
            planned: vec![port("mlx5_0:1")],
            resources: resources.split_whitespace().map(str::to_owned).collect(),
            transports: Some("rc,posix,cma,self".to_owned()),
            has_verbs: true,
            library: "libucp.so.0".to_owned(),
        }
    }

    fn why(ports: &Ports, state: Result<(), PortError>) -> Option<String> {
        let state = std::cell::RefCell::new(Some(state));
        let missing = ports.missing(|_| state.borrow_mut().take().expect("asked once"));
        missing.into_iter().next().map(|missing| missing.why)
    }

    const ALL: &str = "self/memory posix/memory rc_mlx5/mlx5_0:1 ud_mlx5/mlx5_0:1";

    #[test]
    fn a_port_that_ucx_has_opened_and_that_is_active_is_there() {
        assert_eq!(why(&ports(ALL), Ok(())), None);
        let other = ports("self/memory posix/memory rc_mlx5/mlx5_0:10 tcp/lo");
        assert!(why(&other, Ok(())).is_some_and(|why| why.contains("UCX has not opened it")));
    }

    #[test]
    fn the_cause_is_the_nearest_one() {
        let down = PortError::Down { state: "DOWN".to_owned() };
        assert!(why(&ports(ALL), Err(down)).is_some_and(|why| why.starts_with("it is DOWN")));
        let gone = why(&ports(ALL), Err(PortError::Absent));
        assert_eq!(gone.as_deref(), Some("there is no such RDMA port"));
        let closed = || PortError::Closed {
            path: "/dev/infiniband/uverbs0".into(),
            source: std::io::Error::from(std::io::ErrorKind::PermissionDenied),
        };
        let container = why(&ports("posix/memory"), Err(closed())).expect("missing");
        assert!(container.contains("uverbs0 cannot be opened"), "{container}");
        assert!(container.contains("--device=/dev/infiniband"), "{container}");
        let without = Ports { has_verbs: false, ..ports("posix/memory") };
        let without = why(&without, Err(closed())).expect("missing");
        assert!(without.contains("has no transports for InfiniBand"), "{without}");
    }

    #[test]
    fn a_worker_without_its_port_goes_on_over_what_reaches_its_peers_unless_that_is_strict() {
        let missing = [MissingPort { port: "mlx5_0:1".to_owned(), why: "it is DOWN".to_owned() }];
        let over = |resources, strict, peers| ports(resources).judge(&missing, strict, peers);
        assert!(over("self/memory posix/memory cma/memory", false, true).is_ok());
        assert!(matches!(
            over("self/memory posix/memory", true, true),
            Err(Error::Ports { missing }) if missing.len() == 1
        ));
        let alone = over("self/memory cuda_copy/cuda cma/memory", false, true);
        let error = alone.expect_err("nothing reaches a peer").in_full();
        assert!(error.contains("mlx5_0:1") && error.contains("it is DOWN"), "{error}");
        assert!(over("self/memory", false, false).is_ok(), "it has no peers");
    }

    #[test]
    fn a_port_that_is_back_is_found_by_the_next_process() {
        let down = ports("self/memory posix/memory");
        assert!(why(&down, Err(PortError::Down { state: "DOWN".to_owned() })).is_some());
        assert_eq!(why(&ports(ALL), Ok(())), None);
    }
}
