//! The limits on the number of processes and threads, which the kernel calls tasks, and how much
//! room each leaves: the user's, those of the control groups, and the machine's.
//!
//! *Invariant:* a limit that does not apply to this process, or can't be read, is left out.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{Uid, geteuid};

use super::containment;

/// Above this limit the user's tasks are not counted, because that reads a file per process.
const MANY: u64 = 1 << 14;

/// What limits the number of tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// This user: `RLIMIT_NPROC`.
    User,
    /// A control group, by its directory: `pids.max`.
    Group(PathBuf),
    /// The machine: `kernel.threads-max`, or `kernel.pid_max`.
    Machine(&'static str),
}

/// A limit on tasks, and how many of them there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tasks {
    /// What is limited.
    pub holder: Holder,
    /// The tasks that count, at present.
    pub present: u64,
    /// The limit.
    pub limit: u64,
}

impl Tasks {
    /// All limits on this process and those that it starts.
    pub(super) fn limits() -> Vec<Self> {
        user().into_iter().chain(groups()).chain(machine()).collect()
    }

    /// The number of tasks that can still be started.
    pub(super) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.present)
    }

    /// How to raise the limit.
    pub(super) fn hint(&self) -> String {
        match &self.holder {
            Holder::User => "raise it with 'ulimit -u', or LimitNPROC of a unit".to_owned(),
            Holder::Group(group) => format!(
                "raise pids.max in {}: TasksMax of a systemd unit, --pids-limit of a container",
                group.display()
            ),
            Holder::Machine(setting) => format!("raise it with 'sysctl {setting}=NUMBER'"),
        }
    }
}

impl std::fmt::Display for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { present, limit, .. } = self;
        match &self.holder {
            Holder::User => f.write_str("this user")?,
            Holder::Group(group) => write!(f, "the control group {}", group.display())?,
            Holder::Machine(_) => f.write_str("the machine")?,
        }
        write!(f, " has {present} processes and threads, and the limit is {limit}")
    }
}

fn user() -> Option<Tasks> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NPROC).ok()?;
    // The kernel does not apply the limit to root and users with certain capabilities.
    let applies = limit <= MANY && !geteuid().is_root();
    applies.then(|| Tasks { holder: Holder::User, present: tasks_of(Uid::current()), limit })
}

/// The groups that this process is in, from its own to the root's, as far as they have a limit.
fn groups() -> Vec<Tasks> {
    let Some((own, mount)) = containment::own_group_of_tasks() else { return Vec::new() };
    let limited = |group: &Path| {
        let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse().ok();
        // An unlimited group has the word "max".
        let (present, limit) = (number("pids.current")?, number("pids.max")?);
        Some(Tasks { holder: Holder::Group(group.to_owned()), present, limit })
    };
    own.ancestors().take_while(|group| group.starts_with(&mount)).filter_map(limited).collect()
}

fn machine() -> Vec<Tasks> {
    // `NUMBER/NUMBER`: of these tasks some run, proc(5).
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let all = load.split(' ').find_map(|word| word.split_once('/'));
    let Some(present) = all.and_then(|(_, all)| all.parse().ok()) else { return Vec::new() };
    let limit = |setting: &'static str| {
        let file = Path::new("/proc/sys").join(setting.replace('.', "/"));
        let limit = fs::read_to_string(file).ok()?.trim().parse().ok()?;
        Some(Tasks { holder: Holder::Machine(setting), present, limit })
    };
    ["kernel.threads-max", "kernel.pid_max"].into_iter().filter_map(limit).collect()
}

/// The number of threads in the user's processes, as far as visible.
fn tasks_of(user: Uid) -> u64 {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = processes.filter(|entry| entry.file_name().to_str().is_some_and(number));
    let statuses =
        processes.filter_map(|entry| fs::read_to_string(entry.path().join("status")).ok());
    statuses.filter_map(|status| threads_in(&status, user)).sum()
}

/// The number of threads in a `/proc/PID/status`, if the process belongs to the user (by real uid,
/// which is what the limit counts).
fn threads_in(status: &str, user: Uid) -> Option<u64> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (field("Uid:")? == u64::from(user.as_raw())).then(|| field("Threads:"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_for_their_user_alone() {
        let status = "Name:\tx\nUid:\t1000\t0\t0\t0\nThreads:\t7\n";
        assert_eq!(threads_in(status, Uid::from_raw(1000)), Some(7));
        assert_eq!(threads_in(status, Uid::from_raw(0)), None);
        assert!(tasks_of(Uid::current()) >= 1, "this process has threads");
    }

    #[test]
    fn a_machine_has_room_for_this_process_and_names_its_limits() {
        let machine = machine();
        assert_eq!(machine.len(), 2, "{machine:?}");
        assert!(machine.iter().all(|tasks| tasks.present > 0 && tasks.room() > 0), "{machine:?}");
        let group = Holder::Group("/sys/fs/cgroup/a".into());
        let tasks = Tasks { holder: group, present: 7, limit: 5 };
        assert_eq!(tasks.room(), 0);
        assert!(tasks.to_string().starts_with("the control group /sys/fs/cgroup/a has 7"));
        assert!(tasks.hint().contains("TasksMax"));
    }
}
