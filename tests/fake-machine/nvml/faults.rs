//! How the fake misbehaves: `CUDA_CLUSTER_FAKE_FAULTS`, a list with blanks between its parts.
//!
//! | part | what happens |
//! |---|---|
//! | `init=mismatch` | library and kernel module differ (also `permission`, `not-loaded`, `unknown`) |
//! | `lost=3` | GPU 3 fell off the bus after it was found |
//! | `fallen=PATH` | the GPUs that this file names, like `3 5`, have fallen off the bus |
//! | `forbidden=3` | GPU 3 may not be opened |
//! | `unsupported=nvmlDeviceGetUUID` | this function is not supported |
//! | `slow=nvmlDeviceGetName:200` | this function takes 200 ms more |
//! | `affinity=empty` | CPU and memory affinity are empty masks |
//! | `busy=PATH` | the lines of this file, like `3 40`, say of GPUs how many percent of the time they compute |
//! | `xids=PATH` | lines appended to this file, like `3 79`, are Xid events of a GPU |
//! | `far-ends=hidden` | places of NVLinks' far ends are all ones |
//! | `far-ends=untold` | the kind of an NVLink's far end is not supported |
//!
//! *Invariant:* a part that is not in the table fails the initialisation.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::abi::{Answer, Return};

#[derive(Default)]
pub struct Faults {
    initialisation: Option<Return>,
    lost: Vec<u32>,
    fallen: Option<PathBuf>,
    busy: Option<PathBuf>,
    forbidden: Vec<u32>,
    unsupported: Vec<String>,
    slow: Vec<(String, Duration)>,
    /// Where Xid events come from.
    pub xids: Option<PathBuf>,
    pub empty_affinity: bool,
    pub hidden_far_ends: bool,
    pub untold_far_ends: bool,
}

impl FromStr for Faults {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut faults = Faults::default();
        for part in text.split_whitespace() {
            let (key, value) = part.split_once('=').ok_or(())?;
            let gpu = || value.parse::<u32>().map_err(|_| ());
            match (key, value) {
                ("init", "mismatch") => faults.initialisation = Some(Return::LibRmVersionMismatch),
                ("init", "permission") => faults.initialisation = Some(Return::NoPermission),
                ("init", "not-loaded") => faults.initialisation = Some(Return::DriverNotLoaded),
                ("init", "unknown") => faults.initialisation = Some(Return::Unknown),
                ("lost", _) => faults.lost.push(gpu()?),
                ("fallen", path) => faults.fallen = Some(PathBuf::from(path)),
                ("busy", path) => faults.busy = Some(PathBuf::from(path)),
                ("forbidden", _) => faults.forbidden.push(gpu()?),
                ("unsupported", function) => faults.unsupported.push(function.to_owned()),
                ("slow", _) => {
                    let (function, millis) = value.split_once(':').ok_or(())?;
                    let pause = Duration::from_millis(millis.parse().map_err(|_| ())?);
                    faults.slow.push((function.to_owned(), pause));
                }
                ("xids", path) => faults.xids = Some(PathBuf::from(path)),
                ("affinity", "empty") => faults.empty_affinity = true,
                ("far-ends", "hidden") => faults.hidden_far_ends = true,
                ("far-ends", "untold") => faults.untold_far_ends = true,
                _ => return Err(()),
            }
        }
        Ok(faults)
    }
}

impl Faults {
    /// What befalls a call of this function.
    pub fn call(&self, function: &str) -> Answer {
        if let Some((_, pause)) = self.slow.iter().find(|(name, _)| name == function) {
            std::thread::sleep(*pause);
        }
        if self.unsupported.iter().any(|name| name == function) {
            return Err(Return::NotSupported);
        }
        Ok(())
    }

    /// What befalls the initialisation.
    pub fn initialisation(&self) -> Answer {
        self.initialisation.map_or(Ok(()), Err)
    }

    /// What befalls the search for this GPU.
    pub fn handle(&self, index: u32) -> Answer {
        if self.forbidden.contains(&index) { Err(Return::NoPermission) } else { Ok(()) }
    }

    /// How many percent of the time this GPU computes; none by itself.
    pub fn busy_percent(&self, index: u32) -> u32 {
        let text = self.busy.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        let of = |line: &str| {
            let (gpu, percent) = line.split_once(' ')?;
            (gpu.parse() == Ok(index)).then(|| percent.parse().ok())?
        };
        text.as_deref().unwrap_or_default().lines().find_map(of).unwrap_or(0)
    }

    /// What befalls questions to this GPU.
    pub fn gpu(&self, index: u32) -> Answer {
        let now = self.fallen.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        let fallen =
            now.is_some_and(|text| text.split_whitespace().any(|gpu| gpu.parse() == Ok(index)));
        if fallen || self.lost.contains(&index) { Err(Return::GpuIsLost) } else { Ok(()) }
    }
}
