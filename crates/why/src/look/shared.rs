//! Who has which memory that processes share: by the files that are mapped, `/proc/PID/maps`.
//!
//! *Invariant:* no process of the same user that began later is left out: where one can't be seen,
//! nothing is said.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;

use super::procfs::{Stat, numbers};
use crate::evidence::State;

/// A file by its device and its number there.
type FileId = (String, String);

/// Who of all processes has which files in memory that is shared.
#[derive(Default)]
pub(super) struct Shared {
    by_file: BTreeMap<FileId, BTreeSet<u32>>,
    /// Those that could not be seen.
    hidden: Vec<u32>,
}

impl Shared {
    /// Reads once what every process has. One that waits for a device may hold who reads it.
    pub(super) fn look() -> Self {
        let mut all = Self::default();
        for pid in numbers::<u32>("/proc") {
            let Some(stat) = Stat::read(&format!("/proc/{pid}/stat")) else { continue };
            let maps = match stat.state() {
                State::Uninterruptible => None,
                _ => fs::read_to_string(format!("/proc/{pid}/maps")).ok(),
            };
            match maps {
                Some(maps) => {
                    for file in maps.lines().filter_map(shared) {
                        all.by_file.entry(file).or_default().insert(pid);
                    }
                }
                None => all.hidden.push(pid),
            }
        }
        all
    }

    /// The processes that have in memory what a process has at an address, without itself; `None`
    /// if nobody may share it, or if one that may can't be seen.
    pub(super) fn sharers(&self, pid: u32, address: u64) -> Option<Vec<u32>> {
        let own = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        let file = own.lines().find_map(|line| mapped(line, address))?;
        let (user, begin) = (user(pid)?, begun(pid)?);
        // Another user's would need its name and a right to it, an older one its name.
        let may = |other: &u32| {
            self::user(*other) == Some(user) && begun(*other).is_some_and(|it| it >= begin)
        };
        if self.hidden.iter().any(may) {
            return None;
        }
        let found = self.by_file.get(&file)?;
        Some(found.iter().copied().filter(|other| *other != pid).collect())
    }
}

fn user(pid: u32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|folder| folder.uid())
}

/// When a process began, in the kernel's ticks; `None` if it has ended.
fn begun(pid: u32) -> Option<u64> {
    Stat::read(&format!("/proc/{pid}/stat"))?.field(22)
}

/// The file's device and number there, of a line of shared memory:
/// `7f…000-7f…000 rw-s 00000000 00:1a 1234   /dev/shm/sem.x (deleted)`.
fn shared(line: &str) -> Option<FileId> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let is_shared = words.next()?.ends_with('s');
    let mut words = words.skip(1);
    let file = (words.next()?.to_owned(), words.next()?.to_owned());
    is_shared.then_some(file)
}

/// The file of a line that has this address.
fn mapped(line: &str, address: u64) -> Option<FileId> {
    let (begin, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
    let range = hexadecimal(begin)?..hexadecimal(end)?;
    range.contains(&address).then(|| shared(line)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_shared_memory_names_its_file() {
        let line = "7f10-7f20 rw-s 00000000 00:1a 1234    /dev/shm/sem.x (deleted)";
        assert_eq!(mapped(line, 0x7f10), Some(("00:1a".to_owned(), "1234".to_owned())));
        assert_eq!(mapped(line, 0x7f20), None, "behind it");
        assert_eq!(mapped(&line.replace("rw-s", "rw-p"), 0x7f10), None, "a copy of its own");
        assert_eq!(mapped("", 0x7f10), None);
    }

    #[test]
    fn memory_that_nobody_else_has_has_no_sharers() {
        let pid = std::process::id();
        let path = std::env::temp_dir().join(format!("sharers-{pid}"));
        let mut options = fs::File::options();
        let file = options.read(true).write(true).create_new(true).open(&path).expect("a file");
        fs::remove_file(&path).expect("it was there");
        file.set_len(1).expect("a byte");
        let map = memmap2::MmapRaw::map_raw(&file).expect("shared memory");
        let all = Shared::look();
        assert_eq!(all.sharers(pid, map.as_ptr() as u64), Some(Vec::new()));
        let own = 0_u8;
        assert_eq!(all.sharers(pid, (&raw const own) as u64), None, "it is not shared");
    }
}
