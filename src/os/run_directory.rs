//! A cluster's run directory: where its socket, plan, secret, events and logs are, and who owns it.
//!
//! `$XDG_RUNTIME_DIR/cuda-cluster/NAME`, or `/tmp/cuda-cluster-UID/NAME` without one. Does not know
//! what is in the files.
//!
//! *Invariant:* a [`RunDirectory`] holds the lock (`flock` on the directory itself), belongs to
//! this user, and is closed to all others (0700). The lock passes to the guardian too, so that a
//! free lock means that no process of the cluster is left to be waited for. systemd-tmpfiles also
//! leaves locked directories alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::Uid;

use super::shared_memory;
use crate::ids::ClusterName;

/// Longest path of a Unix socket: `sun_path` is 108 bytes, and one is its terminating zero.
pub const SOCKET_PATH_LIMIT: usize = 107;

const PLAN: &str = "plan.json";
const CONTROL: &str = "control.sock";
const SECRET: &str = "secret";
const EVENTS: &str = "events.jsonl";
const LOGS: &str = "logs";
const CRASHES: &str = "crashes";
const CGROUP: &str = "cgroup";

/// Why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunDirectoryError {
    /// Another supervisor (or its guardian) lives in it.
    #[error("a cluster named {name} is already running in {}", path.display())]
    Taken {
        /// The name.
        name: ClusterName,
        /// The directory.
        path: PathBuf,
    },
    /// It is not this user's.
    #[error("{} belongs to user {owner}, not to user {wanted}", path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This user.
        wanted: u32,
    },
    /// A link or a file where a directory should be.
    #[error("{} is {what}, not a directory", path.display())]
    NoDirectory {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Others may write to it.
    #[error("{} is open to other users (mode {mode:03o})", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Its socket's path would not fit into a socket address.
    #[error("{} has {length} bytes, and a socket's path at most {SOCKET_PATH_LIMIT}", path.display())]
    TooLong {
        /// The socket's path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// The system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl RunDirectoryError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Taken { name, .. } => {
                Some(format!("choose another --name, or end that one: cuda-cluster down {name}"))
            }
            Self::Foreign { path, .. } | Self::NoDirectory { path, .. } => Some(format!(
                "remove {}, or set XDG_RUNTIME_DIR to a directory of your own",
                path.display()
            )),
            Self::Open { path, .. } => Some(format!("chmod 700 {}", path.display())),
            Self::TooLong { .. } => {
                Some("choose a shorter --name, or a shorter XDG_RUNTIME_DIR".to_owned())
            }
            Self::Io { .. } => None,
        }
    }
}

/// A locked run directory. The lock is released when this and its guardian are gone.
#[derive(Debug)]
pub struct RunDirectory {
    name: ClusterName,
    paths: Paths,
    lock: Flock<OwnedFd>,
}

