//! A cluster's run directory: its socket, plan, secret, events and logs, and the lock of its owner.
//!
//! The path is `$XDG_RUNTIME_DIR/cuda-cluster/NAME`, or `/tmp/cuda-cluster-UID/NAME` if the
//! variable is unset. This module does not interpret the files, except those that identify the
//! owner. A cluster that has failed leaves its directory until its name is used again.
//!
//! *Invariant:* a [`RunDirectory`] holds the lock (`flock` on the directory itself), belongs to
//! this user, and is closed to all others (0700). The guardian holds the lock too, so a free lock
//! means that no process of the cluster is left. systemd-tmpfiles also leaves locked directories
//! alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::Uid;

use super::containment::Cgroup;
use super::owners::Owners;
use super::shared_memory;
use cuda_cluster_model::ids::ClusterName;

mod error;
mod paths;
mod place;
mod prune;

pub use error::RunDirectoryError;
pub use paths::{Paths, SecretFileError};
use place::is_at;
pub use prune::{forget_ended, forget_failed_start};

/// Longest path of a Unix socket: `sun_path` is 108 bytes, and one is its terminating zero.
pub const SOCKET_PATH_LIMIT: usize = 107;

/// How long to wait for the last processes of an earlier cluster of the same name.
pub const LAST_MOMENTS: Duration = Duration::from_secs(10);

/// How often to check a lock that is held.
const LOOK: Duration = Duration::from_millis(5);

/// How often it is tried to remove a directory in which new files appear meanwhile.
const REMOVALS: usize = 100;

/// A locked run directory. The lock is released when this value and its guardian are gone.
#[derive(Debug)]
pub struct RunDirectory {
    name: ClusterName,
    paths: Paths,
    lock: Flock<OwnedFd>,
}

impl RunDirectory {
    /// Creates, checks and locks the run directory of `name`. Kills and removes what a dead owner
    /// has left there, and removes old directories of clusters with generated names. Blocks while a
    /// cluster is ending.
    ///
    /// # Errors
    /// If a running cluster owns it, it is not private to this user, or a system call fails.
    pub fn acquire(name: &ClusterName) -> Result<Self, RunDirectoryError> {
        let directory = Self::acquire_within(&base(), name, LAST_MOMENTS)?;
        prune::prune(&base());
        Ok(directory)
    }

    /// Like [`RunDirectory::acquire`], below another base directory, without waiting.
    ///
    /// # Errors
    /// As there.
    pub fn acquire_below(base: &Path, name: &ClusterName) -> Result<Self, RunDirectoryError> {
        Self::acquire_within(base, name, Duration::ZERO)
    }

