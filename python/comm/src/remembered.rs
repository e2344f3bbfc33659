//! What a process of this user has measured on this machine since it was started.
//!
//! It is one line in `~/.cache/cuda-cluster/routes` (or `$XDG_CACHE_HOME`): the machine's boot, its
//! kernel, and both [`Speeds`]. Without such a directory nothing is remembered. Who changes the file
//! changes how fast messages are, and not what they are.
//!
//! *Invariant:* what was measured before the machine was started, or with another kernel, does not
//! count.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::routes::Speeds;

/// Longest file that is read, in bytes.
const LIMIT: u64 = 4096;

/// Where measurements are remembered, if anywhere, and which count.
#[derive(Debug)]
pub(crate) struct Remembered {
    path: Option<PathBuf>,
    /// The boot and the kernel.
    machine: String,
}

impl Remembered {
    /// Those of this user and machine.
    pub(crate) fn here() -> Self {
        let of = |variable| std::env::var_os(variable).map(PathBuf::from);
        let cache = of("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = cache.or_else(|| of("HOME").map(|home| home.join(".cache")));
        let told = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}"));
        let machine = told("random/boot_id").and_then(|boot| {
            Ok(format!("{} {}", boot.trim(), told("osrelease")?.trim().replace(' ', "_")))
        });
        match machine {
            Ok(machine) => {
                Self { path: cache.map(|cache| cache.join("cuda-cluster/routes")), machine }
            }
            Err(_) => Self { path: None, machine: String::new() },
        }
    }

    /// The best that was measured.
    pub(crate) fn read(&self) -> Option<Speeds> {
        let path = self.path.as_ref()?;
        // Anything else than a small file would not be ours.
        fs::metadata(path).ok().filter(|file| file.is_file() && file.len() <= LIMIT)?;
        let text = fs::read_to_string(path).ok()?;
        let rest = text.trim_end().strip_prefix(&self.machine)?.strip_prefix(' ')?;
        let (mapped, copied) = rest.split_once(' ')?;
        let speed = |text: &str| {
            text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0)
        };
        Some(Speeds { mapped: speed(mapped)?, copied: speed(copied)? })
    }

    /// Remembers a measurement. If that is not possible, the next process measures.
    pub(crate) fn write(&self, found: Speeds) {
        let best = self.read().map_or(found, |known| known.best(found));
        let _ = self.path.as_ref().map(|path| self.replace(path, best));
    }

    /// Another process never reads half of it.
    fn replace(&self, path: &Path, speeds: Speeds) -> io::Result<()> {
        let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        fs::create_dir_all(directory)?;
        let beside = path.with_extension(std::process::id().to_string());
        let line = format!("{} {:e} {:e}\n", self.machine, speeds.mapped, speeds.copied);
        let written = fs::write(&beside, line).and_then(|()| fs::rename(&beside, path));
        written.inspect_err(|_| drop(fs::remove_file(&beside)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remembered(path: Option<PathBuf>, boot: &str) -> Remembered {
        Remembered { path, machine: format!("{boot} 6.18") }
    }

    fn speeds(mapped: f64, copied: f64) -> Speeds {
        Speeds { mapped, copied }
    }

    #[test]
    fn the_best_since_the_machine_was_started_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("not/yet/routes");
        let this = remembered(Some(path.clone()), "a");
        assert_eq!(this.read(), None);
        this.write(speeds(2e-10, 1e-10));
        this.write(speeds(1e-10, 3e-10));
        assert_eq!(this.read(), Some(speeds(1e-10, 1e-10)));
        assert_eq!(remembered(Some(path.clone()), "b").read(), None, "before it was started");
        assert_eq!(remembered(Some(path.clone()), "a 6").read(), None);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_not_ours_or_cannot_be_written_is_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("routes");
        for text in ["", "a 6.18", "a 6.18 1", "a 6.18 x 1", "a 6.18 -1 1", "a 6.18 NaN 1", "1 2"] {
            fs::write(&path, text).unwrap();
            assert_eq!(remembered(Some(path.clone()), "a").read(), None, "{text}");
        }
        fs::write(&path, [0xff; 9]).unwrap();
        assert_eq!(remembered(Some(path.clone()), "a").read(), None);
        fs::write(&path, format!("a 6.18 1 1{}", " ".repeat(5000))).unwrap();
        assert_eq!(remembered(Some(path.clone()), "a").read(), None, "too long");
        // A file is where a directory should be, and the other way round.
        let (below, above) = (path.join("routes"), directory.path().to_path_buf());
        for path in [None, Some(below), Some(above)] {
            let this = remembered(path, "a");
            this.write(speeds(1.0, 1.0));
            assert_eq!(this.read(), None);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn this_machine_has_a_name() {
        assert_eq!(Remembered::here().machine.split(' ').count(), 2);
    }
}