/// The files of a run directory, by name; says nothing about whether they exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// Those of a cluster, below this user's [`base`].
    pub fn of(name: &ClusterName) -> Self {
        Self::below(&base(), name)
    }

    /// Those of a cluster below another directory of run directories.
    pub fn below(base: &Path, name: &ClusterName) -> Self {
        Self { root: base.join(name.as_str()) }
    }

    /// Those of the cluster with this run directory.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The plan, as JSON.
    pub fn plan(&self) -> PathBuf {
        self.root.join(PLAN)
    }

    /// The control API's socket.
    pub fn control(&self) -> PathBuf {
        self.root.join(CONTROL)
    }

    /// The cluster's secret.
    pub fn secret(&self) -> PathBuf {
        self.root.join(SECRET)
    }

    /// What happened, one JSON object a line.
    pub fn events(&self) -> PathBuf {
        self.root.join(EVENTS)
    }

    /// The directory of logs.
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
    }

    /// The log of one process.
    pub fn log(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }

    /// The directory of crash bundles.
    pub fn crashes(&self) -> PathBuf {
        self.root.join(CRASHES)
    }

    /// Holds the path of the cluster's control group, where it has one, for whoever cleans up.
    pub fn cgroup(&self) -> PathBuf {
        self.root.join(CGROUP)
    }

    /// The cluster's own place for files of shared memory, elsewhere.
    pub fn shared_memory(&self) -> PathBuf {
        shared_memory::beside(&self.root)
    }

    /// Whether a supervisor or a guardian lives here.
    pub fn is_alive(&self) -> bool {
        // Without the right to open it, it is somebody else's, and then it counts as in use.
        match open_directory(&self.root) {
            Ok(directory) => Flock::lock(directory, FlockArg::LockExclusiveNonblock).is_err(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }
}

impl RunDirectory {
    /// Makes, checks and locks the run directory of `name`; what a dead owner left there is
    /// removed.
    ///
    /// # Errors
    /// If a living cluster has it, it is not this user's alone, or the system refuses.
    pub fn acquire(name: &ClusterName) -> Result<Self, RunDirectoryError> {
        Self::acquire_below(&base(), name)
    }

    /// As [`RunDirectory::acquire`], below another directory of run directories.
    ///
    /// # Errors
    /// As there.
    pub fn acquire_below(base: &Path, name: &ClusterName) -> Result<Self, RunDirectoryError> {
        let paths = Paths::below(base, name);
        let socket = paths.control();
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            return Err(RunDirectoryError::TooLong { path: socket, length });
        }
        let lock = lock_fresh(base, name, &paths)?;
        let directory = Self { name: name.clone(), paths, lock };
        directory.clean()?;
        make_private(&directory.paths.logs())?;
        Ok(directory)
    }

    /// The cluster's name.
    pub fn name(&self) -> &ClusterName {
        &self.name
    }

    /// Its files.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.paths.root()
    }

    /// Whether it is still where it was made.
    pub fn is_in_place(&self) -> bool {
        is_at(&self.lock, self.path())
    }

    /// The lock's descriptor, to be passed to the guardian.
    pub(crate) fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Writes one of its files, readable by this user alone, whole or not at all.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write_private(&self, path: &Path, content: &[u8]) -> Result<(), RunDirectoryError> {
        let io = |action| move |source| RunDirectoryError::Io { action, path: path.into(), source };
        let draft = path.with_extension("new");
        // A draft left by a writer that died is of no use to anyone.
        let _ = fs::remove_file(&draft);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&draft)
            .map_err(io("create"))?;
        file.write_all(content).map_err(io("write"))?;
        fs::rename(&draft, path).map_err(io("write"))
    }

    /// Removes everything in it and itself, and releases the lock. The directory of run
    /// directories goes too, if this was the last.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove(self) -> Result<(), RunDirectoryError> {
        let path = self.paths.root().to_owned();
        shared_memory::remove(&self.paths.shared_memory());
        match fs::remove_dir_all(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(RunDirectoryError::Io { action: "remove", path, source })
            }
            _ => {
                // Another cluster's directory in it keeps it.
                let _ = path.parent().map(fs::remove_dir);
                Ok(())
            }
        }
    }

    /// Removes what a cluster that is gone left here; its logs too, which are of another cluster.
    fn clean(&self) -> Result<(), RunDirectoryError> {
        let root = self.paths.root();
        let io = |source| RunDirectoryError::Io { action: "clean", path: root.into(), source };
        if let Ok(cgroup) = fs::read_to_string(self.paths.cgroup()) {
            super::containment::Cgroup::remove_left_over(Path::new(cgroup.trim()));
        }
        shared_memory::remove(&self.paths.shared_memory());
        for entry in fs::read_dir(root).map_err(io)? {
            let entry = entry.map_err(io)?;
            if entry.file_type().map_err(io)?.is_dir() {
                fs::remove_dir_all(entry.path()).map_err(io)?;
            } else {
                fs::remove_file(entry.path()).map_err(io)?;
            }
        }
        Ok(())
    }
}

/// The directory of this user's run directories.
pub fn base() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(path) if Path::new(&path).is_absolute() => Path::new(&path).join("cuda-cluster"),
        _ => PathBuf::from(format!("/tmp/cuda-cluster-{}", Uid::effective())),
    }
}

/// Names of clusters that have a run directory below this user's [`base`], living or not, sorted.
pub fn names() -> Vec<ClusterName> {
    let entries = fs::read_dir(base()).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut names: Vec<ClusterName> = named.collect();
    names.sort();
    names
}

/// Removes the run directories below `base` whose owners are gone, with what they left; returns
/// their names. Living and foreign ones are not touched.
pub fn clean_stale(base: &Path) -> Vec<ClusterName> {
    let mut cleaned = Vec::new();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name: Option<ClusterName> =
            entry.file_name().to_str().and_then(|text| text.parse().ok());
        let Some(name) = name else { continue };
        let Ok(directory) = open_directory(&entry.path()) else { continue };
        if check_private(&entry.path()).is_err() {
            continue;
        }
        let Ok(lock) = Flock::lock(directory, FlockArg::LockExclusiveNonblock) else { continue };
        let directory = RunDirectory { paths: Paths::below(base, &name), name: name.clone(), lock };
        if directory.clean().is_ok() && directory.remove().is_ok() {
            cleaned.push(name);
        }
    }
    cleaned
}