    /// Like [`RunDirectory::acquire`], below another base directory, waiting at most this long for
    /// a cluster that is ending.
    ///
    /// As there.
    /// As there.
    pub fn acquire_within(
        base: &Path,
        name: &ClusterName,
        patience: Duration,
    ) -> Result<Self, RunDirectoryError> {
        let paths = Paths::below(base, name);
        let socket = paths.control();
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            return Err(RunDirectoryError::TooLong { path: socket, length });
        }
        let taken = || RunDirectoryError::Taken { name: name.clone(), path: paths.root().into() };
        let deadline = Instant::now() + patience;
        let lock = loop {
            if let Some(lock) = lock_fresh(base, paths.root())? {
                break lock;
            }
            // A cluster that is ending has only its guardian left, which does not answer requests.
            if Instant::now() >= deadline || paths.has_supervisor() {
                return Err(taken());
            }
            std::thread::sleep(LOOK);
        };
        let directory = Self { name: name.clone(), paths, lock };
        directory.clean()?;
        make_private(&directory.paths.logs())?;
        directory.write_owners(&Owners::this_process())?;
        Ok(directory)
    }

    /// Locks the unchanged directory of a dead cluster; `None` if there is none. Blocks while a
    /// cluster is ending.
    ///
    /// # Errors
    /// If a cluster is running there, it is not this user's, or a system call fails.
    pub fn left_over(
        name: &ClusterName,
        paths: &Paths,
        patience: Duration,
    ) -> Result<Option<Self>, RunDirectoryError> {
        let path = paths.root();
        let io = |action| move |source| RunDirectoryError::Io { action, path: path.into(), source };
        let deadline = Instant::now() + patience;
        loop {
            check_own(path)?;
            let directory = match open_directory(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(io("open"))?,
            };
            match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
                Ok(lock) if is_at(&lock, path) => {
                    return Ok(Some(Self { name: name.clone(), paths: paths.clone(), lock }));
                }
                // Another process has removed it, or has used the name again.
                Ok(_) => {}
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    return Err(RunDirectoryError::Taken { name: name.clone(), path: path.into() });
                }
                Err((_, Errno::EWOULDBLOCK)) => std::thread::sleep(LOOK),
                Err((_, errno)) => return Err(io("lock")(errno.into())),
            }
        }
    }

    /// Kills the owners of a cluster and all their processes, and locks the directory; `None` if it
    /// no longer exists. Waits at most `within` for each owner.
    ///
    /// # Errors
    /// If a cluster is still running there, it is not this user's, or a system call fails.
    pub fn take_by_force(
        name: &ClusterName,
        paths: &Paths,
        within: Duration,
    ) -> Result<Option<Self>, RunDirectoryError> {
        if let Some(owners) = Owners::read(&paths.owners()) {
            if let Some(supervisor) = owners.supervisor {
                supervisor.kill(within);
            }
            // The guardian then kills the processes and ends, unless it hangs too. It gives the
            // lock back a moment before it has ended.
            if let Some(guardian) = owners.guardian
                && !guardian.ends(within)
            {
                guardian.kill(within);
            }
        }
        let directory = Self::left_over(name, paths, within)?;
        if let Some(directory) = &directory {
            directory.sweep();
        }
        Ok(directory)
    }

    /// Records the owners of the cluster.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn write_owners(&self, owners: &Owners) -> Result<(), RunDirectoryError> {
        let path = self.paths.owners();
        let io = |source| RunDirectoryError::Io { action: "write", path: path.clone(), source };
        let text = serde_json::to_vec(owners).map_err(|error| io(error.into()))?;
        self.write_private(&path, &text)
    }

    /// The cluster's name.
    pub fn name(&self) -> &ClusterName {
        &self.name
    }

    /// Paths of its files, whether or not they exist.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        self.paths.root()
    }

    /// The lock's descriptor, for the guardian.
    pub(crate) fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// As [`write_private`].
    ///
    /// # Errors
    /// As there.
    pub fn write_private(&self, path: &Path, content: &[u8]) -> Result<(), RunDirectoryError> {
        write_private(path, content)
    }

    /// Makes a directory in it that is private to this user.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn make_private(&self, path: &Path) -> Result<(), RunDirectoryError> {
        make_private(path)
    }

    /// Removes the directory with its contents, and releases the lock. Also removes the base
    /// directory if it is empty.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn remove(self) -> Result<(), RunDirectoryError> {
        let path = self.paths.root().to_owned();
        if !self.is_in_place() {
            // It was removed, and another cluster may have created its own there.
            return Ok(());
        }
        shared_memory::remove(&self.paths.shared_memory());
        match remove_while_written(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(RunDirectoryError::Io { action: "remove", path, source })
            }
            _ => {
                // Fails while other clusters have directories in it.
                let _ = path.parent().map(fs::remove_dir);
                Ok(())
            }
        }
    }

    /// Kills the processes that a killed supervisor and guardian have left, and frees their shared
    /// memory. Keeps the files that record how the cluster ended.
    pub fn sweep(&self) {
        let owners = Owners::read(&self.paths.owners());
        // A copy of a running cluster's directory names its processes, too.
        if !owners.as_ref().is_some_and(Owners::have_a_guardian) {
            if let Ok(cgroup) = super::reading::text(&self.paths.cgroup()) {
                Cgroup::remove_left_over(Path::new(cgroup.trim()));
            }
            if let Some(owners) = owners {
                owners.kill_marked();
            }
        }
        shared_memory::remove(&self.paths.shared_memory());
        self.retire();
    }

    /// Removes the files that only a running cluster needs.
    pub fn retire(&self) {
        if !self.is_in_place() {
            return;
        }
        let paths = &self.paths;
        let files = [paths.secret(), paths.cgroup(), paths.owners()];
        let entries = fs::read_dir(paths.root()).into_iter().flatten().flatten();
        let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        for path in sockets.map(|entry| entry.path()).chain(files) {
            // Ignore errors: what is gone needs no removal, and what can't be removed does no harm.
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_dir_all(paths.pmix());
        let _ = fs::remove_dir_all(paths.carried());
    }

    /// Removes all files of a dead cluster, including its logs, which belong to another cluster.
    fn clean(&self) -> Result<(), RunDirectoryError> {
        let root = self.paths.root();
        let io = |source| RunDirectoryError::Io { action: "clean", path: root.into(), source };
        self.sweep();
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

/// Removes a directory in which somebody may still write a file, as an audit's last one.
fn remove_while_written(path: &Path) -> io::Result<()> {
    for _ in 1..REMOVALS {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            other => return other,
        }
    }
    fs::remove_dir_all(path)
}

/// Records in a run directory, which the guardian holds open, the time at which its supervisor
/// disappeared.
pub(super) fn write_orphaned(directory: &OwnedFd, at: SystemTime) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_CLOEXEC;
    // Uses the descriptor, because the path may lead to another cluster's directory by now.
    let file = openat(directory, paths::ORPHANED, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
    File::from(file).write_all(humantime::format_rfc3339_millis(at).to_string().as_bytes())
}

/// The base directory of this user's run directories.
pub fn base() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(path) if Path::new(&path).is_absolute() => Path::new(&path).join("cuda-cluster"),
        _ => PathBuf::from(format!("/tmp/cuda-cluster-{}", Uid::effective())),
    }
}

