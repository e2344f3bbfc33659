//! What `/proc` says of processes and threads, proc(5).
//!
//! *Invariant:* only reads; a process that ends meanwhile is `None`.

use std::collections::BTreeMap;
use std::fs;
use std::str::FromStr;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::evidence::{CpuLimit, Group, State, Tracer};

/// Every process of this machine with its parent.
pub(super) fn parents() -> BTreeMap<u32, u32> {
    numbers("/proc").filter_map(|pid| Some((pid, parent(pid)?))).collect()
}

pub(super) fn parent(pid: u32) -> Option<u32> {
    Stat::read(&format!("/proc/{pid}/stat"))?.field(4)
}

/// The entries of a folder whose names are numbers.
pub(super) fn numbers<T: FromStr>(folder: &str) -> impl Iterator<Item = T> + use<T> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What one look at a process sees.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) state: State,
    pub(super) tracer: Option<Tracer>,
    pub(super) resident_bytes: u64,
    pub(super) swapped_bytes: u64,
    pub(super) major_faults: u64,
    pub(super) moved_bytes: u64,
    pub(super) threads: Vec<Task>,
    pub(super) group: Option<Group>,
}

/// What one look at a thread sees.
#[derive(Clone, Debug, Default)]
pub(super) struct Task {
    pub(super) tid: u32,
    pub(super) name: String,
    pub(super) state: State,
    pub(super) cpu_ms: u64,
    pub(super) waits_begun: u64,
    /// When it last ran, in milliseconds of the clock of the CPU that it ran on.
    pub(super) ran_at_ms: Option<u64>,
    pub(super) cpu: Option<usize>,
    pub(super) kernel: Option<String>,
}

impl Sample {
    pub(super) fn take(pid: u32) -> Option<Self> {
        let stat = Stat::read(&format!("/proc/{pid}/stat"))?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let kib = |key| named(&status, key).map_or(0, |kib: u64| kib * 1024);
        let mut tids: Vec<u32> = numbers(&format!("/proc/{pid}/task")).collect();
        // The main thread has the process's id.
        tids.sort_by_key(|tid| (*tid != pid, *tid));
        Some(Self {
            name: stat.name.clone(),
            state: stat.state(),
            tracer: tracer(&status),
            resident_bytes: kib("VmRSS:"),
            swapped_bytes: kib("VmSwap:"),
            major_faults: stat.field(12).unwrap_or(0),
            moved_bytes: moved(pid),
            threads: tids.into_iter().filter_map(|tid| Task::take(pid, tid)).collect(),
            group: group(pid),
        })
    }
}

impl Task {
    fn take(pid: u32, tid: u32) -> Option<Self> {
        let folder = format!("/proc/{pid}/task/{tid}");
        let read = |file: &str| fs::read_to_string(format!("{folder}/{file}")).ok();
        let stat = Stat::read(&format!("{folder}/stat"))?;
        let status = read("status").unwrap_or_default();
        let kernel = read("wchan").filter(|place| !place.is_empty() && place != "0");
        Some(Self {
            tid,
            name: stat.name.clone(),
            state: stat.state(),
            cpu_ms: read("schedstat").and_then(|text| first(&text)).unwrap_or(0) / 1_000_000,
            waits_begun: named(&status, "voluntary_ctxt_switches:").unwrap_or(0),
            ran_at_ms: read("sched").as_deref().and_then(ran_at),
            cpu: stat.field(39),
            kernel,
        })
    }
}

/// The present times of the clocks of [`Task::ran_at_ms`], without those of CPUs that this process
/// may not use.
///
/// Each CPU has its own, which stands still while the host of a virtual machine runs something else
/// on it, so they drift apart. A thread that runs on a CPU reads there when it last ran: now.
pub(super) fn clocks() -> BTreeMap<usize, u64> {
    let visit = || {
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
        let there = |cpu: usize| {
            let mut one = CpuSet::new();
            one.set(cpu).ok()?;
            sched_setaffinity(Pid::from_raw(0), &one).ok()?;
            let sched = fs::read_to_string("/proc/thread-self/sched").ok()?;
            Some((cpu, ran_at(&sched)?))
        };
        let cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
        cpus.filter_map(there).collect()
    };
    // Affinity is a thread's own.
    std::thread::spawn(visit).join().unwrap_or_default()
}

