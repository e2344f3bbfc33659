//! Groups a cluster's processes, so that all of them can be killed together.
//!
//! Does not kill anything by itself; the guardian and the supervisor do.
//!
//! *Invariant:* a [`Cgroup`] was created by this program, below the group it was started in.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A version 2 control group that this program has created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    path: PathBuf,
}

/// Prefix of the names of our control groups; groups with other names are never removed.
const PREFIX: &str = "cuda-cluster-";

impl Cgroup {
    /// Creates the cluster's group below the current group of this process.
    ///
    /// # Errors
    /// If there is no version 2 hierarchy, it may not be written, or the kernel has no
    /// `cgroup.kill` (before 5.14).
    pub fn create(label: &str) -> io::Result<Self> {
        let home = own_path()?;
        remove_empty(&home);
        let path = home.join(format!("{PREFIX}{label}"));
        fs::create_dir(&path)?;
        let group = Self { path };
        if group.path.join("cgroup.kill").exists() {
            return Ok(group);
        }
        group.remove();
        Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel has no cgroup.kill"))
    }

    /// An existing group, by its path.
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Creates a child group.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn child(&self, name: &str) -> io::Result<Self> {
        let path = self.path.join(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self { path }),
        }
    }

    /// The group's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves this process into the group.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn enter(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.procs"), "0")
    }

    /// Moves this process out of the group, into its parent, and removes the group.
    pub fn leave(&self) {
        let home = self.path.parent().map(|home| Self::at(home.to_owned()));
        if home.is_none_or(|home| home.enter().is_err()) {
            return;
        }
        for _ in 0..100 {
            if self.remove() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends SIGKILL to all processes in the group and below it.
    pub fn kill(&self) {
        // Fails only if the group is gone, and then it has no processes.
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
    }

    /// Whether the group, or a group below it, has a living process.
    pub fn is_populated(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events"))
            .is_ok_and(|text| text.lines().any(|line| line == "populated 1"))
    }

    /// Removes the group and those below it, if they are empty; returns whether it is gone.
    pub fn remove(&self) -> bool {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            Self::at(entry.path()).remove();
        }
        match fs::remove_dir(&self.path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Kills and removes what is left of a cluster whose supervisor and guardian were both killed.
    ///
    /// Ignores paths that are not one of our groups.
    pub fn remove_left_over(path: &Path) {
        let ours = path.file_name().and_then(|name| name.to_str());
        let in_hierarchy = path.join("cgroup.kill").exists();
        if !in_hierarchy || !ours.is_some_and(|name| name.starts_with(PREFIX)) {
            return;
        }
        let group = Self::at(path.to_owned());
        group.kill();
        for _ in 0..200 {
            if group.remove() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// No process is about to enter an empty group that is older than this.
const OLD: Duration = Duration::from_secs(60);

/// Removes empty groups of ours. They are left behind when supervisor and guardian were both killed
/// and the run directory was removed before a clean-up.
fn remove_empty(home: &Path) {
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        let group = Cgroup::at(entry.path());
        let made = entry.metadata().and_then(|metadata| metadata.modified());
        let old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > OLD));
        if ours && old && !group.is_populated() {
            group.remove();
        }
    }
}

/// The directory of this process's version 2 control group.
pub(super) fn own_path() -> io::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let membership = fs::read_to_string("/proc/self/cgroup")?;
    find(&mounts, &membership)
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "no version 2 control groups"))
}

/// The directory of the control group that limits the number of this process's tasks, and where its
/// hierarchy, of version 1 or 2, is mounted.
pub(super) fn own_group_of_tasks() -> Option<(PathBuf, PathBuf)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    locate(&mounts, &membership, Some("pids")).or_else(|| locate(&mounts, &membership, None))
}

/// Finds the version 2 directory in the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn find(mounts: &str, membership: &str) -> Option<PathBuf> {
    locate(mounts, membership, None).map(|(group, _)| group)
}

/// Finds the group and its hierarchy's mount point: the hierarchy of a version 1 controller, or of
/// version 2.
///
/// A mount in a container shows only what is below its root, so the root is removed from the path.
fn locate(mounts: &str, membership: &str, controller: Option<&str>) -> Option<(PathBuf, PathBuf)> {
    // `ID:CONTROLLERS:PATH`, cgroups(7); version 2 has the id 0 and no controllers.
    let path = membership.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let wanted = match controller {
            Some(one) => controllers.split(',').any(|other| other == one),
            None => line.starts_with("0::"),
        };
        wanted.then_some(path)
    })?;
    mounts.lines().find_map(|line| {
        // `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS… - TYPE SOURCE SUPER`, proc(5).
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1).unwrap_or_default());
        let right = match controller {
            Some(one) => kind == "cgroup" && options.split(',').any(|other| other == one),
            None => kind == "cgroup2",
        };
        let mut fields = before.split(' ').skip(3).filter(|_| right);
        let (root, point) = (fields.next()?, fields.next()?);
        let below = Path::new(path).strip_prefix(root).ok()?;
        Some((Path::new(point).join(below), PathBuf::from(point)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
";

    #[test]
    fn the_version_2_group_is_found_on_a_hybrid_system() {
        let membership = "4:memory:/x\n0::/user.slice/a\n";
        let expected = Path::new("/sys/fs/cgroup/unified/user.slice/a");
        assert_eq!(find(HYBRID, membership).as_deref(), Some(expected));
        assert_eq!(find(HYBRID, "4:memory:/x\n"), None);
    }

    #[test]
    fn a_containers_mount_shows_what_is_below_its_root() {
        let mounts = "9 1 0:30 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let found = find(mounts, "0::/docker/abc/x\n");
        assert_eq!(found.as_deref(), Some(Path::new("/sys/fs/cgroup/x")));
        assert_eq!(find(mounts, "0::/elsewhere\n"), None);
    }

    #[test]
    fn a_group_that_is_not_ours_is_left_alone() {
        let folder = tempfile::tempdir().expect("a directory");
        let foreign = folder.path().join("somebody");
        fs::create_dir(&foreign).expect("made");
        Cgroup::remove_left_over(&foreign);
        assert!(foreign.exists());
    }
}