/// The [`base`] directory, created if it is missing, and closed to other users.
///
/// # Errors
/// If it can't be created, is not this user's, or is open to others.
pub fn private_base() -> Result<PathBuf, RunDirectoryError> {
    let base = base();
    make_private(&base)?;
    Ok(base)
}

/// Writes a file of a run directory atomically, readable by this user only.
///
/// # Errors
/// If a system call fails.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), RunDirectoryError> {
    let io = |action| move |source| RunDirectoryError::Io { action, path: path.into(), source };
    let draft = path.with_extension("new");
    // A draft that was left by a dead writer is of no use.
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

/// Names of all clusters with a run directory below this user's [`base`], running or not, sorted.
///
/// # Errors
/// If the directory can't be read, or is not this user's.
pub fn names() -> Result<Vec<ClusterName>, RunDirectoryError> {
    names_below(&base())
}

fn names_below(base: &Path) -> Result<Vec<ClusterName>, RunDirectoryError> {
    let io = |source| RunDirectoryError::Io { action: "read", path: base.to_owned(), source };
    check_own(base)?;
    let entries = match fs::read_dir(base) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io)?;
        // Files are not run directories, whatever their names.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(entry.file_name().to_str().and_then(|name| name.parse().ok()));
        }
    }
    names.sort();
    Ok(names)
}

/// Creates and locks the directory; `None` if another process holds the lock. Tries again if
/// another process removes the directory in between.
fn lock_fresh(base: &Path, root: &Path) -> Result<Option<Flock<OwnedFd>>, RunDirectoryError> {
    let io = |action| move |source| RunDirectoryError::Io { action, path: root.into(), source };
    for _ in 0..16 {
        make_private(base)?;
        match make_private(root) {
            // The last other cluster has removed the base directory.
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
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, errno)) => return Err(io("lock")(errno.into())),
        };
        if is_at(&lock, root) {
            return Ok(Some(lock));
        }
    }
    Ok(None)
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags.bits()).open(path)?;
    Ok(file.into())
}

/// Creates a directory that is private to this user, or checks that it is.
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
    check_own(path)?;
    // If the directory has been removed in between, the caller creates it again.
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    match metadata.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(RunDirectoryError::Open { path: path.into(), mode: metadata.mode() & 0o777 }),
    }
}

