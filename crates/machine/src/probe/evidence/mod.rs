//! Gathers what preflight judges: the state of GPUs, PCI functions, files, limits, settings.
//!
//! Each source has a file here. None waits for the network, changes anything, or needs root; what
//! only root may read is reported as not seen. Judges nothing; `preflight` does.
//!
//! *Invariant:* a look that failed is [`Look::Unseen`] with the system's reason.

mod driver;
mod kernel_log;
mod network;
mod nvml;
mod pci;
mod ports;
mod process;
mod settings;
mod system;

use std::io;
use std::path::Path;
use std::time::Duration;

pub(super) use nvml::{States, confidential, state};
pub use process::seen;

use super::Options;
use cuda_cluster_model::preflight::{DeviceFile, Evidence, Look};
use cuda_cluster_model::topology::Topology;

/// What does not depend on the list of devices, read beside the driver's answers.
#[derive(Debug, Default)]
pub(super) struct Early(Evidence);

/// Reads it.
pub(super) fn early(options: &Options) -> Early {
    Early(Evidence {
        system: system::look(options),
        process: process::look(options),
        network: network::look(options),
        settings: settings::look(options),
        xids: kernel_log::xids(options),
        services: driver::services(options),
        ..Evidence::default()
    })
}

/// Everything, once the machine is known.
pub(super) fn complete(
    early: Early,
    states: States,
    options: &Options,
    topology: &Topology,
) -> Evidence {
    let Early(mut evidence) = early;
    evidence.gpus = states.gpus;
    evidence.confidential = states.confidential;
    for state in evidence.gpus.values_mut() {
        if let Look::Seen(holders) = &mut state.holders {
            for holder in holders {
                *holder = seen(&options.procfs, holder.pid, holder.bytes);
            }
        }
    }
    evidence.functions = pci::look(options, topology);
    evidence.driver = driver::look(options, topology);
    evidence.ports = ports::look(options, topology);
    evidence
}

/// Whole seconds; none for a time that lies ahead.
fn whole(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(0, |span| span.as_secs())
}

/// A file's text; not there if the file is not, and otherwise why not.
fn text(path: &Path) -> Look<String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Look::Seen(text.trim().to_owned()),
        Err(error) => failed(path, &error),
    }
}

/// A file with one value.
fn value<T: std::str::FromStr>(path: &Path) -> Look<T> {
    match text(path) {
        Look::Seen(text) => match text.parse() {
            Ok(value) => Look::Seen(value),
            Err(_) => Look::Unseen(format!("{} reads {text:?}", path.display())),
        },
        Look::NotThere => Look::NotThere,
        Look::Unseen(why) => Look::Unseen(why),
    }
}

fn failed<T>(path: &Path, error: &io::Error) -> Look<T> {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Look::NotThere,
        _ => Look::Unseen(format!("{}: {error}", path.display())),
    }
}

/// What this process may do with a device file, without opening it: the rules of its control group
/// count, too (`inode_permission` asks for them).
fn device_file(path: &Path) -> DeviceFile {
    use nix::unistd::{AccessFlags, access};
    match access(path, AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => DeviceFile::Usable,
        Err(nix::errno::Errno::ENOENT | nix::errno::Errno::ENOTDIR) => DeviceFile::Missing,
        Err(errno) => DeviceFile::Refused(errno.desc().to_owned()),
    }
}
