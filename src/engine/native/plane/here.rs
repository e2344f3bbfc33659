//! UCX settings of the data plane for what neither plan nor caller has a word about.
//!
//! *Invariant:* a variable that is set is left alone.

use crate::ucx::Setting;

/// The settings on top of the environment's.
///
/// Without a word about network devices only the loopback is used: nothing shall listen beyond
/// this machine unless it was asked for.
pub fn settings() -> Vec<Setting> {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if set("UCX_NET_DEVICES") { Vec::new() } else { vec![Setting::new("NET_DEVICES", "lo")] }
}