/// Checks that a path is a directory of this user, if it exists.
fn check_own(path: &Path) -> Result<(), RunDirectoryError> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    let path = path.to_owned();
    if !metadata.is_dir() {
        let what = if metadata.is_symlink() { "a symbolic link" } else { "a file" };
        return Err(RunDirectoryError::NoDirectory { path, what });
    }
    let wanted = Uid::effective().as_raw();
    match metadata.uid() {
        owner if owner != wanted => Err(RunDirectoryError::Foreign { path, owner, wanted }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::owners::Identity;
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    pub(super) fn name(text: &str) -> ClusterName {
        text.parse().expect("a name")
    }

    pub(super) fn private_base() -> tempfile::TempDir {
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
    fn a_directory_in_which_somebody_still_writes_is_removed_whole() {
        let base = private_base();
        for _ in 0..100 {
            let directory = RunDirectory::acquire_below(base.path(), &name("a")).expect("free");
            let audit = directory.paths().audit();
            directory.write_private(&audit, b"{}").expect("written");
            let writer = std::thread::spawn(move || while write_private(&audit, b"{}").is_ok() {});
            directory.remove().expect("removed");
            writer.join().expect("it ends");
            assert!(!base.path().exists(), "nothing is left");
        }
    }

    #[test]
    fn what_a_dead_owner_left_is_swept_and_its_story_stays_until_the_name_is_used_again() {
        let base = private_base();
        let dead = RunDirectory::acquire_below(base.path(), &name("dead")).expect("free");
        for path in [dead.paths().events(), dead.paths().secret()] {
            dead.write_private(&path, b"{}").expect("written");
        }
        let paths = dead.paths().clone();
        let living = RunDirectory::left_over(&name("dead"), &paths, Duration::from_millis(20));
        assert!(matches!(living, Err(RunDirectoryError::Taken { .. })), "{living:?}");
        drop(dead);
        let left = RunDirectory::left_over(&name("dead"), &paths, Duration::ZERO);
        let left = left.expect("free").expect("there");
        left.sweep();
        assert!(paths.events().exists());
        assert!(!paths.secret().exists() && !paths.owners().exists());
        drop(left);
        RunDirectory::acquire_below(base.path(), &name("dead")).expect("free");
        assert!(!paths.events().exists());
        let nothing = Paths::below(base.path(), &name("nothing"));
        let left = RunDirectory::left_over(&name("nothing"), &nothing, Duration::ZERO);
        assert!(left.expect("readable").is_none());
    }

    #[test]
    fn what_is_taken_by_force_has_no_guardian_any_more_though_its_lock_was_free_before() {
        let base = private_base();
        let killed = RunDirectory::acquire_below(base.path(), &name("killed")).expect("free");
        let paths = killed.paths().clone();
        let mut guardian = Command::new("sleep").arg("0.3").spawn().expect("a process");
        let owners = Owners { supervisor: None, guardian: Identity::of(guardian.id()), mark: None };
        killed.write_owners(&owners).expect("written");
        drop(killed);
        let taken = RunDirectory::take_by_force(&name("killed"), &paths, Duration::from_secs(30));
        assert!(taken.expect("free").is_some());
        assert!(!owners.have_a_guardian());
        assert!(guardian.wait().is_ok_and(|status| status.success()), "it was left to end");
    }

    #[test]
    fn of_two_that_look_neither_takes_the_other_for_a_supervisor() {
        let base = private_base();
        let free = RunDirectory::acquire_below(base.path(), &name("a")).expect("free");
        let paths = free.paths().clone();
        drop(free);
        let first = open_directory(paths.root()).expect("there");
        let _first = Flock::lock(first, FlockArg::LockSharedNonblock).expect("free");
        assert!(!paths.look().expect("readable"));
    }

    #[test]
    fn what_is_not_this_users_directory_is_an_error_and_not_an_empty_one() {
        let base = private_base();
        let file = base.path().join("file");
        fs::write(&file, "x").expect("written");
        let read = names_below(&file);
        assert!(matches!(read, Err(RunDirectoryError::NoDirectory { .. })), "{read:?}");
        assert_eq!(names_below(&base.path().join("nothing")).expect("empty"), []);
        if Uid::effective().is_root() {
            std::os::unix::fs::chown(base.path(), Some(65534), None).expect("another owner");
            let foreign = names_below(base.path());
            assert!(matches!(foreign, Err(RunDirectoryError::Foreign { .. })), "{foreign:?}");
        }
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
