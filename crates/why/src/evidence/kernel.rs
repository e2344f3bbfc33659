//! Messages of the kernel and of the GPUs' driver, and what the telling ones say.

use serde::{Deserialize, Serialize};

use cuda_cluster_model::ids::PciAddress;

/// A message that may concern a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelMessage {
    /// How long ago it was written.
    pub ago_ms: u64,
    pub text: String,
}

/// What a message tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told<'a> {
    /// An error of a GPU, by NVIDIA's number.
    Xid { gpu: PciAddress, number: u64 },
    /// A thread has been in a wait that no signal ends, for as many seconds.
    Hung { tid: u32, name: &'a str, seconds: u64 },
    /// A process was killed because memory had run out, of the machine or of its control group.
    Killed { pid: u32, name: &'a str, group: bool },
}

impl KernelMessage {
    pub(crate) fn told(&self) -> Option<Told<'_>> {
        told(&self.text)
    }
}

/// Whether a message is one of those that concern jobs.
pub(crate) fn tells(text: &str) -> bool {
    told(text).is_some()
}

/// What a message tells, if it is one of those that concern jobs.
fn told(text: &str) -> Option<Told<'_>> {
    xid(text).or_else(|| hung(text)).or_else(|| killed(text))
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.`; of a MIG instance
/// `(PCI:0000:3b:00 GPU-I:05)`, of old drivers `(0000:3b:00)`.
fn xid(text: &str) -> Option<Told<'_>> {
    let (_, rest) = text.split_once("NVRM: Xid (")?;
    let (place, rest) = rest.split_once("): ")?;
    let place = place.strip_prefix("PCI:").unwrap_or(place).split_whitespace().next()?;
    let gpu = format!("{place}.0").parse().or_else(|_| place.parse()).ok()?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some(Told::Xid { gpu, number: rest.get(..digits)?.parse().ok()? })
}

/// `INFO: task python:1234 blocked for more than 120 seconds.` (kernel/hung_task.c)
fn hung(text: &str) -> Option<Told<'_>> {
    let (_, rest) = text.split_once("INFO: task ")?;
    let (who, rest) = rest.split_once(" blocked for more than ")?;
    let (name, tid) = who.rsplit_once(':')?;
    let seconds = rest.split_whitespace().next()?.parse().ok()?;
    Some(Told::Hung { tid: tid.parse().ok()?, name, seconds })
}

/// `Out of memory: Killed process 1234 (python) total-vm:…`, `Memory cgroup out of memory: …`
/// (mm/oom_kill.c).
fn killed(text: &str) -> Option<Told<'_>> {
    let group = text.contains("Memory cgroup out of memory");
    if !group && !text.contains("Out of memory") {
        return None;
    }
    let (_, rest) =
        text.split_once("Killed process ").or_else(|| text.split_once("Kill process "))?;
    let (pid, rest) = rest.split_once(' ')?;
    let name = rest.strip_prefix('(')?.split_once(')')?.0;
    // `1234, UID 0, (python)` of some kernels is not told apart by more than the number.
    Some(Told::Killed { pid: pid.trim_end_matches(',').parse().ok()?, name, group })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gpu(text: &str) -> PciAddress {
        text.parse().expect("an address")
    }

    #[test]
    fn lines_of_public_threads_are_read() {
        let xid = |place, number| Some(Told::Xid { gpu: gpu(place), number });
        for (text, expected) in [
            ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", xid("0000:44:00.0", 79)),
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen \
                 off the bus.",
                xid("0000:3b:00.0", 79),
            ),
            (
                "NVRM: Xid (PCI:0008:06:00): 31, pid=8371, name=python3, Ch 00000008, intr \
                 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 faulted @ 0x7f5c_4c000000",
                xid("0008:06:00.0", 31),
            ),
            ("NVRM: Xid (PCI:0000:07:00 GPU-I:05): 94, pid=1, Contained", xid("0000:07:00.0", 94)),
            ("NVRM: Xid (0000:03:00): 13, 0005 00000000", xid("0000:03:00.0", 13)),
            (
                "INFO: task python3:2715 blocked for more than 122 seconds.",
                Some(Told::Hung { tid: 2715, name: "python3", seconds: 122 }),
            ),
            (
                "INFO: task kworker/u8:2:71 blocked for more than 120 seconds.",
                Some(Told::Hung { tid: 71, name: "kworker/u8:2", seconds: 120 }),
            ),
            (
                "Out of memory: Killed process 4711 (python) total-vm:7934kB, anon-rss:1kB",
                Some(Told::Killed { pid: 4711, name: "python", group: false }),
            ),
            (
                "Memory cgroup out of memory: Killed process 12 (pt_data_worker) total-vm:1kB",
                Some(Told::Killed { pid: 12, name: "pt_data_worker", group: true }),
            ),
            ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01", None),
            ("python3 invoked oom-killer: gfp_mask=0x140cca, order=0, oom_score_adj=0", None),
        ] {
            assert_eq!(told(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(
            begin in "(NVRM: Xid \\(|INFO: task |Out of memory: Killed process )?",
            rest in ".{0,60}",
        ) {
            let _ = told(&format!("{begin}{rest}"));
        }
    }
}
