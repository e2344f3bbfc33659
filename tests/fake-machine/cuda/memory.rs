//! Device memory: a sparse file in memory for each GPU, mapped twice.
//!
//! Once without any right at the addresses that the program knows, so that a program that reads or
//! writes device memory itself dies of SIGSEGV, as with a GPU; and once writable elsewhere, for the
//! driver's copies. Other processes map parts of the file by its number in `/proc/PID/fd`.
//!
//! Memory that is freed while another process has it mapped stays on the GPU until no process has, as
//! on a real one (openucx/ucx#11288, #4410): it counts as used. Who maps a part of a file locks it for
//! reading, so that the owner can see it, and so that it ends with the process.
//!
//! *Invariant:* blocks do not overlap, and each lies within one file; what is used, with what is freed
//! and still mapped, is taken from the ledger, so that all processes together have no more than the
//! GPU's memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

use crate::codes::{Answer, INVALID_VALUE, MAP_FAILED, OUT_OF_MEMORY};
use crate::ledger::Ledger;
use crate::machine::Device;

/// What a block begins at, in its file, too: files are mapped page by page. Kernels for Arm may
/// have pages of up to 64 KiB.
const PAGE: usize = if cfg!(target_arch = "aarch64") { 64 << 10 } else { 4096 };

/// Two mappings of the same pages: one for the program, which may not touch them, and one for us.
struct Mapped {
    public: usize,
    private: usize,
    bytes: usize,
}

impl Mapped {
    fn new(file: &File, offset: usize, bytes: usize) -> Answer<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| INVALID_VALUE)?;
        let map = |rights| {
            // SAFETY: the kernel chooses a place where nothing is.
            let place = unsafe {
                libc::mmap(null_mut(), bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), offset)
            };
            if place == libc::MAP_FAILED {
                return Err(MAP_FAILED);
            }
            // SAFETY: just mapped. It is large and sparse; a core dump without it says enough.
            unsafe { libc::madvise(place, bytes, libc::MADV_DONTDUMP) };
            Ok(place.expose_provenance())
        };
        let public = map(libc::PROT_NONE)?;
        match map(libc::PROT_READ | libc::PROT_WRITE) {
            Ok(private) => Ok(Self { public, private, bytes }),
            Err(error) => {
                unmap(public, bytes);
                Err(error)
            }
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(self.public, self.bytes);
        unmap(self.private, self.bytes);
    }
}

fn unmap(place: usize, bytes: usize) {
    // SAFETY: mapped by `Mapped`, with this length, and used by nobody who keeps CUDA's contract.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(place), bytes) };
}

/// A GPU's addresses are more than its memory, so that freed memory that is still mapped takes none
/// of those that are needed, and nothing fails for want of room in one piece.
const ADDRESSES: usize = 4;

/// Freed memory that another process may have mapped: offset and bytes.
struct Pinned(usize, usize);

/// The memory of one GPU, as far as this process has it.
struct Arena {
    file: File,
    inode: u64,
    mapped: Mapped,
    /// Offset and length of what is free.
    gaps: BTreeMap<usize, usize>,
    ledger: Arc<Ledger>,
    /// What was taken from the ledger, by offset.
    taken: BTreeMap<usize, Vec<Range<usize>>>,
    /// Part of what is taken.
    pinned: Vec<Pinned>,
}

