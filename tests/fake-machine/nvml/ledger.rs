//! How much of a GPU's memory all processes have: a file for each GPU, beside the description, in
//! which who allocates locks as many bytes as it takes. So memory goes with its process.
//!
//! *Invariant:* no byte is locked twice; what is locked lies below the GPU's memory.

use std::fs::{File, Permissions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What stands for the whole GPU, beyond all memory.
const OWNER: Range<usize> = 1 << 60..(1 << 60) + 1;

pub struct Ledger {
    /// Has the locks of this process.
    own: File,
    /// Sees them all: locks of one open file do not conflict with each other.
    all: File,
}

impl Ledger {
    /// That of a GPU of the machine whose description this is, or of the instance at a position.
    pub fn open(description: &Path, gpu: u32, mig: Option<usize>) -> io::Result<Self> {
        let path = place(description, gpu, mig);
        let folder = path.parent().unwrap_or(description);
        let may_all = |path: &Path, mode| {
            // Another user may have made it.
            let _ = std::fs::set_permissions(path, Permissions::from_mode(mode));
        };
        std::fs::create_dir_all(folder)?;
        may_all(folder, 0o1777);
        let options = || File::options().read(true).write(true).clone();
        // Without making it first: in a sticky directory that fails for another user's file.
        let open = || {
            options().open(&path).or_else(|_| options().create(true).truncate(false).open(&path))
        };
        let (own, all) = (open()?, open()?);
        may_all(&path, 0o666);
        Ok(Self { own, all })
    }

    /// Bytes that processes have.
    pub fn used(&self, capacity: usize) -> usize {
        used(&self.all, capacity)
    }

    /// The same, for who takes none: of a GPU that nobody has opened, nothing is used.
    pub fn look(description: &Path, gpu: u32, mig: Option<usize>, capacity: usize) -> usize {
        File::open(place(description, gpu, mig)).map_or(0, |file| used(&file, capacity))
    }

    /// Takes as many bytes, wherever they are; `None` if there are too few.
    pub fn take(&self, bytes: usize, capacity: usize) -> Option<Vec<Range<usize>>> {
        let (mut taken, mut missing) = (Vec::new(), bytes);
        while missing > 0 {
            let gaps = gaps(&self.all, 0..capacity);
            if gaps.iter().map(Range::len).sum::<usize>() < missing {
                self.give(&taken);
                return None;
            }
            for gap in gaps {
                let part = gap.start..gap.end.min(gap.start + missing);
                if part.is_empty() {
                    continue;
                }
                if control(&self.own, libc::F_OFD_SETLK, libc::F_WRLCK, &part).is_some() {
                    missing -= part.len();
                    taken.push(part);
                } else if io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
                    self.give(&taken);
                    return None;
                }
                // Else another process was faster, and it is looked again.
            }
        }
        Some(taken)
    }

    /// Takes the GPU for this process alone, until it ends; whether nobody else had.
    pub fn claim(&self) -> bool {
        control(&self.own, libc::F_OFD_SETLK, libc::F_WRLCK, &OWNER).is_some()
    }

    /// Gives back what was taken.
    pub fn give(&self, parts: &[Range<usize>]) {
        for part in parts {
            control(&self.own, libc::F_OFD_SETLK, libc::F_UNLCK, part);
        }
    }
}

fn place(description: &Path, gpu: u32, mig: Option<usize>) -> PathBuf {
    let instance = mig.map(|slot| format!(".{slot}")).unwrap_or_default();
    description.with_file_name("memory").join(format!("gpu{gpu}{instance}"))
}

fn used(all: &File, capacity: usize) -> usize {
    capacity - gaps(all, 0..capacity).iter().map(Range::len).sum::<usize>()
}

/// What of a range nobody has.
fn gaps(all: &File, range: Range<usize>) -> Vec<Range<usize>> {
    let (mut gaps, mut unknown) = (Vec::new(), vec![range]);
    while let Some(range) = unknown.pop() {
        if range.is_empty() {
            continue;
        }
        match control(all, libc::F_OFD_GETLK, libc::F_WRLCK, &range) {
            Some(Some(locked)) => {
                unknown.push(locked.end..range.end);
                unknown.push(range.start..locked.start.max(range.start));
            }
            _ => gaps.push(range),
        }
    }
    gaps
}

/// A call about the lock of a range; the lock that is in its way, or `None` if the call fails.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small numbers")]
fn control(
    file: &File,
    call: libc::c_int,
    kind: libc::c_int,
    range: &Range<usize>,
) -> Option<Option<Range<usize>>> {
    // SAFETY: all zero is a valid value of this C structure.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = range.start as libc::off_t;
    lock.l_len = range.len() as libc::off_t;
    // SAFETY: an open file, and a lock to read and to fill in.
    if unsafe { libc::fcntl(file.as_raw_fd(), call, &mut lock) } != 0 {
        return None;
    }
    if call != libc::F_OFD_GETLK || libc::c_int::from(lock.l_type) == libc::F_UNLCK {
        return Some(None);
    }
    let start = usize::try_from(lock.l_start).ok()?;
    Some(Some(start..start + usize::try_from(lock.l_len).ok()?))
}
