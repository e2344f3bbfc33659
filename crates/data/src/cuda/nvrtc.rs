//! NVIDIA's run-time compiler (libnvrtc), opened at run time: CUDA C++ to machine code.
//!
//! Does not load or run what it compiles.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use super::Error;

/// The names of the library in CUDA 13, 12 and 11, and that of development packages.
const SONAMES: [&str; 4] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"];

/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;

/// `nvrtcProgram`.
type Program = *mut c_void;

struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    words: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The library, opened once for the process and never closed.
fn nvrtc() -> Result<&'static Nvrtc, Error> {
    static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
    if let Some(nvrtc) = NVRTC.get() {
        return Ok(nvrtc);
    }
    let mut last = None;
    for name in SONAMES {
        // SAFETY: libnvrtc's initialisers have no preconditions.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                // SAFETY: it is a libnvrtc by its name, and is never closed.
                let found = unsafe { Nvrtc::find(&ManuallyDrop::new(library)) }?;
                return Ok(NVRTC.get_or_init(|| found));
            }
            Err(error) => last = last.or(Some(error)),
        }
    }
    match last {
        Some(source) => Err(Error::Driver { name: SONAMES[0], source }),
        None => Err(Error::Call { call: "dlopen", reason: "no name to try".to_owned() }),
    }
}

impl Nvrtc {
    /// # Safety
    /// `library` must be a libnvrtc and must never be closed.
    unsafe fn find(library: &libloading::Library) -> Result<Self, Error> {
        macro_rules! get {
            ($name:literal) => {
                // SAFETY: the caller's promise; the signatures are those of nvrtc.h since 11.1.
                *unsafe { library.get($name) }
                    .map_err(|source| Error::Driver { name: $name, source })?
            };
        }
        Ok(Self {
            create: get!("nvrtcCreateProgram"),
            compile: get!("nvrtcCompileProgram"),
            destroy: get!("nvrtcDestroyProgram"),
            log_size: get!("nvrtcGetProgramLogSize"),
            log: get!("nvrtcGetProgramLog"),
            code_size: get!("nvrtcGetCUBINSize"),
            code: get!("nvrtcGetCUBIN"),
            words: get!("nvrtcGetErrorString"),
        })
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), Error> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library's texts are C strings that live as long as it.
        let words = unsafe { CStr::from_ptr((self.words)(result)) };
        Err(Error::Call { call, reason: words.to_string_lossy().into_owned() })
    }

    /// Asks for a length, and then for that many bytes.
    fn bytes(
        &self,
        call: &'static str,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, Error> {
        let mut length = 0;
        // SAFETY: a living program, and a place for the result.
        self.check(call, unsafe { size(program, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the buffer has the length that the library has just asked for.
        self.check(call, unsafe { fill(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

struct Living<'a>(&'a Nvrtc, Program);

impl Drop for Living<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, and not used after this.
        let _ = unsafe { (self.0.destroy)(&raw mut self.1) };
    }
}

/// Machine code for GPUs of this compute capability.
///
/// # Errors
/// If there is no libnvrtc, or the source does not compile; then with the compiler's messages.
pub(super) fn compile(source: &str, major: u32, minor: u32) -> Result<Vec<u8>, Error> {
    let nvrtc = nvrtc()?;
    let text = |text: &str| {
        let refused = |_| Error::Call { call: "nvrtc", reason: "a NUL byte in a text".to_owned() };
        CString::new(text).map_err(refused)
    };
    let (source, name) = (text(source)?, c"task.cu");
    let architecture = text(&format!("--gpu-architecture=sm_{major}{minor}"))?;
    let mut program = null_mut();
    // SAFETY: a place for the result, C strings, and no headers.
    let created = unsafe {
        (nvrtc.create)(&raw mut program, source.as_ptr(), name.as_ptr(), 0, null(), null())
    };
    nvrtc.check("nvrtcCreateProgram", created)?;
    let program = Living(nvrtc, program);
    let options = [architecture.as_ptr(), c"--std=c++17".as_ptr()];
    // SAFETY: a living program and two C strings.
    let compiled = unsafe { (nvrtc.compile)(program.1, 2, options.as_ptr()) };
    if compiled != SUCCESS {
        let log = nvrtc.bytes("nvrtcGetProgramLog", program.1, nvrtc.log_size, nvrtc.log)?;
        let reason = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        return Err(Error::Call { call: "nvrtcCompileProgram", reason });
    }
    nvrtc.bytes("nvrtcGetCUBIN", program.1, nvrtc.code_size, nvrtc.code)
}
