//! How the stand-in misbehaves: `CUDA_CLUSTER_FAKE_CUDA_FAULTS`, a list with blanks between its parts.
//!
//! | part | what happens |
//! |---|---|
//! | `no-ipc` | memory of another process cannot be mapped (205) |
//! | `hang` | `cuInit` never returns |
//! | `init=802` | `cuInit` fails with this code |
//! | `other-uuid` | `cuDeviceGetUuid` names a GPU that NVML does not know |
//! | `taken=95` | other processes have this percentage of each GPU's memory |
//! | `small=100M` | each GPU has this much memory |
//! | `async` | work on streams is done later, by another thread; pinned memory is read only then; the end of what is copied from pageable memory lands later, unless the memory's operations are synchronous |
//! | `poison` | fresh device memory is full of `0xA5` |
//! | `latency=50` | each call takes this many microseconds more |
//! | `sticky=PATH` | lines appended to this file, like `3 700`, are faults of GPU 3: the processes that have a context there get this code from then on |
//! | `wrong-bytes=0:3` | what is copied from GPU 0 to GPU 3 arrives with other bytes; an end may be `host` |
//! | `slow-copy=0:3:20` | each copy from GPU 0 to GPU 3 takes this many milliseconds more |
//! | `rate=15` | copies to and from a GPU take no less time than at this many GB/s |
//! | `hang-copy=0:3` | a copy from GPU 0 to GPU 3 never ends |
//! | `report=FOLDER` | each process writes what it left, to `PID.json`, when it exits (see `report`) |
//!
//! *Invariant:* a part that is not in the table fails `cuInit`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A way of copies: from and to the GPUs with these numbers of NVML's; `None` is the host.
pub type Way = (Option<u32>, Option<u32>);

#[derive(Default)]
pub struct Faults {
    pub no_ipc: bool,
    pub other_uuid: bool,
    pub hang: bool,
    /// The share of each GPU's memory that others have, in hundredths.
    pub taken: usize,
    /// What `cuInit` answers.
    pub init: Option<i32>,
    pub later: bool,
    pub poison: bool,
    pub latency: Duration,
    /// The memory of each GPU in bytes.
    pub small: Option<usize>,
    pub report: Option<PathBuf>,
    wrong_bytes: Vec<Way>,
    slow_copies: Vec<(Way, Duration)>,
    /// Bytes in a nanosecond.
    rate: Option<u64>,
    /// Nanoseconds that copies were too short.
    owed: AtomicU64,
    hanging_copies: Vec<Way>,
    /// Where faults come from, and how long that file was at first.
    sticky: Option<(PathBuf, u64)>,
}

impl FromStr for Faults {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut faults = Faults::default();
        for part in text.split_whitespace() {
            match part.split_once('=').unwrap_or((part, "")) {
                ("no-ipc", "") => faults.no_ipc = true,
                ("taken", share) => faults.taken = share.parse().map_err(|_| ())?,
                ("hang", "") => faults.hang = true,
                ("other-uuid", "") => faults.other_uuid = true,
                ("init", code) => faults.init = Some(code.parse().map_err(|_| ())?),
                ("async", "") => faults.later = true,
                ("poison", "") => faults.poison = true,
                ("latency", micros) => {
                    faults.latency = Duration::from_micros(micros.parse().map_err(|_| ())?);
                }
                ("small", size) => faults.small = Some(bytes(size).ok_or(())?),
                ("report", folder) => faults.report = Some(PathBuf::from(folder)),
                ("wrong-bytes", ends) => faults.wrong_bytes.push(way(ends).ok_or(())?),
                ("hang-copy", ends) => faults.hanging_copies.push(way(ends).ok_or(())?),
                ("slow-copy", value) => {
                    let (ends, millis) = value.rsplit_once(':').ok_or(())?;
                    let pause = Duration::from_millis(millis.parse().map_err(|_| ())?);
                    faults.slow_copies.push((way(ends).ok_or(())?, pause));
                }
                ("rate", rate) => {
                    let rate = rate.parse().ok().filter(|rate| *rate > 0).ok_or(())?;
                    faults.rate = Some(rate);
                }
                ("sticky", path) => {
                    let path = PathBuf::from(path);
                    let old = path.metadata().map_or(0, |metadata| metadata.len());
                    faults.sticky = Some((path, old));
                }
                _ => return Err(()),
            }
        }
        Ok(faults)
    }
}

/// Nanoseconds for which it is worth to sleep.
const SHORTEST: u64 = 100_000;

/// Two ends like `0:3` or `host:3`.
fn way(text: &str) -> Option<Way> {
    let end = |text: &str| match text {
        "host" => Some(None),
        number => number.parse().ok().map(Some),
    };
    let (from, to) = text.split_once(':')?;
    Some((end(from)?, end(to)?))
}

/// A size like `100M`, in powers of 1024.
fn bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match text.strip_prefix(digits)? {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_shl(shift)
}

impl Faults {
    /// What befalls a copy before it begins.
    pub fn copy(&self, way: Way, bytes: usize) {
        if self.hanging_copies.contains(&way) {
            loop {
                std::thread::park();
            }
        }
        if let Some((_, pause)) = self.slow_copies.iter().find(|(other, _)| *other == way) {
            std::thread::sleep(*pause);
        }
        if let Some(rate) = self.rate.filter(|_| way.0 != way.1) {
            // A sleep is never short: what is less waits for more.
            let more = bytes as u64 / rate;
            let owed = self.owed.fetch_add(more, Ordering::Relaxed) + more;
            if owed > SHORTEST {
                self.owed.fetch_sub(owed, Ordering::Relaxed);
                std::thread::sleep(Duration::from_nanos(owed));
            }
        }
    }

    /// Whether the bytes of a copy arrive otherwise.
    pub fn spoils(&self, way: Way) -> bool {
        self.wrong_bytes.contains(&way)
    }

    /// The faults of GPUs since the process began to look: number of the GPU and code.
    pub fn sticky(&self) -> Vec<(u32, i32)> {
        let Some((path, old)) = &self.sticky else { return Vec::new() };
        let Ok(mut file) = File::open(path) else { return Vec::new() };
        let mut new = String::new();
        if file.seek(SeekFrom::Start(*old)).is_err() || file.read_to_string(&mut new).is_err() {
            return Vec::new();
        }
        let fault = |line: &str| {
            let (gpu, code) = line.split_once(' ')?;
            Some((gpu.parse().ok()?, code.trim().parse().ok()?))
        };
        new.lines().filter_map(fault).collect()
    }
}
