//! A cluster's run directory: where its socket, plan, secret, events and logs are, and who owns it.
//!
//! `$XDG_RUNTIME_DIR/cuda-cluster/NAME`, or `/tmp/cuda-cluster-UID/NAME` without one. Does not know
//! what is in the files, but for those that say who lives there. A cluster that ended badly leaves
//! its directory, until its name is used again.
//!
//! *Invariant:* a [`RunDirectory`] holds the lock (`flock` on the directory itself), belongs to
//! this user, and is closed to all others (0700). The lock passes to the guardian too, so that a
//! free lock means that no process of the cluster is left to be waited for. systemd-tmpfiles also
//! leaves locked directories alone.

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
use super::owners::{Identity, Owners};
use super::shared_memory;
use crate::ids::ClusterName;

mod paths;
mod prune;

pub use paths::{Paths, SecretFileError};

/// Longest path of a Unix socket: `sun_path` is 108 bytes, and one is its terminating zero.
pub const SOCKET_PATH_LIMIT: usize = 107;

/// Longest wait for the last processes of the cluster that had the name before.
pub const LAST_MOMENTS: Duration = Duration::from_secs(10);

/// How often a lock is looked at that somebody holds.
const LOOK: Duration = Duration::from_millis(5);

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
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some(format!("ls -ld {} says whose it is", path.display()))
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

impl RunDirectory {
    /// Makes, checks and locks the run directory of `name`; what a dead owner left there is ended
    /// and removed, and so are old directories of clusters whose names nobody chose. Waits for a
    /// cluster that is ending, and blocks for as long.
    ///
    /// # Errors
    /// If a living cluster has it, it is not this user's alone, or the system refuses.
    pub fn acquire(name: &ClusterName) -> Result<Self, RunDirectoryError> {
        let directory = Self::acquire_within(&base(), name, LAST_MOMENTS)?;
        prune::prune(&base());
        Ok(directory)
    }

    /// As [`RunDirectory::acquire`], below another directory of run directories, without waiting.
    ///
    /// # Errors
    /// As there.
    pub fn acquire_below(base: &Path, name: &ClusterName) -> Result<Self, RunDirectoryError> {
        Self::acquire_within(base, name, Duration::ZERO)
    }

    /// As [`RunDirectory::acquire`], below another directory of run directories, waiting at most
    /// this long for a cluster that is ending.
    ///
    /// # Errors
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
            // The last moments of a cluster are its guardian's, who answers nobody.
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

    /// Locks the directory that a dead cluster left, as it is; `None` if there is none. Waits for a
    /// cluster that is ending, and blocks for as long.
    ///
    /// # Errors
    /// If somebody lives there, it is not this user's, or the system refuses.
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
                // Somebody was quicker to remove it, or to use the name again.
                Ok(_) => {}
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    return Err(RunDirectoryError::Taken { name: name.clone(), path: path.into() });
                }
                Err((_, Errno::EWOULDBLOCK)) => std::thread::sleep(LOOK),
                Err((_, errno)) => return Err(io("lock")(errno.into())),
            }
        }
    }

    /// Kills whoever keeps the cluster and all that they started, and locks the directory; `None`
    /// if there is none any more. Waits at most `within` for each of them.
    ///
    /// # Errors
    /// If somebody lives there even so, it is not this user's, or the system refuses.
    pub fn take_by_force(
        name: &ClusterName,
        paths: &Paths,
        within: Duration,
    ) -> Result<Option<Self>, RunDirectoryError> {
        let kill = |owner: Option<Identity>| owner.is_none_or(|owner| owner.kill(within));
        if let Some(owners) = Owners::read(&paths.owners()) {
            kill(owners.supervisor);
            // The guardian then ends the processes and itself, unless it hears nothing either.
            if matches!(Self::left_over(name, paths, within), Err(RunDirectoryError::Taken { .. }))
            {
                kill(owners.guardian);
            }
        }
        let directory = Self::left_over(name, paths, within)?;
        if let Some(directory) = &directory {
            directory.sweep();
        }
        Ok(directory)
    }

    /// Writes down who keeps the cluster.
    ///
    /// # Errors
    /// If the system refuses.
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
        if !self.is_in_place() {
            // It was taken away, and another cluster may have made its own there.
            return Ok(());
        }
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

    /// Ends the processes that a supervisor and its guardian, both killed, could not, and frees
    /// their shared memory. What tells how the cluster ended stays.
    pub fn sweep(&self) {
        if let Ok(cgroup) = fs::read_to_string(self.paths.cgroup()) {
            Cgroup::remove_left_over(Path::new(cgroup.trim()));
        }
        if let Some(owners) = Owners::read(&self.paths.owners()) {
            owners.kill_marked();
        }
        shared_memory::remove(&self.paths.shared_memory());
        self.retire();
    }

    /// Removes what only a living cluster needs.
    pub fn retire(&self) {
        if !self.is_in_place() {
            return;
        }
        let paths = &self.paths;
        let files = [paths.secret(), paths.cgroup(), paths.owners()];
        let entries = fs::read_dir(paths.root()).into_iter().flatten().flatten();
        let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        for path in sockets.map(|entry| entry.path()).chain(files) {
            // What is gone already needs no removing, and what cannot be removed hurts nobody.
            let _ = fs::remove_file(path);
        }
    }

    /// Removes what a cluster that is gone left here; its logs too, which are of another cluster.
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

/// Says in a run directory, which the guardian holds open, when the supervisor ended that could not
/// say so itself.
pub(super) fn write_orphaned(directory: &OwnedFd, at: SystemTime) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_CLOEXEC;
    // By the descriptor: the path may lead to another cluster's directory by now.
    let file = openat(directory, paths::ORPHANED, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
    File::from(file).write_all(humantime::format_rfc3339_millis(at).to_string().as_bytes())
}

/// The directory of this user's run directories.
pub fn base() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(path) if Path::new(&path).is_absolute() => Path::new(&path).join("cuda-cluster"),
        _ => PathBuf::from(format!("/tmp/cuda-cluster-{}", Uid::effective())),
    }
}

/// Names of clusters that have a run directory below this user's [`base`], living or not, sorted.
///
/// # Errors
/// If that cannot be read, or is not this user's.
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
        // Files are none of ours, whatever they are called.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(entry.file_name().to_str().and_then(|name| name.parse().ok()));
        }
    }
    names.sort();
    Ok(names)
}

/// Makes and locks the directory; `None` if somebody else holds the lock. Another process may
/// remove the directory between the two; then again.
fn lock_fresh(base: &Path, root: &Path) -> Result<Option<Flock<OwnedFd>>, RunDirectoryError> {
    let io = |action| move |source| RunDirectoryError::Io { action, path: root.into(), source };
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
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, errno)) => return Err(io("lock")(errno.into())),
        };
        if is_at(&lock, root) {
            return Ok(Some(lock));
        }
    }
    Ok(None)
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
    check_own(path)?;
    // A directory that was removed in between is made again by whoever called.
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    match metadata.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(RunDirectoryError::Open { path: path.into(), mode: metadata.mode() & 0o777 }),
    }
}

/// Checks that a path is a directory of this user's, if it is there at all.
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
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

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
