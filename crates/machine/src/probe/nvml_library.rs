//! Opens NVML, and distinguishes a missing driver from a broken one.
//!
//! Calls nothing but the initialisation.
//!
//! *Invariant:* the driver counts as missing only if no library was found or the kernel module is
//! not loaded; every other failure is an error with its cause.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Where to look for NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Libraries {
    /// Where the dynamic linker finds it, and where containers, WSL and NixOS install it.
    #[default]
    Usual,
    /// This file, which must exist.
    Named(PathBuf),
    /// Nowhere: use no GPUs.
    None,
}

/// `libnvidia-ml.so` without a number belongs to the development files, so it is not used.
const USUAL: [&str; 4] = [
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/lib64-nvidia/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
];

/// A library, or the reason why there is no driver.
#[derive(Debug)]
pub(super) enum Opened {
    /// NVML works.
    Working(Box<Nvml>),
    /// There is no driver.
    Absent(Absent),
}

/// Why there is no driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// NVML was disabled.
    NotAsked,
    /// No `libnvidia-ml.so.1`.
    NoLibrary,
    /// The library exists, but the kernel module is not loaded.
    NotLoaded,
}

/// Why an installed driver does not work.
#[derive(Debug, thiserror::Error)]
pub enum DriverFault {
    /// The library can't be loaded.
    #[error("NVML cannot be loaded: {reason}")]
    Library {
        library: PathBuf,
        /// The dynamic linker's message, which begins with the file.
        reason: String,
    },
    /// The library's version differs from that of the kernel module.
    #[error("the library {} and the kernel module have different versions", library.display())]
    Mismatch { library: PathBuf },
    /// Access to the device files is denied.
    #[error("this user may not use the NVIDIA device files")]
    NoPermission,
    /// NVML failed for another reason.
    #[error("NVML failed in {call}")]
    Nvml { call: &'static str, source: NvmlError },
}

impl DriverFault {
    /// A hint for the user.
    pub(super) fn hint(&self) -> Option<String> {
        let hint = match self {
            DriverFault::Library { .. } => {
                format!(
                    "name a working library in {}, or reinstall the driver",
                    super::NVML_VARIABLE
                )
            }
            DriverFault::Mismatch { .. } => {
                "the driver was updated under the running system: reboot, or reload the nvidia \
                 kernel modules; in a container, restart it"
                    .to_owned()
            }
            DriverFault::NoPermission => {
                "see who may open /dev/nvidiactl and /dev/nvidia*; in a container, give it the GPUs"
                    .to_owned()
            }
            DriverFault::Nvml { .. } => {
                "see what `nvidia-smi` says; in a container whose GPUs have vanished, restart it"
                    .to_owned()
            }
        };
        Some(hint)
    }
}

/// Opens the first existing library and initialises it.
pub(super) fn open(libraries: &Libraries) -> Result<Opened, DriverFault> {
    match libraries {
        Libraries::None => Ok(Opened::Absent(Absent::NotAsked)),
        Libraries::Named(path) => initialise(path),
        Libraries::Usual => {
            for path in USUAL.map(Path::new) {
                match initialise(path) {
                    Err(DriverFault::Library { library, reason })
                        if not_found(&library, &reason) => {}
                    answer => return answer,
                }
            }
            Ok(Opened::Absent(Absent::NoLibrary))
        }
    }
}

/// Whether the dynamic linker's message is about this library, and not about one that it needs.
fn not_found(library: &Path, reason: &str) -> bool {
    reason.contains(&format!("{}: cannot open shared object file", library.display()))
}

fn initialise(library: &Path) -> Result<Opened, DriverFault> {
    let opened = Nvml::builder().lib_path(OsStr::new(library)).init();
    let library = library.to_owned();
    match opened {
        Ok(nvml) => Ok(Opened::Working(Box::new(nvml))),
        Err(NvmlError::DriverNotLoaded) => Ok(Opened::Absent(Absent::NotLoaded)),
        Err(NvmlError::LibRmVersionMismatch) => Err(DriverFault::Mismatch { library }),
        Err(NvmlError::NoPermission) => Err(DriverFault::NoPermission),
        Err(NvmlError::LibloadingError(error)) => {
            Err(DriverFault::Library { library, reason: error.to_string() })
        }
        Err(NvmlError::FailedToLoadSymbol(reason)) => Err(DriverFault::Library { library, reason }),
        Err(source) => Err(DriverFault::Nvml { call: "nvmlInit", source }),
    }
}