impl Arena {
    fn new(memory_bytes: usize, ledger: Arc<Ledger>) -> Answer<Self> {
        let bytes = memory_bytes.checked_mul(ADDRESSES).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a C string and a flag.
        let fd = unsafe { libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: just opened, and ours alone.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(bytes as u64).map_err(|_| OUT_OF_MEMORY)?;
        let inode = file.metadata().map_err(|_| OUT_OF_MEMORY)?.ino();
        let mapped = Mapped::new(&file, 0, bytes)?;
        let (gaps, taken) = (BTreeMap::from([(0, bytes)]), BTreeMap::new());
        Ok(Self { file, inode, mapped, gaps, ledger, taken, pinned: Vec::new() })
    }

    /// The first gap that is large enough, if processes have no more than the capacity then.
    fn take(&mut self, bytes: usize, capacity: usize) -> Option<usize> {
        let (offset, length) = self.gaps.iter().find(|(_, length)| **length >= bytes)?;
        let (offset, length) = (*offset, *length);
        self.taken.insert(offset, self.ledger.take(bytes, capacity)?);
        self.gaps.remove(&offset);
        if length > bytes {
            self.gaps.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Whether another process has a part mapped.
    fn is_mapped(&self, offset: usize, bytes: usize) -> bool {
        let mut lock = lock_of(libc::F_WRLCK, offset, bytes);
        // SAFETY: a file of ours, and a lock to fill in.
        let asked = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
        asked == 0 && libc::c_int::from(lock.l_type) != libc::F_UNLCK
    }

    /// Frees a part, or if another process has it mapped, keeps it until none has.
    fn free(&mut self, offset: usize, bytes: usize) {
        if self.is_mapped(offset, bytes) {
            self.pinned.push(Pinned(offset, bytes));
        } else {
            self.give(offset, bytes);
        }
    }

    /// Frees what nobody has mapped any more.
    fn look_again(&mut self) {
        for Pinned(offset, bytes) in std::mem::take(&mut self.pinned) {
            self.free(offset, bytes);
        }
    }

    fn give(&mut self, mut offset: usize, bytes: usize) {
        let (hole, length) = (offset as libc::off_t, bytes as libc::off_t);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a file of ours. If it fails, memory stays taken, and nothing else.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, hole, length) };
        self.ledger.give(&self.taken.remove(&offset).unwrap_or_default());
        let mut length = bytes;
        if let Some(after) = self.gaps.remove(&(offset + bytes)) {
            length += after;
        }
        if let Some((before, long)) = self.gaps.range(..offset).next_back()
            && before + long == offset
        {
            offset = *before;
            length += long;
        }
        self.gaps.insert(offset, length);
    }
}

/// A lock of a part of a file.
#[allow(clippy::cast_possible_truncation, reason = "the kinds are small numbers")]
fn lock_of(kind: libc::c_int, offset: usize, bytes: usize) -> libc::flock {
    // SAFETY: all zero is a valid value of this C structure.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = offset as libc::off_t;
    lock.l_len = bytes as libc::off_t;
    lock
}

/// A block of device memory, of this process or mapped from another.
pub struct Block {
    pub base: usize,
    pub bytes: usize,
    /// The GPU, by its position among those that are visible.
    pub device: usize,
    /// Unlike that of any other block, in this process.
    pub id: u64,
    /// Where the driver reads and writes it.
    private: usize,
    /// Whether it is of the device's own pool: without a context, and without a handle.
    pub pooled: bool,
    /// Whether copies to it are complete when the call returns (`SYNC_MEMOPS`).
    pub synchronous: bool,
    pub origin: Origin,
}

pub enum Origin {
    Own,
    /// `owner` has the memory; the block's device has mapped it.
    Mapped {
        key: Key,
        owner: usize,
        opened: usize,
        _mapped: ForeignMemory,
    },
}

/// Keeps a mapping of another process's memory, and the lock of that part of its file.
pub struct ForeignMemory {
    _mapped: Mapped,
    file: Arc<File>,
    offset: usize,
    bytes: usize,
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        let mut lock = lock_of(libc::F_UNLCK, self.offset, self.bytes);
        // SAFETY: an open file and a lock.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) };
    }
}

/// Names a block in another process: its file, and the place in it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    pub pid: u32,
    pub fd: i32,
    pub inode: u64,
    pub offset: usize,
    pub bytes: usize,
}

/// All device memory that this process knows.
#[derive(Default)]
pub struct Memory {
    arenas: BTreeMap<usize, Arena>,
    blocks: BTreeMap<usize, Block>,
    /// Other processes' files, by process, descriptor and inode; open while parts are mapped.
    files: BTreeMap<(u32, i32, u64), Weak<File>>,
    next: u64,
    pub allocated: u64,
    pub opened: u64,
}