/// `se.exec_start`, of kernels that show it.
fn ran_at(sched: &str) -> Option<u64> {
    let line = sched.lines().find(|line| line.starts_with("se.exec_start"))?;
    line.rsplit(':').next()?.trim().split('.').next()?.parse().ok()
}

fn first(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// The number after a name, in a text that has a name and a number in each line.
fn named<T: FromStr>(text: &str, key: &str) -> Option<T> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn tracer(status: &str) -> Option<Tracer> {
    let pid: u32 = named(status, "TracerPid:").filter(|pid| *pid != 0)?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Tracer { pid, name: name.trim().to_owned() })
}

/// Bytes that a process has read and written by system calls, and from and to disks.
fn moved(pid: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    ["rchar:", "wchar:", "read_bytes:", "write_bytes:"]
        .iter()
        .filter_map(|key| named::<u64>(&io, key))
        .sum()
}

/// The control group of a process, with what the first version of control groups says of it where
/// that has the controllers; not the root, which has no limits.
fn group(pid: u32) -> Option<Group> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let before = first_version(&text);
    let Some(mut group) = second_version(&text) else { return before };
    if let Some(before) = before {
        group.throttled_us = group.throttled_us.max(before.throttled_us);
        group.cpu_limit = group.cpu_limit.or(before.cpu_limit);
        group.memory_bytes = group.memory_bytes.or(before.memory_bytes);
        group.memory_limit_bytes = group.memory_limit_bytes.or(before.memory_limit_bytes);
        if before.frozen == Some(true) {
            group = Group { frozen: before.frozen, path: before.path, ..group };
        }
    }
    Some(group)
}

/// Controllers of version 1, each of which has its own tree: `4:cpu,cpuacct:/a/b`.
fn first_version(text: &str) -> Option<Group> {
    let folder = |controller: &str| {
        let mut lines = text.lines().map(|line| line.splitn(3, ':').skip(1));
        let (names, path) = lines.find_map(|mut words| {
            let names = words.next()?;
            names.split(',').any(|name| name == controller).then_some((names, words.next()?))
        })?;
        let tops = [names, controller].map(|name| format!("/sys/fs/cgroup/{name}{path}"));
        let folder = tops.into_iter().find(|folder| fs::exists(folder).is_ok_and(|it| it))?;
        (path != "/").then(|| (folder, path.to_owned()))
    };
    let read = |folder: &str, file: &str| fs::read_to_string(format!("{folder}/{file}")).ok();
    let mut group = Group::default();
    if let Some((folder, path)) = folder("cpu") {
        let stat = read(&folder, "cpu.stat").unwrap_or_default();
        let number = |file| read(&folder, file).and_then(|text| first(&text));
        let limit = number("cpu.cfs_quota_us").zip(number("cpu.cfs_period_us"));
        let throttled = named(&stat, "nr_throttled").unwrap_or(0);
        group.cpu_limit =
            limit.map(|(quota_us, period_us)| CpuLimit { quota_us, period_us, throttled });
        group.throttled_us = named::<u64>(&stat, "throttled_time").unwrap_or(0) / 1000;
        group.path = path;
    }
    if let Some((folder, path)) = folder("memory") {
        let number = |file| read(&folder, file).and_then(|text| first(&text));
        group.memory_bytes = number("memory.usage_in_bytes");
        // Without a limit it is the largest number of pages.
        group.memory_limit_bytes =
            number("memory.limit_in_bytes").filter(|limit| *limit < u64::MAX >> 2);
        group.path = path;
    }
    if let Some((folder, path)) = folder("freezer") {
        group.frozen = read(&folder, "freezer.state").map(|state| state.trim() == "FROZEN");
        group.path = path;
    }
    (!group.path.is_empty()).then_some(group)
}

