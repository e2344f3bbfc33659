//! Notes who can reach what Dask's processes listen on.
//!
//! Does not look at UCX's own listeners; `ucx` does. Decides nothing.
//!
//! *Invariant:* whoever leaves addresses as they are by default gets no note, and nobody gets two.

use super::engine::{DaskPlan, EnginePlan};
use crate::topology::Note;

/// A note if whoever reaches a network interface can run code, or else read the dashboard.
pub(super) fn notes(engine: &EnginePlan) -> Option<Note> {
    let EnginePlan::Dask(dask) = engine else { return None };
    if dask.join.is_some() {
        // Its workers listen where the scheduler reaches them, whatever was asked for.
        return None;
    }
    // `direct` asks whoever connects for the cluster's secret. Over UCX the protocol itself has no
    // other way, so that is a reason of the scheduler's and a note about UCX.
    if dask.protocol == "tcp"
        && let Some((key, place)) = reachable(dask)
    {
        let instead = match dask.hosts.is_empty() {
            true => "leave the address out for loopback",
            false => "name an interface that only the hosts reach",
        };
        let text = format!(
            "Dask's tcp has no authentication: whoever reaches {place} can run code as this user; \
             use TLS ('tls'), {instead}, or close the network to strangers"
        );
        return Some(Note::new(key, text));
    }
    let host = dask.dashboard_address.rsplit_once(':').map_or("", |(host, _)| host);
    if dask.dashboard && !is_loopback(host) {
        let text = format!(
            "the dashboard has no authentication: whoever reaches {} sees the work and its logs; \
             '127.0.0.1:8787' is loopback, where an SSH tunnel reaches it",
            dask.dashboard_address
        );
        return Some(Note::new("scheduler.dashboard_address", text));
    }
    None
}

/// The key and the address of processes that listen on more than loopback by request.
fn reachable(dask: &DaskPlan) -> Option<(&'static str, String)> {
    match (&dask.host, &dask.interface) {
        (Some(host), _) => (!is_loopback(host)).then(|| {
            let place = match host.as_str() {
                "0.0.0.0" | "[::]" => format!("{host} (every interface)"),
                host => host.to_owned(),
            };
            ("scheduler.host", place)
        }),
        (None, Some(interface)) if interface != "lo" => {
            Some(("scheduler.interface", format!("interface {interface}")))
        }
        _ => None,
    }
}

/// Whether only this machine reaches an address; a name other than `localhost` may be any.
pub(super) fn is_loopback(host: &str) -> bool {
    let host = host.rsplit_once("://").map_or(host, |(_, host)| host);
    let bare = host.trim_matches(['[', ']']);
    let address = bare.parse::<core::net::IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}
