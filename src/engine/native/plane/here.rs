//! What of the planned UCX settings this machine has.
//!
//! Does not choose transports; the plan did, for a machine that may be simulated here.
//!
//! *Invariant:* on a machine that is not simulated the plan's settings are used as they are.

use std::path::Path;

use crate::ucx::Setting;

/// Transports that need hardware: UCX's names and aliases, without a GPU's or a NIC's.
const HOST_TRANSPORTS: [&str; 12] =
    ["all", "cma", "knem", "mm", "posix", "self", "shm", "sm", "sockcm", "sysv", "tcp", "xpmem"];

/// The settings on top of the environment's.
///
/// Without a word about network devices only the loopback is used: nothing shall listen beyond
/// this machine unless it was asked for.
pub fn settings(simulated: bool) -> Vec<Setting> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut settings = Vec::new();
    match variable("UCX_NET_DEVICES") {
        None => settings.push(Setting::new("NET_DEVICES", "lo")),
        Some(planned) if simulated => {
            settings.extend(reduce("NET_DEVICES", &planned, "lo", |device| {
                device == "all" || Path::new("/sys/class/net").join(device).exists()
            }))
        }
        Some(_) => {}
    }
    if let (Some(planned), true) = (variable("UCX_TLS"), simulated) {
        settings.extend(reduce("TLS", &planned, "sm,self,tcp", |transport| {
            HOST_TRANSPORTS.contains(&transport)
        }));
    }
    settings
}

/// The part of a list that is here, where it is not all of it; `otherwise` if it is nothing.
///
/// A list that excludes (`^ib`) is left alone.
fn reduce(
    name: &str,
    planned: &str,
    otherwise: &str,
    is_here: impl Fn(&str) -> bool,
) -> Option<Setting> {
    if planned.starts_with('^') {
        return None;
    }
    let (here, missing): (Vec<&str>, Vec<&str>) =
        planned.split(',').map(str::trim).partition(|word| is_here(word));
    if missing.is_empty() {
        return None;
    }
    let value = if here.is_empty() { otherwise.to_owned() } else { here.join(",") };
    tracing::info!(
        planned,
        used = value,
        "UCX_{name} is reduced to what this machine has, since the planned one is simulated"
    );
    Some(Setting::new(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planned_list_is_reduced_to_what_is_here() {
        let here = |word: &str| HOST_TRANSPORTS.contains(&word);
        let reduced = reduce("TLS", "rc,tcp,cuda_copy,cuda_ipc,sm,self", "sm", here);
        assert_eq!(reduced, Some(Setting::new("TLS", "tcp,sm,self")));
        assert_eq!(reduce("TLS", "tcp,self", "sm", here), None);
        assert_eq!(reduce("TLS", "^rc", "sm", here), None);
        let nothing_left = reduce("TLS", "rc", "sm,self,tcp", here);
        assert_eq!(nothing_left, Some(Setting::new("TLS", "sm,self,tcp")));
    }
}
