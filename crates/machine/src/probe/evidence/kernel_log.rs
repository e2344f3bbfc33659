//! The errors that the driver wrote to the kernel's log.
//!
//! *Invariant:* a log that cannot be read is unseen; one that has forgotten its beginning is read
//! as far as it goes.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::super::Options;
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::preflight::{Look, Xid};

/// More than the kernel keeps, unless it was told to keep more.
const MOST: usize = 16 << 20;

/// All Xid errors, each number once for each GPU.
pub(super) fn xids(options: &Options) -> Look<Vec<Xid>> {
    let now = uptime(&options.procfs.join("uptime"));
    match read(&options.dev.join("kmsg")) {
        Look::Seen(log) => Look::Seen(found(&log, now)),
        Look::NotThere => Look::NotThere,
        Look::Unseen(why) => Look::Unseen(why),
    }
}

/// Seconds since the start of the machine.
fn uptime(path: &Path) -> Option<f64> {
    std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

/// Reads the log without waiting for more. `/dev/kmsg` gives a record with each read.
fn read(path: &Path) -> Look<String> {
    let opened = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
    let mut file = match opened {
        Ok(file) => file,
        Err(error) => return super::failed(path, &error),
    };
    let mut log = Vec::new();
    let mut record = [0; 8192];
    while log.len() < MOST {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(length) => log.extend_from_slice(&record[..length]),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => break,
                // Records were overwritten while this read; the next one is there.
                ErrorKind::BrokenPipe | ErrorKind::Interrupted => {}
                _ => return super::failed(path, &error),
            },
        }
    }
    Look::Seen(String::from_utf8_lossy(&log).into_owned())
}

/// Records such as `4,1234,98765432,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.`
fn found(log: &str, now: Option<f64>) -> Vec<Xid> {
    let mut all: Vec<Xid> = Vec::new();
    for line in log.lines() {
        let Some((head, text)) = line.split_once(';') else { continue };
        let Some((pci, xid)) = xid_of(text) else { continue };
        let micros = head.split(',').nth(2).and_then(|micros| micros.parse::<u64>().ok());
        let ago_s = micros.zip(now).map(|(micros, now)| super::whole(now - micros as f64 / 1e6));
        match all.iter_mut().find(|one| one.pci == pci && one.xid == xid) {
            Some(one) => {
                one.count += 1;
                one.ago_s = ago_s.or(one.ago_s);
            }
            None => all.push(Xid { pci, xid, ago_s, count: 1 }),
        }
    }
    all
}

fn xid_of(text: &str) -> Option<(PciAddress, u32)> {
    let rest = text.strip_prefix("NVRM: Xid (PCI:")?;
    let (place, rest) = rest.split_once("): ")?;
    let pci = if place.contains('.') { place.to_owned() } else { format!("{place}.0") };
    let number = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((pci.parse().ok()?, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_by_gpu_and_number() {
        let log = "6,1,1000000,-;nvidia: module loaded\n\
                   4,2,5000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off\n \
                   SUBSYSTEM=pci\n\
                   4,3,7000000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus\n\
                   4,4,8000000,-;NVRM: Xid (PCI:0000:43:00): 31, pid=7\n\
                   4,5,9000000,-;NVRM: Xid (PCI:nonsense): 31, pid=7\n";
        let found = found(log, Some(10.0));
        let pci = |text: &str| text.parse().expect("an address");
        assert_eq!(
            found,
            [
                Xid { pci: pci("0000:1b:00.0"), xid: 79, ago_s: Some(3), count: 2 },
                Xid { pci: pci("0000:43:00.0"), xid: 31, ago_s: Some(2), count: 1 },
            ]
        );
    }

    #[test]
    fn a_log_that_may_not_be_read_is_unseen() {
        let folder = tempfile::tempdir().expect("a directory");
        assert_eq!(read(&folder.path().join("kmsg")), Look::NotThere);
        assert!(matches!(read(folder.path()), Look::Unseen(_)));
    }
}