/// Makes and locks the directory. Another process may remove it between the two; then again.
fn lock_fresh(
    base: &Path,
    name: &ClusterName,
    paths: &Paths,
) -> Result<Flock<OwnedFd>, RunDirectoryError> {
    let root = paths.root();
    let io = |action| move |source| RunDirectoryError::Io { action, path: root.into(), source };
    let taken = || RunDirectoryError::Taken { name: name.clone(), path: root.into() };
    for _ in 0..16 {
        make_private(base)?;
        match make_private(root) {
            // The end of the last other cluster took the base along.
            Err(RunDirectoryError::Io { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                continue;
            }
            made => made?,
        }
        let directory = match open_directory(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(io("open"))?,
        };
        let lock = match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Err(taken()),
            Err((_, errno)) => return Err(io("lock")(errno.into())),
        };
        if is_at(&lock, root) {
            return Ok(lock);
        }
    }
    Err(taken())
}

/// Whether an open directory is the one at `path`.
fn is_at(open: &OwnedFd, path: &Path) -> bool {
    let Ok(open) = nix::sys::stat::fstat(open) else { return false };
    fs::symlink_metadata(path)
        .is_ok_and(|named| named.ino() == open.st_ino && named.dev() == open.st_dev)
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags.bits()).open(path)?;
    Ok(file.into())
}

/// Makes a directory that is this user's alone, or checks that it is one.
fn make_private(path: &Path) -> Result<(), RunDirectoryError> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            return Err(RunDirectoryError::Io { action: "create", path: path.into(), source });
        }
        _ => {}
    }
    check_private(path)
}

fn check_private(path: &Path) -> Result<(), RunDirectoryError> {
    // A directory that was removed in between is made again by whoever called.
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    let path = path.to_owned();
    if !metadata.is_dir() {
        let what = if metadata.is_symlink() { "a symbolic link" } else { "a file" };
        return Err(RunDirectoryError::NoDirectory { path, what });
    }
    let wanted = Uid::effective().as_raw();
    if metadata.uid() != wanted {
        return Err(RunDirectoryError::Foreign { path, owner: metadata.uid(), wanted });
    }
    match metadata.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(RunDirectoryError::Open { path, mode: metadata.mode() & 0o777 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn name(text: &str) -> ClusterName {
        text.parse().expect("a name")
    }

    fn private_base() -> tempfile::TempDir {
        let base = tempfile::tempdir().expect("a directory");
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o700)).expect("its mode");
        base
    }

    #[test]
    fn one_name_has_one_owner_at_a_time() {
        let base = private_base();
        let first = RunDirectory::acquire_below(base.path(), &name("a")).expect("free");
        assert!(first.paths().is_alive());
        let second = RunDirectory::acquire_below(base.path(), &name("a"));
        assert!(matches!(second, Err(RunDirectoryError::Taken { .. })), "{second:?}");
        first.remove().expect("removed");
        assert!(!base.path().exists(), "nothing is left after the last cluster");
        RunDirectory::acquire_below(base.path(), &name("a")).expect("free again");
    }

    #[test]
    fn what_a_dead_owner_left_is_cleaned_and_what_lives_is_not() {
        let base = private_base();
        let dead = RunDirectory::acquire_below(base.path(), &name("dead")).expect("free");
        dead.write_private(&dead.paths().plan(), b"{}").expect("written");
        drop(dead);
        let living = RunDirectory::acquire_below(base.path(), &name("living")).expect("free");
        living.write_private(&living.paths().plan(), b"{}").expect("written");
        fs::write(base.path().join("not ours"), "x").expect("written");

        assert_eq!(clean_stale(base.path()), [name("dead")]);
        assert!(!base.path().join("dead").exists());
        assert!(living.paths().plan().exists());
        assert!(base.path().join("not ours").exists());
    }

    #[test]
    fn a_link_an_open_directory_and_a_long_path_are_refused() {
        let base = private_base();
        symlink("/tmp", base.path().join("link")).expect("a link");
        let link = RunDirectory::acquire_below(base.path(), &name("link"));
        assert!(matches!(link, Err(RunDirectoryError::NoDirectory { .. })), "{link:?}");

        fs::create_dir(base.path().join("open")).expect("a directory");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(base.path().join("open"), mode).expect("its mode");
        let open = RunDirectory::acquire_below(base.path(), &name("open"));
        assert!(matches!(open, Err(RunDirectoryError::Open { mode: 0o755, .. })), "{open:?}");

        let deep = base.path().join("x".repeat(90));
        let long = RunDirectory::acquire_below(&deep, &name("long"));
        assert!(matches!(long, Err(RunDirectoryError::TooLong { .. })), "{long:?}");
    }

    #[test]
    fn its_files_are_closed_to_others() {
        let base = private_base();
        let directory = RunDirectory::acquire_below(base.path(), &name("a")).expect("free");
        directory.write_private(&directory.paths().secret(), b"s").expect("written");
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        assert_eq!(mode(&directory.paths().secret()), 0o600);
        assert_eq!(mode(directory.path()), 0o700);
        assert_eq!(mode(&directory.paths().logs()), 0o700);
    }
}
