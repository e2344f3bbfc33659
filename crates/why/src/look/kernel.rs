//! What the kernel and the GPUs' driver have written since a job's start, as far as it tells
//! something of jobs: from `/dev/kmsg`, or else from the journal.
//!
//! *Invariant:* nothing is waited for longer than [`WITHIN`], and no more is kept than [`KEPT`].

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

use super::procfs::Stat;
use crate::evidence::{KernelMessage, Unseen, tells};

/// Another file with the kernel's messages, in the form of `/dev/kmsg`.
const VARIABLE: &str = "CUDA_CLUSTER_KMSG";

/// How long the messages may take.
const WITHIN: Duration = Duration::from_secs(1);

/// The most messages that are kept, the last ones.
const KEPT: usize = 64;

/// The longest text that is kept.
const LONGEST: usize = 400;

/// The clocks of processes and of messages may differ by so much, in microseconds.
const SLACK_US: u64 = 2_000_000;

/// The messages since the first of these processes began, and why there are none to be seen.
pub(super) fn look(pids: impl Iterator<Item = u32>) -> (Vec<KernelMessage>, Option<Unseen>) {
    let since = pids.filter_map(began_us).min();
    let (Some(since), Some(now)) = (since, clock_us(ClockId::CLOCK_MONOTONIC)) else {
        return (Vec::new(), None);
    };
    let asleep = clock_us(ClockId::CLOCK_BOOTTIME).unwrap_or(now).saturating_sub(now);
    let since = since.saturating_sub(asleep).saturating_sub(SLACK_US);
    let (sender, receiver) = channel();
    // Left behind if the kernel holds it.
    std::thread::spawn(move || drop(sender.send(records())));
    let late = || Err("they were not read in time".to_owned());
    match receiver.recv_timeout(2 * WITHIN).unwrap_or_else(|_| late()) {
        Ok(records) => {
            let fresh = records.into_iter().filter(|(at, _)| *at >= since);
            let told = fresh
                .map(|(at, text)| KernelMessage { ago_ms: now.saturating_sub(at) / 1000, text });
            let mut told: Vec<KernelMessage> = told.collect();
            told.drain(..told.len().saturating_sub(KEPT));
            (told, None)
        }
        Err(why) => (Vec::new(), Some(Unseen { what: "the kernel's messages".to_owned(), why })),
    }
}

/// When a process began, in microseconds of the time since the machine's start.
fn began_us(pid: u32) -> Option<u64> {
    let ticks: u64 = Stat::read(&format!("/proc/{pid}/stat"))?.field(22)?;
    let each = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok()?;
    Some(ticks.saturating_mul(1_000_000 / each.max(1)))
}

fn clock_us(clock: ClockId) -> Option<u64> {
    let now = Duration::from(clock_gettime(clock).ok()?);
    u64::try_from(now.as_micros()).ok()
}

/// Telling messages with their times, in microseconds.
type Records = Vec<(u64, String)>;

fn records() -> Result<Records, String> {
    let path = std::env::var_os(VARIABLE).unwrap_or_else(|| OsString::from("/dev/kmsg"));
    match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path) {
        Ok(mut file) => Ok(from_device(&mut file, Instant::now() + WITHIN)),
        Err(error) => {
            let refused = format!("{}: {error}", path.display());
            from_journal().map_err(|journal| format!("{refused}; {journal}"))
        }
    }
}

/// Each read of the device gives a record; of a file, many lines.
fn from_device(file: &mut impl Read, until: Instant) -> Records {
    let mut records = Records::new();
    let (mut buffer, mut rest) = (vec![0; 16 << 10], Vec::new());
    while Instant::now() < until {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                rest.extend_from_slice(buffer.get(..read).unwrap_or_default());
                while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = rest.drain(..=end).collect();
                    records.extend(record(&String::from_utf8_lossy(&line)));
                }
            }
            // Records were overwritten before they were read.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // There is none left.
            Err(_) => break,
        }
    }
    records
}

/// `6,339,5140900,-;NET: Registered protocol family 10` (Documentation/ABI/testing/dev-kmsg).
fn record(line: &str) -> Option<(u64, String)> {
    let (head, text) = line.split_once(';')?;
    let at = head.split(',').nth(2)?.parse().ok()?;
    kept(at, text)
}

fn kept(at: u64, text: &str) -> Option<(u64, String)> {
    let text = text.trim_end();
    tells(text).then(|| (at, text.chars().take(LONGEST).collect()))
}

/// Who may not read the device may be in a group that may read the journal.
fn from_journal() -> Result<Records, String> {
    let mut command = Command::new("journalctl");
    command.args(["-k", "-b", "-q", "--no-pager", "-n", "20000", "-o", "short-monotonic"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("journalctl: {error}"))?;
    let (sender, receiver) = channel();
    let output = child.stdout.take();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let read = output.map(|output| output.take(16 << 20).read_to_end(&mut text));
        drop(sender.send((read.is_some(), text)));
    });
    let read = receiver.recv_timeout(WITHIN);
    // It has said what it has to say, or hangs.
    let _ = child.kill();
    let _ = child.wait();
    let (_, text) = read.map_err(|_| "journalctl did not end in time".to_owned())?;
    let text = String::from_utf8_lossy(&text);
    if text.trim().is_empty() {
        return Err("the journal shows no message of the kernel".to_owned());
    }
    Ok(text.lines().filter_map(line_of_journal).collect())
}

/// `[ 1843.308145] node kernel: NVRM: …`
fn line_of_journal(line: &str) -> Option<(u64, String)> {
    let (seconds, rest) = line.strip_prefix('[')?.split_once(']')?;
    let (whole, part) = seconds.trim().split_once('.')?;
    let at = whole.parse::<u64>().ok()?.checked_mul(1_000_000)?;
    let (_, text) = rest.split_once("kernel: ")?;
    kept(at.saturating_add(part.parse().ok()?), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_the_device_and_lines_of_the_journal_are_the_same_messages() {
        let text = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.";
        let device = format!(
            "6,1,100,-;mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE\n4,2,1843308145,-;{text}\n \
             SUBSYSTEM=pci\nNVRM: Xid"
        );
        let found = from_device(&mut device.as_bytes(), Instant::now() + WITHIN);
        assert_eq!(found, [(1_843_308_145, text.to_owned())]);
        let journal = format!("[ 1843.308145] node-a kernel: {text}");
        assert_eq!(line_of_journal(&journal), Some((1_843_308_145, text.to_owned())));
        assert_eq!(line_of_journal("-- Boot 3f --"), None);
    }
}
