//! Values that are well-formed but cannot be meant, whatever the rest of the spec says.
//!
//! Refuses only values that are wrong on every machine.

use super::error::{Found, refuse};
use super::{ClusterSpec, Limit, OverrideSpec};
use crate::units::Size;

/// Refuses texts that cannot be an address.
pub(super) fn addresses(spec: &ClusterSpec) -> Result<(), Found> {
    let scheduler = &spec.scheduler;
    for (key, address) in [
        ("scheduler.host", &scheduler.host),
        ("scheduler.interface", &scheduler.interface),
        ("scheduler.dashboard_address", &scheduler.dashboard_address),
        ("worker.listen_address", &spec.worker.listen_address),
        ("worker.contact_address", &spec.worker.contact_address),
    ] {
        let Some(address) = address else { continue };
        if let Some(message) = no_address(address) {
            return refuse(key, message, "give an address like 10.0.0.1, or leave it out");
        }
    }
    Ok(())
}

/// The reason why a text cannot be an address, host name or interface, if that is certain.
fn no_address(text: &str) -> Option<String> {
    let dotted = |text: &str| {
        text.contains('.') && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    // `tcp://10.0.0.1:8786` and `10.0.0.1:8786` are addresses of Dask.
    let host = text.rsplit("://").next().unwrap_or(text);
    let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if text.is_empty() {
        Some("it is empty".to_owned())
    } else if text.starts_with('-') {
        Some(format!("{text:?} looks like an option"))
    } else if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        Some(format!("{text:?} has blanks in it"))
    } else if host.is_empty() && !digits {
        // `:8787` is a port alone.
        Some(format!("{text:?} names neither a host nor a port"))
    } else if digits && port.parse::<u16>().is_err() {
        Some(format!("{port} is no port: the largest is {}", u16::MAX))
    } else if dotted(host) && host.parse::<core::net::Ipv4Addr>().is_err() {
        Some(format!("{host} is no IPv4 address: it has four numbers from 0 to 255"))
    } else {
        None
    }
}

/// Lowest host memory limit of a worker, in bytes: about what an idle worker uses.
const LEAST_MEMORY: u64 = 16 << 20;

/// Lowest device memory limit of a worker, in bytes: small enough to force spilling on purpose, and
/// larger than any number with a forgotten unit.
const LEAST_DEVICE_MEMORY: u64 = 64 << 10;

/// Refuses limits that no worker can run with.
pub(super) fn memory(spec: &ClusterSpec) -> Result<(), Found> {
    let differing = |pick: fn(&OverrideSpec) -> Option<Limit>, name: &str| {
        let limits = spec.overrides.iter().enumerate();
        let named = |(at, difference)| Some((format!("overrides[{at}].{name}"), pick(difference)?));
        limits.filter_map(named).collect::<Vec<_>>()
    };
    let host = spec.memory.limit.map(|limit| ("memory.limit".to_owned(), limit));
    let host = host.into_iter().chain(differing(|d| d.memory_limit, "memory_limit"));
    let host = host.map(|limit| (limit, LEAST_MEMORY));
    let device = spec.device.memory_limit.map(|limit| ("device.memory_limit".to_owned(), limit));
    let device =
        device.into_iter().chain(differing(|d| d.device_memory_limit, "device_memory_limit"));
    let device = device.map(|limit| (limit, LEAST_DEVICE_MEMORY));
    for ((key, limit), least) in host.chain(device) {
        if let Limit::Size(Size::Bytes(bytes)) = limit
            && bytes < least
        {
            return refuse(
                &key,
                format!(
                    "{} too few for a worker; the least is {}",
                    counted(bytes),
                    Size::Bytes(least)
                ),
                "a number without a unit is bytes: write 4GB, or 0.5 for half of what there is",
            );
        }
    }
    Ok(())
}

fn counted(bytes: u64) -> String {
    if bytes == 1 { "1 byte is".to_owned() } else { format!("{bytes} bytes are") }
}
