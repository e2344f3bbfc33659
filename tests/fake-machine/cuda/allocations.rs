//! Allocating and freeing, on the device and pinned on the host.
//!
//! UCX patches the first bytes of these functions in memory, to hear of every allocation. Its
//! relocator knows few instructions, so they begin with as many as it overwrites (13 bytes) of one
//! that it knows, and jump to the function proper. The moved constant goes nowhere. If it cannot patch
//! one of them, UCX works without its registration cache and tells nobody.

use std::ffi::{c_int, c_uint, c_void};

use crate::codes::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, NOT_SUPPORTED,
    OUT_OF_MEMORY,
};
use crate::driver::{call, tell};
use crate::streams::Work;

/// What `poison` fills fresh memory with.
const POISON: u8 = 0xa5;

/// Exports a function under a name, with a beginning that UCX can move elsewhere.
macro_rules! patchable {
    ($($name:ident = $target:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "mov eax, 0x11111111", "mov eax, 0x11111111", "mov eax, 0x11111111",
                "jmp {target}",
                target = sym $target
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!("nop", "nop", "nop", "nop", "b {target}", target = sym $target);
        }
    )*};
}

patchable! {
    cuMemAlloc = allocate;
    cuMemAlloc_v2 = allocate;
    cuMemAllocManaged = refuse_managed;
    cuMemAllocPitch = refuse_pitch;
    cuMemAllocPitch_v2 = refuse_pitch;
    cuMemAllocAsync = allocate_from_pool;
    cuMemAllocFromPoolAsync = refuse_pools;
    cuModuleGetGlobal_v2 = refuse_globals;
    cuLibraryGetGlobal = refuse_globals;
    cuMemFree = free;
    cuMemFree_v2 = free;
    cuMemFreeAsync = free_to_pool;
    cuMemFreeHost = free_host;
    cuMemMap = refuse_virtual_memory;
    cuMemUnmap = refuse_virtual_memory;
}

unsafe extern "C" fn allocate(address: *mut usize, bytes: usize) -> c_int {
    call("cuMemAlloc", |driver| {
        let device = driver.current()?;
        let capacity = driver.own_bytes(device);
        let mut state = driver.lock();
        let block = state.memory.allocate(device, &driver.devices[device], capacity, bytes)?;
        let base = block.base;
        if driver.faults.poison {
            let to = state.memory.reach(base, bytes)?;
            Work::Fill { to, bytes, value: POISON }.run(0);
        }
        // SAFETY: see `lib.rs`.
        unsafe { tell(address, base) }
    })
}

extern "C" fn free(address: usize) -> c_int {
    call("cuMemFree", |driver| {
        if address == 0 {
            return Ok(());
        }
        let device = driver.current()?;
        driver.drain(device, true)?;
        driver.lock().memory.free(address)
    })
}

extern "C" fn refuse_managed() -> c_int {
    call("cuMemAllocManaged", |_| Err(NOT_SUPPORTED))
}

extern "C" fn refuse_pitch() -> c_int {
    call("cuMemAllocPitch", |_| Err(NOT_SUPPORTED))
}

/// Memory of the device's own pool belongs to no context, and has no handle for other processes
/// (CUDA driver API, stream ordered memory allocator).
unsafe extern "C" fn allocate_from_pool(
    address: *mut usize,
    bytes: usize,
    _stream: usize,
) -> c_int {
    call("cuMemAllocAsync", |driver| {
        let device = driver.current()?;
        let capacity = driver.own_bytes(device);
        let mut state = driver.lock();
        let base = state.memory.allocate(device, &driver.devices[device], capacity, bytes)?.base;
        if let Some(block) = state.memory.block_mut(base) {
            block.pooled = true;
        }
        // SAFETY: see `lib.rs`.
        unsafe { tell(address, base) }
    })
}

extern "C" fn free_to_pool(address: usize, stream: usize) -> c_int {
    call("cuMemFreeAsync", |driver| {
        let device = driver.current()?;
        let ticket = driver.lock().streams.ticket(stream);
        driver.reach(stream, ticket);
        driver.drain(device, false)?;
        driver.lock().memory.free(address)
    })
}

extern "C" fn refuse_pools() -> c_int {
    call("memory pools", |_| Err(NOT_SUPPORTED))
}

extern "C" fn refuse_globals() -> c_int {
    call("global variables", |_| Err(NOT_SUPPORTED))
}

extern "C" fn refuse_virtual_memory() -> c_int {
    call("virtual memory management", |_| Err(NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    call("cuMemGetInfo", |driver| {
        let device = driver.current()?;
        driver.lock().memory.look_again(device);
        let gpu = &driver.devices[device];
        let used = gpu.ledger.used(gpu.memory_bytes);
        // SAFETY: see `lib.rs`.
        unsafe {
            tell(free, driver.own_bytes(device).saturating_sub(used))?;
            tell(total, gpu.memory_bytes)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    address: *mut *mut c_void,
    bytes: usize,
    flags: c_uint,
) -> c_int {
    call("cuMemHostAlloc", |driver| {
        driver.current()?;
        // `CU_MEMHOSTALLOC_PORTABLE`, `…_DEVICEMAP` and `…_WRITECOMBINED`.
        if bytes == 0 || flags > 7 {
            return Err(INVALID_VALUE);
        }
        let (rights, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses a place where nothing is.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) };
        if place == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        driver.lock().pinned.insert(place.expose_provenance(), bytes);
        // SAFETY: see `lib.rs`.
        unsafe { tell(address, place) }
    })
}

extern "C" fn free_host(address: usize) -> c_int {
    call("cuMemFreeHost", |driver| {
        let device = driver.current()?;
        driver.drain(device, true)?;
        let bytes = driver.lock().pinned.remove(&address).ok_or(INVALID_VALUE)?;
        // SAFETY: mapped by `cuMemHostAlloc` with this length, and given back by its user.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), bytes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: usize, bytes: usize, _flags: c_uint) -> c_int {
    call("cuMemHostRegister", |driver| {
        driver.current()?;
        let mut state = driver.lock();
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
        let before = state.pinned.range(..end).next_back();
        if before.is_some_and(|(base, length)| base + length > address) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        state.pinned.insert(address, bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: usize) -> c_int {
    call("cuMemHostUnregister", |driver| {
        let device = driver.current()?;
        driver.drain(device, true)?;
        let gone = driver.lock().pinned.remove(&address);
        gone.map(|_| ()).ok_or(HOST_MEMORY_NOT_REGISTERED)
    })
}