fn second_version(text: &str) -> Option<Group> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let folder = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(|top| format!("{top}{path}"))
        .into_iter()
        .find(|folder| {
            path != "/" && fs::exists(format!("{folder}/cgroup.procs")).is_ok_and(|it| it)
        })?;
    let read = |file: &str| fs::read_to_string(format!("{folder}/{file}")).ok();
    let number = |file: &str| read(file).and_then(|text| first(&text));
    let frozen = read("cgroup.events").and_then(|text| named::<u8>(&text, "frozen"));
    let limits = [number("memory.max"), number("memory.high")];
    let stat = read("cpu.stat").unwrap_or_default();
    let throttled = named(&stat, "nr_throttled").unwrap_or(0);
    // `max 100000` has no limit.
    let limit = read("cpu.max").and_then(|text| {
        let (quota, period) = text.trim().split_once(' ')?;
        Some((quota.parse().ok()?, period.parse().ok()?))
    });
    Some(Group {
        path: path.to_owned(),
        throttled_us: named(&stat, "throttled_usec").unwrap_or(0),
        cpu_limit: limit.map(|(quota_us, period_us)| CpuLimit { quota_us, period_us, throttled }),
        frozen: frozen.map(|frozen| frozen == 1),
        memory_pressure: read("memory.pressure").as_deref().and_then(|text| pressure(text, "full")),
        memory_bytes: number("memory.current"),
        memory_limit_bytes: limits.into_iter().flatten().min(),
    })
}

/// Share of the last ten seconds in which `some` or all (`full`) tasks waited, in percent.
pub(super) fn pressure(text: &str, who: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(who))?;
    line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// `/proc/…/stat`.
pub(super) struct Stat {
    name: String,
    /// From the third field on, the state.
    rest: Vec<String>,
}

impl Stat {
    pub(super) fn read(path: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    /// The name is in parentheses, and may contain some.
    fn parse(text: &str) -> Option<Self> {
        let (before, after) = text.rsplit_once(") ")?;
        let (_, name) = before.split_once(" (")?;
        let rest = after.split_ascii_whitespace().map(str::to_owned).collect();
        Some(Self { name: name.to_owned(), rest })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A field by its number in proc(5), from 3 on.
    pub(super) fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        self.rest.get(number.checked_sub(3)?)?.parse().ok()
    }

    pub(super) fn state(&self) -> State {
        match self.rest.first().map(String::as_str) {
            Some("R") => State::Running,
            Some("S" | "I") => State::Sleeping,
            Some("D") => State::Uninterruptible,
            Some("T") => State::Stopped,
            Some("t") => State::Traced,
            Some("Z" | "X") => State::Zombie,
            _ => State::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_look_like_the_rest_of_the_line() {
        let stat = Stat::parse("12 (a) R 1) S 7 12").expect("it is whole");
        assert_eq!((stat.name.as_str(), stat.state()), ("a) R 1", State::Sleeping));
        assert_eq!(stat.field::<u32>(4), Some(7));
        assert!(Stat::parse("12 (a").is_none());
    }

    #[test]
    fn what_is_named_is_found() {
        let status = "VmRSS:\t    2048 kB\nTracerPid:\t0\n";
        assert_eq!(named::<u64>(status, "VmRSS:"), Some(2048));
        assert_eq!(tracer(status), None);
        assert_eq!(
            pressure("some avg10=1.50 avg60=0\nfull avg10=0.25 avg60=0\n", "full"),
            Some(0.25)
        );
        assert_eq!(
            ran_at("a (1, #threads: 1)\nse.exec_start   :   21569339.536717\n"),
            Some(21_569_339)
        );
    }

    #[test]
    fn this_process_is_seen_with_its_threads() {
        let own = std::process::id();
        let sample = Sample::take(own).expect("it runs");
        assert_eq!(sample.threads.first().map(|thread| thread.tid), Some(own));
        assert!(sample.resident_bytes > 0 && parents().contains_key(&own));
        let now = clocks();
        assert!(!now.is_empty(), "this kernel says when a thread last ran");
    }
}