impl Memory {
    /// Allocates on a GPU, of which processes may have so much.
    pub fn allocate(
        &mut self,
        device: usize,
        gpu: &Device,
        capacity: usize,
        bytes: usize,
    ) -> Answer<&Block> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let arena = match self.arenas.entry(device) {
            Entry::Occupied(arena) => arena.into_mut(),
            Entry::Vacant(free) => {
                free.insert(Arena::new(gpu.memory_bytes, Arc::clone(&gpu.ledger))?)
            }
        };
        let room = bytes.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        arena.look_again();
        let offset = arena.take(room, capacity).ok_or(OUT_OF_MEMORY)?;
        let (base, private) = (arena.mapped.public + offset, arena.mapped.private + offset);
        self.next += 1;
        self.allocated += 1;
        let (id, origin) = (self.next, Origin::Own);
        let (pooled, synchronous) = (false, false);
        let block = Block { base, bytes, device, id, private, pooled, synchronous, origin };
        Ok(self.blocks.entry(base).or_insert(block))
    }

    /// Frees a block of this process.
    pub fn free(&mut self, base: usize) -> Answer {
        let own = |block: &Block| matches!(block.origin, Origin::Own);
        let block = self.blocks.get(&base).filter(|block| own(block)).ok_or(INVALID_VALUE)?;
        let arena = self.arenas.get_mut(&block.device).ok_or(INVALID_VALUE)?;
        arena.free(base - arena.mapped.public, block.bytes.next_multiple_of(PAGE));
        self.blocks.remove(&base);
        Ok(())
    }

    /// What goes with a context: all of the GPU's blocks.
    pub fn forget(&mut self, device: usize) {
        let on_it = |block: &&Block| block.device == device;
        let gone: Vec<usize> = self.blocks.values().filter(on_it).map(|b| b.base).collect();
        for base in gone {
            if self.free(base).is_err() {
                self.blocks.remove(&base);
            }
        }
    }

    /// Gives back what this process has freed and nobody has mapped any more.
    pub fn look_again(&mut self, device: usize) {
        self.arenas.get_mut(&device).into_iter().for_each(Arena::look_again);
    }

    /// The block around an address.
    pub fn block(&self, address: usize) -> Option<&Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        (address - block.base < block.bytes).then_some(block)
    }

    pub fn block_mut(&mut self, address: usize) -> Option<&mut Block> {
        let (_, block) = self.blocks.range_mut(..=address).next_back()?;
        (address - block.base < block.bytes).then_some(block)
    }

    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values()
    }

    /// Where the driver itself finds a range: device memory at its private address, and everything
    /// else where it is.
    ///
    /// # Errors
    /// If the range leaves its block, or lies in device memory that is not allocated.
    pub fn reach(&self, address: usize, bytes: usize) -> Answer<usize> {
        if let Some(block) = self.block(address) {
            let offset = address - block.base;
            return if bytes <= block.bytes - offset {
                Ok(block.private + offset)
            } else {
                Err(INVALID_VALUE)
            };
        }
        let free = |arena: &Arena| address.wrapping_sub(arena.mapped.public) < arena.mapped.bytes;
        if self.arenas.values().any(free) { Err(INVALID_VALUE) } else { Ok(address) }
    }

    /// How another process names the block that begins here.
    pub fn key(&self, block: &Block) -> Answer<Key> {
        let arena = self.arenas.get(&block.device).ok_or(INVALID_VALUE)?;
        if !matches!(block.origin, Origin::Own) {
            return Err(INVALID_VALUE);
        }
        Ok(Key {
            pid: std::process::id(),
            fd: arena.file.as_raw_fd(),
            inode: arena.inode,
            offset: block.base - arena.mapped.public,
            bytes: block.bytes,
        })
    }

    fn file(&mut self, key: &Key) -> Answer<Arc<File>> {
        let name = (key.pid, key.fd, key.inode);
        if let Some(file) = self.files.get(&name).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let path = format!("/proc/{}/fd/{}", key.pid, key.fd);
        let mut options = File::options();
        let file = options.read(true).write(true).open(path).map_err(|_| MAP_FAILED)?;
        let file = Arc::new(file);
        self.files.insert(name, Arc::downgrade(&file));
        Ok(file)
    }

    /// Maps a block of another process, or counts once more that it is.
    pub fn open(&mut self, key: Key, owner: usize, device: usize) -> Answer<usize> {
        for block in self.blocks.values_mut() {
            if let Origin::Mapped { key: other, opened, .. } = &mut block.origin
                && *other == key
            {
                *opened += 1;
                return Ok(block.base);
            }
        }
        let file = self.file(&key)?;
        let metadata = file.metadata().map_err(|_| MAP_FAILED)?;
        let end = key.offset.checked_add(key.bytes).ok_or(MAP_FAILED)?;
        // Another file has got that number since.
        if metadata.ino() != key.inode || metadata.len() < end as u64 {
            return Err(MAP_FAILED);
        }
        let length = key.bytes.next_multiple_of(PAGE);
        let mut lock = lock_of(libc::F_RDLCK, key.offset, length);
        // SAFETY: an open file and a lock. It lasts as long as the file is open, in this process alone.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) } != 0 {
            return Err(MAP_FAILED);
        }
        let mapped = Mapped::new(&file, key.offset, length)?;
        self.next += 1;
        self.opened += 1;
        let (base, private) = (mapped.public, mapped.private);
        let foreign = ForeignMemory { _mapped: mapped, file, offset: key.offset, bytes: length };
        let origin = Origin::Mapped { key, owner, opened: 1, _mapped: foreign };
        let (bytes, id, pooled, synchronous) = (key.bytes, self.next, false, false);
        let block = Block { base, bytes, device, id, private, pooled, synchronous, origin };
        self.blocks.insert(base, block);
        Ok(base)
    }

    /// Gives a mapping back.
    pub fn close(&mut self, base: usize) -> Answer {
        let block = self.blocks.get_mut(&base).ok_or(INVALID_VALUE)?;
        let Origin::Mapped { opened, .. } = &mut block.origin else { return Err(INVALID_VALUE) };
        *opened -= 1;
        if *opened == 0 {
            self.blocks.remove(&base);
        }
        Ok(())
    }
}
