//! The present state of one RDMA port, for a process that uses it.
//!
//! *Invariant:* only files are read, and a device file is opened but not used.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::SYSFS_VARIABLE;
use cuda_cluster_model::ids::NicPort;

/// Where device files are.
const DEVICES: &str = "/dev/infiniband";

/// Why an RDMA port can't be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum PortError {
    /// There is no such device, or it has no such port.
    #[error("there is no such RDMA port")]
    Absent,
    /// It is not active.
    #[error("it is {state}")]
    Down {
        /// The kernel's word: `DOWN`, `INIT`, `ARMED`.
        state: String,
    },
    /// The device's file can't be opened.
    #[error("{} cannot be opened ({source})", path.display())]
    Closed {
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl PortError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PortError::Closed { .. } => Some(
                "in a container: --device=/dev/infiniband; otherwise check the file's permissions",
            ),
            PortError::Down { .. } => Some("see 'ibstat' and the cable, or exclude the port"),
            PortError::Absent => None,
        }
    }
}

/// Whether a port can be used now, as far as its files tell.
///
/// # Errors
/// Why it can't.
pub fn check_port(port: &NicPort) -> Result<(), PortError> {
    let sysfs = std::env::var_os(SYSFS_VARIABLE).map_or_else(|| "/sys".into(), PathBuf::from);
    check(&sysfs, Path::new(DEVICES), port)
}

fn check(sysfs: &Path, devices: &Path, port: &NicPort) -> Result<(), PortError> {
    let number = port.port.unwrap_or(1).to_string();
    let folder = sysfs.join("class/infiniband").join(&port.nic).join("ports").join(number);
    let state = fs::read_to_string(folder.join("state")).map_err(|_| PortError::Absent)?;
    // The kernel writes `4: ACTIVE`.
    let state = state.trim();
    let state = state.split_once(": ").map_or(state, |(_, word)| word);
    if state != "ACTIVE" {
        return Err(PortError::Down { state: state.to_owned() });
    }
    let all = fs::read_dir(sysfs.join("class/infiniband_verbs")).into_iter().flatten().flatten();
    let own = all.filter(|entry| {
        let device = fs::read_to_string(entry.path().join("ibdev"));
        device.is_ok_and(|device| device.trim() == port.nic)
    });
    // Without an entry of its own, at least the directory must be there.
    let path = own.map(|entry| devices.join(entry.file_name())).next();
    let path = path.unwrap_or_else(|| devices.to_owned());
    let opened = match path == devices {
        true => fs::read_dir(&path).map(drop),
        false => OpenOptions::new().read(true).write(true).open(&path).map(drop),
    };
    opened.map_err(|source| PortError::Closed { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_absent_or_down_or_closed_or_usable() {
        let folder = tempfile::tempdir().expect("a directory");
        let (sysfs, devices) = (folder.path().join("sys"), folder.path().join("dev"));
        let port: NicPort = "mlx5_0:1".parse().expect("a port");
        let found = || check(&sysfs, &devices, &port).map_err(|error| error.to_string());
        assert_eq!(found(), Err("there is no such RDMA port".to_owned()));
        let ports = sysfs.join("class/infiniband/mlx5_0/ports/1");
        fs::create_dir_all(&ports).expect("made");
        fs::write(ports.join("state"), "1: DOWN\n").expect("written");
        assert_eq!(found(), Err("it is DOWN".to_owned()));
        fs::write(ports.join("state"), "4: ACTIVE\n").expect("written");
        assert!(found().is_err_and(|text| text.contains("cannot be opened")), "a container");
        let verbs = sysfs.join("class/infiniband_verbs/uverbs3");
        fs::create_dir_all(&verbs).expect("made");
        fs::write(verbs.join("ibdev"), "mlx5_0\n").expect("written");
        fs::create_dir_all(&devices).expect("made");
        assert!(found().is_err_and(|text| text.contains("uverbs3 cannot be opened")));
        fs::write(devices.join("uverbs3"), "").expect("written");
        assert_eq!(found(), Ok(()));
    }
}
