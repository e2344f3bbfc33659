//! Settings of the machine that nobody has blamed for anything on a multi-GPU machine: cheap to
//! know, and they count for nothing.
//!
//! *Invariant:* nothing here is worse than a note.

use super::scene::{Found, Report, Scene};
use super::{Check, Cost};
use crate::units::HumanBytes;

/// A check that counts for nothing.
const fn minor(
    id: &'static str,
    title: &'static str,
    looks_at: &'static str,
    remedy: &'static str,
    judge: fn(&Scene<'_>, &mut Report),
) -> Check {
    Check {
        id,
        title,
        looks_at,
        consequence: "no thread about a multi-GPU machine blames it",
        source: "",
        remedy,
        cost: Cost::Root,
        minor: true,
        judge: Some(judge),
    }
}

pub(super) const CHECKS: &[Check] = &[
    minor(
        "huge-pages",
        "transparent huge pages",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        huge_pages,
    ),
    minor(
        "numa-balancing",
        "pages that the kernel moves between NUMA nodes",
        "kernel.numa_balancing",
        "sysctl kernel.numa_balancing=0: workers are bound anyway",
        balancing,
    ),
    minor("swap", "swap in use", "/proc/meminfo", "swapoff -a, with room in memory", swap),
    minor(
        "smt",
        "two threads on a core",
        "/sys/devices/system/cpu/smt/active",
        "nothing: plans bind whole cores",
        smt,
    ),
    minor(
        "governor",
        "who chooses the CPUs' speed",
        "cpufreq/scaling_governor of the first CPU",
        "cpupower frequency-set -g performance",
        governor,
    ),
    minor(
        "c-states",
        "how deep idle CPUs rest",
        "cpuidle/state*/latency and disable of the first CPU",
        "cpupower idle-set -D 50, or tuned's latency-performance",
        resting,
    ),
    minor(
        "clock",
        "the kernel's clock",
        "clocksource0/current_clocksource",
        "tsc=reliable on the kernel's command line, if the vendor says so",
        clock,
    ),
];

fn huge_pages(scene: &Scene<'_>, report: &mut Report) {
    report.one(&scene.evidence.system.huge_pages, "enabled", |mode| match mode.as_str() {
        "never" => {
            let found = Found::note("they are off: large host memory costs more page faults");
            Err(found.saw("transparent_hugepage/enabled", mode))
        }
        mode => Ok(mode.to_owned()),
    });
}

fn balancing(scene: &Scene<'_>, report: &mut Report) {
    report.one(&scene.evidence.system.numa_balancing, "kernel.numa_balancing", |on| match on {
        0 => Ok("off".to_owned()),
        on => Err(Found::note("it is on").saw("kernel.numa_balancing", on)),
    });
}

fn swap(scene: &Scene<'_>, report: &mut Report) {
    match scene.evidence.system.swap_used_bytes {
        None => {}
        Some(0) => report.ok("none"),
        Some(bytes) => {
            let text = format!("{} are in use", HumanBytes(bytes));
            report.push(Found::note(text).saw("/proc/meminfo", HumanBytes(bytes)));
        }
    }
}

fn smt(scene: &Scene<'_>, report: &mut Report) {
    report.one(&scene.evidence.system.smt, "smt/active", |on| match on {
        true => Err(Found::note("cores run two threads").saw("smt/active", 1)),
        false => Ok("one thread on a core".to_owned()),
    });
}

fn governor(scene: &Scene<'_>, report: &mut Report) {
    report.one(&scene.evidence.system.governor, "scaling_governor", |name| match name.as_str() {
        "powersave" | "conservative" => {
            let found = Found::note(format!("{name}: cores are clocked up only under load"));
            Err(found.saw("scaling_governor", name))
        }
        name => Ok(name.to_owned()),
    });
}

/// Deeper states than this one cost what they save where processes sleep between messages: those of
/// servers take 1 to 10 µs (C1, C1E) or 100 and more (C6).
const DEEP_US: u32 = 50;

fn resting(scene: &Scene<'_>, report: &mut Report) {
    report.one(&scene.evidence.system.waking_us, "cpuidle", |latency| match *latency > DEEP_US {
        true => {
            let found = Found::note(format!("idle CPUs take {latency} µs to wake up"));
            Err(found.saw("cpuidle/state*/latency", latency))
        }
        false => Ok(format!("{latency} µs to wake up")),
    });
}

fn clock(scene: &Scene<'_>, report: &mut Report) {
    let guest = scene.evidence.system.virtual_machine.seen() == Some(&true);
    report.one(&scene.evidence.system.clock, "current_clocksource", |name| match name.as_str() {
        // Virtual machines have their own, and so has Arm.
        "hpet" | "acpi_pm" | "jiffies" if !guest => {
            let found = Found::note(format!("{name}: asking for the time is a system call"));
            Err(found.saw("current_clocksource", name))
        }
        name => Ok(name.to_owned()),
    });
}
