//! What the spec says about protocols, addresses and ports, and what of it contradicts the rest.
//!
//! Does not look at a machine; `plan` finds what a machine contradicts.
//!
//! *Invariant:* each check names the key that the user should look at first.

use super::error::{Found, one_of, refuse};
use super::{ClusterSpec, GpuSelection, NetDevices};

/// Words of `dask.protocol`.
pub(super) const PROTOCOLS: &[&str] = &["tcp", "tls", "direct", "ucx", "ucxx"];

/// Checks what concerns the network.
pub(super) fn check(spec: &ClusterSpec) -> Result<(), Found> {
    protocols(spec)?;
    addresses(spec)
}

fn protocols(spec: &ClusterSpec) -> Result<(), Found> {
    let (ucx, tls) = (&spec.ucx, &spec.tls);
    let protocol = spec.dask.protocol.as_deref();
    if let Some(protocol) = protocol {
        one_of("dask.protocol", protocol, PROTOCOLS)?;
    }
    let secured = [&tls.ca_file, &tls.cert, &tls.key];
    let given = secured.iter().filter(|file| file.is_some()).count();
    if given > 0 && given < secured.len() {
        return refuse(
            "tls",
            "TLS needs all three of 'tls.ca_file', 'tls.cert' and 'tls.key'",
            "give the missing files, or none",
        );
    }
    let needs_ucx = [
        ("nvlink", ucx.nvlink == Some(true)),
        ("infiniband", ucx.infiniband == Some(true)),
        ("tcp", ucx.tcp == Some(true)),
        ("rdmacm", ucx.rdmacm == Some(true)),
        ("library", ucx.library.is_some()),
    ];
    let needs_ucx = needs_ucx.into_iter().find_map(|(key, asked)| asked.then_some(key));
    if given > 0 && (needs_ucx.is_some() || matches!(protocol, Some("ucx" | "ucxx"))) {
        return refuse(
            "tls",
            "UCX does not encrypt: TLS would be promised and not given",
            "drop 'tls', or use TCP ('dask.protocol: tls' and no 'ucx' options)",
        );
    }
    if given > 0 && protocol == Some("direct") {
        return refuse(
            "tls",
            "direct:// does not encrypt: TLS would be promised and not given",
            "drop 'tls', or use 'dask.protocol: tls'",
        );
    }
    if given > 0 && protocol == Some("tcp") {
        return refuse(
            "tls",
            "tcp:// does not encrypt: TLS would be promised and not given",
            "drop 'tls', or use 'dask.protocol: tls'",
        );
    }
    if matches!(protocol, Some("tcp" | "tls"))
        && let Some(key) = needs_ucx
    {
        return refuse(
            "dask.protocol",
            format!("'ucx.{key}' needs UCX, and this protocol is without it"),
            "use 'dask.protocol: ucxx', or leave it out",
        );
    }
    if protocol == Some("direct") && ucx.rdmacm == Some(true) {
        return refuse(
            "dask.protocol",
            "'ucx.rdmacm' connects by RDMA, and direct:// connects over sockets",
            "use 'dask.protocol: ucxx', or leave 'ucx.rdmacm' out",
        );
    }
    if protocol == Some("tls") && given == 0 {
        return refuse(
            "dask.protocol",
            "TLS needs certificates",
            "give 'tls.ca_file', 'tls.cert' and 'tls.key'",
        );
    }
    let set_in_env = |name| ucx.env.as_ref().is_some_and(|env| env.contains_key(name));
    if set_in_env("UCX_NET_DEVICES")
        && ucx.net_devices.as_ref().is_some_and(|devices| *devices != NetDevices::None)
    {
        return refuse(
            "ucx.env.UCX_NET_DEVICES",
            "'ucx.net_devices' sets this variable",
            "keep one of the two",
        );
    }
    let listed = [ucx.nvlink, ucx.infiniband, ucx.tcp].iter().any(Option::is_some);
    if set_in_env("UCX_TLS") && listed {
        return refuse(
            "ucx.env.UCX_TLS",
            "'ucx.nvlink', 'ucx.infiniband' and 'ucx.tcp' set this variable",
            "keep the variable or the options",
        );
    }
    Ok(())
}

