//! A `libnvrtc.so.13` that compiles CUDA C++ for the CPU, with `g++`, so that the stand-in for the
//! driver can run it.
//!
//! A kernel's threads run one after the other. There is no shared memory, no `__syncthreads`, no
//! library of CUDA's, and nothing is learned of machine code. What `g++` refuses is the compiler's
//! log. The "machine code" is a mark and the path of a shared library, which exports for each kernel
//! `cc_pack_NAME`, which copies the parameters of a launch, `cc_run_NAME`, which runs it, and
//! `cc_parameter_NAME`, which tells where a parameter lies among them.
//!
//! The code says which architecture it is for, as real code does. `CUDA_CLUSTER_FAKE_NVRTC_ARCHS` lists
//! other architectures than those of CUDA 13 (`75,80`).
//!
//! *Invariant:* a file that was compiled stays until the process that compiled it exits.

#![allow(unsafe_code)]
// The names are NVRTC's, and `nvrtc.h` documents them.
#![allow(non_snake_case, missing_docs, unreachable_pub, clippy::missing_safety_doc)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the image of a module begins with, which the driver looks for.
const MARK: &str = "machine code of a stand-in: ";

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;

/// What CUDA 13.0 compiles for, or what is asked for.
fn architectures() -> Vec<c_int> {
    let list = std::env::var("CUDA_CLUSTER_FAKE_NVRTC_ARCHS");
    let list = list.unwrap_or_else(|_| "75,80,86,87,88,89,90,100,103,110,120,121".to_owned());
    list.split(',').filter_map(|one| one.parse().ok()).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: `nvrtc.h`: places for the results.
    unsafe {
        major.write(13);
        minor.write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int {
    // SAFETY: `nvrtc.h`: a place for the result.
    unsafe { count.write(c_int::try_from(architectures().len()).unwrap_or(0)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetSupportedArchs(to: *mut c_int) -> c_int {
    for (at, one) in architectures().into_iter().enumerate() {
        // SAFETY: `nvrtc.h`: room for as many as there are.
        unsafe { to.add(at).write(one) };
    }
    SUCCESS
}

/// What stands before the source: the words of CUDA C++, and how a kernel is called.
const PRELUDE: &str = r#"
#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#define __global__
#define __device__
#define __forceinline__ inline
struct dim3 { unsigned x, y, z; };
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
template <class... A> struct cc_launch { void (*kernel)(A...); std::tuple<A...> parameters; };
template <class... A, std::size_t... I>
void *cc_pack(void (*kernel)(A...), void **from, std::index_sequence<I...>) {
    return new cc_launch<A...>{kernel, std::tuple<A...>(*static_cast<A *>(from[I])...)};
}
template <class... A> void *cc_pack(void (*kernel)(A...), void **from) {
    return cc_pack(kernel, from, std::index_sequence_for<A...>{});
}
template <class T> bool cc_reach(T &value, void *(*reach)(void *)) {
    if constexpr (std::is_pointer_v<T>) {
        if (!value) return true;
        value = static_cast<T>(reach(const_cast<void *>(static_cast<const void *>(value))));
        return value != nullptr;
    }
    return true;
}
template <class... A>
int cc_run(void (*)(A...), void *packed, const unsigned *d, void *(*reach)(void *)) {
    auto *launch = static_cast<cc_launch<A...> *>(packed);
    bool good = std::apply([&](auto &...p) { return (cc_reach(p, reach) && ...); }, launch->parameters);
    gridDim = {d[0], d[1], d[2]};
    blockDim = {d[3], d[4], d[5]};
    for (unsigned bz = 0; good && bz < d[2]; bz++) for (unsigned by = 0; by < d[1]; by++)
    for (unsigned bx = 0; bx < d[0]; bx++) for (unsigned tz = 0; tz < d[5]; tz++)
    for (unsigned ty = 0; ty < d[4]; ty++) for (unsigned tx = 0; tx < d[3]; tx++) {
        blockIdx = {bx, by, bz};
        threadIdx = {tx, ty, tz};
        std::apply(launch->kernel, launch->parameters);
    }
    delete launch;
    return good ? 0 : 1;
}
template <class... A>
int cc_parameter(void (*)(A...), std::size_t index, std::size_t *offset, std::size_t *size) {
    std::size_t end = 0, at = 0;
    int missing = 1;
    auto next = [&](std::size_t bytes, std::size_t alignment) {
        end = (end + alignment - 1) / alignment * alignment;
        if (at++ == index) { *offset = end; *size = bytes; missing = 0; }
        end += bytes;
    };
    (next(sizeof(A), alignof(A)), ...);
    return missing;
}
#line 1 "task.cu"
"#;

pub struct Program {
    source: String,
    log: String,
    code: Vec<u8>,
    /// What the code is for, `sm_90a` or `compute_90`.
    architecture: String,
}

static COMPILED: AtomicU64 = AtomicU64::new(0);

/// The names after `__global__ void`.
fn kernels(source: &str) -> impl Iterator<Item = &str> {
    source.split("__global__").skip(1).filter_map(|after| {
        let name = after.trim_start().strip_prefix("void")?.trim_start();
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_')?;
        Some(&name[..end])
    })
}

/// Where this process keeps what it compiles.
fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("cuda-cluster-fake-nvrtc-{}", std::process::id()))
}

extern "C" fn at_exit() {
    // What a killed process leaves is in the test's own temporary directory.
    let _ = std::fs::remove_dir_all(folder());
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

impl Program {
    fn compile(&mut self) -> std::io::Result<bool> {
        let number = COMPILED.fetch_add(1, Ordering::Relaxed);
        let folder = folder();
        std::fs::create_dir_all(&folder)?;
        let (text, library) =
            (folder.join(format!("{number}.cpp")), folder.join(format!("{number}.so")));
        let mut source = format!("{PRELUDE}{}\n", self.source);
        for name in kernels(&self.source) {
            source.push_str(&format!(
                "extern \"C\" void *cc_pack_{name}(void **from) {{ return cc_pack({name}, from); }}\n\
                 extern \"C\" int cc_run_{name}(void *packed, const unsigned *d, \
                 void *(*reach)(void *)) {{ return cc_run({name}, packed, d, reach); }}\n\
                 extern \"C\" int cc_parameter_{name}(std::size_t index, std::size_t *offset, \
                 std::size_t *size) {{ return cc_parameter({name}, index, offset, size); }}\n"
            ));
        }
        std::fs::write(&text, source)?;
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&text);
        let output = compiler.output()?;
        self.log = String::from_utf8_lossy(&output.stderr).into_owned();
        self.code = format!("{MARK}{}\0{}\0", library.display(), self.architecture).into_bytes();
        Ok(output.status.success())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    // SAFETY: `nvrtc.h`: a C string.
    let source = unsafe { CStr::from_ptr(source) }.to_string_lossy().into_owned();
    let (log, architecture) = (String::new(), String::new());
    let made = Box::new(Program { source, log, code: Vec::new(), architecture });
    // SAFETY: `nvrtc.h`: a place for the result.
    unsafe { program.write(Box::into_raw(made)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> c_int {
    // SAFETY: `nvrtc.h`: made by `nvrtcCreateProgram`, destroyed once.
    drop(unsafe { Box::from_raw(program.read()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: `nvrtc.h`: a living program, used by one thread.
    let program = unsafe { &mut *program };
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: `nvrtc.h`: so many C strings.
        let option = unsafe { CStr::from_ptr(options.add(at).read()) }.to_string_lossy();
        if let Some(name) = option.strip_prefix("--gpu-architecture=") {
            let number = name.trim_start_matches(|c: char| !c.is_ascii_digit());
            let number = number.trim_end_matches('a').parse();
            if !number.is_ok_and(|number: c_int| architectures().contains(&number)) {
                program.log =
                    format!("nvrtc: error: invalid value for --gpu-architecture ({name})");
                return INVALID_OPTION;
            }
            name.clone_into(&mut program.architecture);
        }
    }
    match program.compile() {
        Ok(true) => SUCCESS,
        Ok(false) => COMPILATION,
        Err(error) => {
            program.log = format!("cannot run g++: {error}");
            COMPILATION
        }
    }
}

/// Gives a length, or the bytes.
unsafe fn give(bytes: &[u8], length: *mut usize, to: *mut c_void) -> c_int {
    if !length.is_null() {
        // SAFETY: `nvrtc.h`: a place for the length.
        unsafe { length.write(bytes.len()) };
    } else if !to.is_null() {
        // SAFETY: `nvrtc.h`: as much room as the length said.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    } else {
        return INVALID_INPUT;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(
    program: *const Program,
    size: *mut usize,
) -> c_int {
    // SAFETY: `nvrtc.h`: a living program; and see `give`.
    unsafe { give(format!("{}\0", (*program).log).as_bytes(), size, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, log: *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe { give(format!("{}\0", (*program).log).as_bytes(), std::ptr::null_mut(), log) }
}

/// Machine code or PTX, whichever the architecture asks for; the other is not there.
unsafe fn give_code(
    program: *const Program,
    is_ptx: bool,
    size: *mut usize,
    to: *mut c_void,
) -> c_int {
    // SAFETY: `nvrtc.h`: a living program.
    let program = unsafe { &*program };
    if program.architecture.starts_with("compute_") != is_ptx {
        return INVALID_INPUT;
    }
    // SAFETY: see `give`.
    unsafe { give(&program.code, size, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *const Program, size: *mut usize) -> c_int {
    // SAFETY: as above.
    unsafe { give_code(program, false, size, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *const Program, code: *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe { give_code(program, false, std::ptr::null_mut(), code) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTXSize(program: *const Program, size: *mut usize) -> c_int {
    // SAFETY: as above.
    unsafe { give_code(program, true, size, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTX(program: *const Program, code: *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe { give_code(program, true, std::ptr::null_mut(), code) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"NVRTC_SUCCESS",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        _ => c"NVRTC_ERROR_INVALID_INPUT",
    }
    .as_ptr()
}