/// A scheduler to join: an address of a protocol that Dask has, or a file.
fn joined(address: &str) -> Result<(), Found> {
    const EXAMPLE: &str = "give the scheduler's address as it prints it, like tcp://10.0.0.1:8786";
    if address.starts_with('-') {
        return refuse(
            "dask.join",
            "an address does not begin with '-'",
            "this looks like an option; give the scheduler's address, like tcp://10.0.0.1:8786",
        );
    }
    let Some((protocol, place)) = address.split_once("://") else {
        // A file may be called anything, but nobody calls one so.
        let ends_in_number =
            |(_, port): (&str, &str)| !port.is_empty() && port.chars().all(|c| c.is_ascii_digit());
        if !address.contains('/') && address.rsplit_once(':').is_some_and(ends_in_number) {
            return refuse("dask.join", format!("'{address}' says no protocol"), EXAMPLE);
        }
        return Ok(());
    };
    if ["ws", "wss"].contains(&protocol) {
        // That of a web socket may have a path, and a usual port.
        return Ok(());
    }
    if !PROTOCOLS.contains(&protocol) {
        let message = format!("'{protocol}' is no protocol of Dask's schedulers");
        return refuse("dask.join", message, EXAMPLE);
    }
    if !has_port(place.strip_suffix('/').unwrap_or(place)) {
        let message = format!("'{address}' has no host, or no port from 1 to 65535");
        return refuse("dask.join", message, EXAMPLE);
    }
    Ok(())
}

/// Whether this is a host and a port: `gpu1:8786`, `[::1]:8786`.
fn has_port(place: &str) -> bool {
    place.rsplit_once(':').is_some_and(|(host, port)| {
        let bracketed = host.starts_with('[') && host.ends_with(']');
        !host.is_empty()
            && !host.contains(char::is_whitespace)
            && (bracketed || !host.contains(':'))
            && !port.starts_with('+')
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

fn addresses(spec: &ClusterSpec) -> Result<(), Found> {
    let scheduler = &spec.scheduler;
    if scheduler.host.is_some() && scheduler.interface.is_some() {
        return refuse(
            "scheduler.interface",
            "'scheduler.host' already says where to listen",
            "give 'scheduler.host' or 'scheduler.interface'",
        );
    }
    if let Some(address) = &spec.dask.join {
        joined(address)?;
    }
    let Some(workers) = least_workers(spec) else { return Ok(()) };
    if let Some((key, _)) = [
        ("worker.listen_address", &spec.worker.listen_address),
        ("worker.contact_address", &spec.worker.contact_address),
    ]
    .iter()
    .find(|(_, address)| address.is_some() && workers > 1)
    {
        return refuse(
            key,
            format!("one address cannot serve {workers} workers"),
            "leave the address out, or have one worker",
        );
    }
    if let Some(ports) = spec.worker.ports
        && ports.count().is_some_and(|count| count < workers)
    {
        return refuse(
            "worker.ports",
            format!("{ports} has fewer ports than there are workers ({workers})"),
            "widen the range, or leave it out for any free ports",
        );
    }
    Ok(())
}

/// The number of workers, if the spec determines it without the machine.
fn least_workers(spec: &ClusterSpec) -> Option<u32> {
    let gpus = match (&spec.gpus, spec.workers) {
        (_, Some(workers)) => workers,
        (Some(GpuSelection::List(names)), None) => u32::try_from(names.len()).ok()?,
        (Some(GpuSelection::Choose(choose)), None) => choose.count,
        (Some(GpuSelection::None), None) => 0,
        (Some(GpuSelection::All) | None, None) => return None,
    };
    let on_gpus = gpus.checked_mul(spec.workers_per_gpu.unwrap_or(1))?;
    on_gpus.checked_add(spec.cpu_workers.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::super::Problem;
    use super::*;

    #[test]
    fn a_scheduler_to_join_is_an_address_of_dasks_or_a_file() {
        for good in [
            "tcp://10.0.0.1:8786",
            "tls://[::1]:8786/",
            "direct://gpu1:1",
            "wss://proxy/dask/",
            "scheduler.json",
            "/tmp/with:colon",
            "/tmp/localhost:8786",
        ] {
            assert!(joined(good).is_ok(), "{good}");
        }
        for (wrong, said) in [
            ("localhost:8786", "says no protocol"),
            ("localhost:99999", "says no protocol"),
            ("[::1]:0", "says no protocol"),
            ("http://gpu1:8786", "is no protocol of Dask's schedulers"),
            ("tcp://gpu1", "has no host, or no port"),
            ("tcp://gpu1:0", "has no host, or no port"),
            ("tcp://gpu1:65536", "has no host, or no port"),
            ("tcp://gpu1:+22", "has no host, or no port"),
            ("tcp://a b:22", "has no host, or no port"),
            ("tcp://::1:22", "has no host, or no port"),
            ("--n-workers", "does not begin with '-'"),
        ] {
            let Err(Found { key, problem }) = joined(wrong) else { panic!("{wrong} is taken") };
            let Problem::Contradiction { message, .. } = &problem else { panic!("{problem:?}") };
            assert!(key == "dask.join" && message.contains(said), "{wrong}: {message}");
        }
    }
}
