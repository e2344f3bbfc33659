//! NVIDIA's run-time compiler (libnvrtc), opened at run time: CUDA C++ to machine code, or where it
//! has none for a GPU, to PTX, which the driver compiles.
//!
//! Does not load or run what it compiles.
//!
//! *Invariant:* what it makes is for this GPU's architecture or an older one.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use super::Error;

/// The names of the library, by the major version of CUDA that they belong to. What a newer one
/// than the driver's makes, the driver does not load.
const SONAMES: [(u32, &str); 3] =
    [(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12"), (11, "libnvrtc.so.11.2")];

/// That of development packages, of any version.
const ANY: &str = "libnvrtc.so";

/// The first version that has code for one architecture alone (`sm_90a`), with instructions that
/// others lack.
const SPECIFIC_SINCE: c_int = 12;

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
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    architectures_size: unsafe extern "C" fn(*mut c_int) -> c_int,
    architectures: unsafe extern "C" fn(*mut c_int) -> c_int,
    words: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The library, opened once for the process and never closed: the newest that is no newer than the
/// driver (`cuDriverGetVersion`), then any.
fn nvrtc(driver_version: c_int) -> Result<&'static Nvrtc, Error> {
    static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
    if let Some(nvrtc) = NVRTC.get() {
        return Ok(nvrtc);
    }
    let major = u32::try_from(driver_version / 1000).unwrap_or(0);
    let (fitting, newer): (Vec<_>, Vec<_>) =
        SONAMES.into_iter().partition(|(version, _)| *version <= major);
    let names = fitting.into_iter().chain(newer).map(|(_, name)| name).chain([ANY]);
    let folders = package_folders("lib");
    let mut last = None;
    for name in names {
        let bare = [PathBuf::from(name)];
        for path in bare.into_iter().chain(folders.iter().map(|folder| folder.join(name))) {
            // SAFETY: libnvrtc's initialisers have no preconditions.
            match unsafe { libloading::Library::new(&path) } {
                Ok(library) => {
                    // SAFETY: it is a libnvrtc by its name, and is never closed.
                    let found = unsafe { Nvrtc::find(&ManuallyDrop::new(library)) }?;
                    return Ok(NVRTC.get_or_init(|| found));
                }
                Err(error) => last = last.or(Some(error)),
            }
        }
    }
    match last {
        Some(source) => Err(Error::Driver { name: ANY, source }),
        None => Err(Error::Call { call: "dlopen", reason: "no name to try".to_owned() }),
    }
}

/// Where pip's packages of CUDA have their libraries or headers: in the site-packages beside the
/// libucp that was chosen, and of the active environment.
fn package_folders(kind: &str) -> Vec<PathBuf> {
    let beside_ucx = std::env::var_os("CUDA_CLUSTER_UCX").map(PathBuf::from);
    let beside_ucx = beside_ucx.as_deref().and_then(|path| path.ancestors().nth(3));
    let mut sites: Vec<PathBuf> = beside_ucx.map(Path::to_owned).into_iter().collect();
    for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = std::env::var_os(environment) else { continue };
        let pythons = std::fs::read_dir(Path::new(&root).join("lib")).into_iter().flatten();
        sites.extend(pythons.flatten().map(|entry| entry.path().join("site-packages")));
    }
    let parts = ["cu13", "cuda_nvrtc", "cuda_runtime"];
    let folder = |site: &PathBuf| parts.map(|part| site.join("nvidia").join(part).join(kind));
    sites.iter().flat_map(folder).filter(|folder| folder.is_dir()).collect()
}

/// Where headers like `cuda_fp16.h` may be.
fn header_folders() -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let homes = homes.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    let found = homes.map(|home| home.join("include")).filter(|folder| folder.is_dir());
    found.chain(package_folders("include")).collect()
}

/// What to compile for.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    /// Machine code: `sm_90a`.
    Code(String),
    /// PTX: `compute_90`.
    Ptx(String),
}

impl Target {
    /// The best that a compiler of this version which knows these architectures (90 for 9.0) makes
    /// for a GPU of this compute capability; `None` if all that it knows are newer.
    fn of(capability: [u32; 2], known: &[c_int], version: c_int) -> Option<Self> {
        let [major, minor] = capability;
        let own = c_int::try_from(major * 10 + minor).ok()?;
        if known.is_empty() || known.contains(&own) {
            let specific = if major >= 9 && version >= SPECIFIC_SINCE { "a" } else { "" };
            return Some(Target::Code(format!("sm_{own}{specific}")));
        }
        let older = known.iter().copied().filter(|one| *one < own).max()?;
        Some(match older / 10 == own / 10 {
            // Machine code runs on later GPUs of its generation.
            true => Target::Code(format!("sm_{older}")),
            false => Target::Ptx(format!("compute_{older}")),
        })
    }

    fn option(&self) -> String {
        let (Target::Code(name) | Target::Ptx(name)) = self;
        format!("--gpu-architecture={name}")
    }
}

impl Nvrtc {
    /// # Safety
    /// `library` must be a libnvrtc and must never be closed.
    unsafe fn find(library: &libloading::Library) -> Result<Self, Error> {
        macro_rules! get {
            ($name:literal) => {
                // SAFETY: the caller's promise; the signatures are those of nvrtc.h since 11.2.
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
            ptx_size: get!("nvrtcGetPTXSize"),
            ptx: get!("nvrtcGetPTX"),
            version: get!("nvrtcVersion"),
            architectures_size: get!("nvrtcGetNumSupportedArchs"),
            architectures: get!("nvrtcGetSupportedArchs"),
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

    /// The version of CUDA that it belongs to.
    fn version(&self) -> Result<(c_int, c_int), Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: places for the results.
        self.check("nvrtcVersion", unsafe { (self.version)(&raw mut major, &raw mut minor) })?;
        Ok((major, minor))
    }

    /// What it can compile for, for a GPU of this compute capability.
    fn target(&self, capability: [u32; 2]) -> Result<Target, Error> {
        let (major, minor) = self.version()?;
        let mut count = 0;
        // SAFETY: a place for the result.
        let result = unsafe { (self.architectures_size)(&raw mut count) };
        self.check("nvrtcGetNumSupportedArchs", result)?;
        let mut known: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: as much room as the library has just asked for.
        let result = unsafe { (self.architectures)(known.as_mut_ptr()) };
        self.check("nvrtcGetSupportedArchs", result)?;
        Target::of(capability, &known, major).ok_or_else(|| {
            let [own, part] = capability;
            let oldest = known.iter().min().copied().unwrap_or(0);
            let (oldest, rest) = (oldest / 10, oldest % 10);
            let reason = format!(
                "the compiler of CUDA {major}.{minor} makes no code for compute capability \
                 {own}.{part}, the oldest is {oldest}.{rest}: an older one is needed beside it"
            );
            Error::Call { call: "nvrtcCompileProgram", reason }
        })
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

/// The compiler for a GPU of this compute capability and a driver of this version, and what it
/// makes: `CUDA 13.0, sm_90a`.
///
/// # Errors
/// If there is no libnvrtc, or the driver would not load what it makes for the GPU.
pub(super) fn compiler(capability: [u32; 2], driver_version: c_int) -> Result<String, Error> {
    let nvrtc = nvrtc(driver_version)?;
    let (major, minor) = nvrtc.version()?;
    let target = nvrtc.target(capability)?;
    if major > driver_version / 1000 {
        let (own, part) = (driver_version / 1000, driver_version % 1000 / 10);
        let reason = format!(
            "the compiler is of CUDA {major}.{minor}, and the driver of {own}.{part}, which does \
             not load what it makes"
        );
        return Err(Error::Call { call: "nvrtcVersion", reason });
    }
    let made = match target {
        Target::Code(name) | Target::Ptx(name) => name,
    };
    Ok(format!("CUDA {major}.{minor}, {made}"))
}

/// Code for a GPU of this compute capability, and a driver of this version.
///
/// # Errors
/// If there is no libnvrtc, it makes no code for the GPU, or the source does not compile; then with
/// the compiler's messages.
pub(super) fn compile(
    source: &str,
    capability: [u32; 2],
    driver_version: c_int,
) -> Result<Vec<u8>, Error> {
    let nvrtc = nvrtc(driver_version)?;
    let target = nvrtc.target(capability)?;
    let text = |text: &str| {
        let refused = |_| Error::Call { call: "nvrtc", reason: "a NUL byte in a text".to_owned() };
        CString::new(text).map_err(refused)
    };
    let (source, name) = (text(source)?, c"task.cu");
    let mut options = vec![text(&target.option())?, text("--std=c++17")?];
    for folder in header_folders() {
        if let Some(folder) = folder.to_str() {
            options.push(text(&format!("--include-path={folder}"))?);
        }
    }
    let mut program = null_mut();
    // SAFETY: a place for the result, C strings, and no headers.
    let created = unsafe {
        (nvrtc.create)(&raw mut program, source.as_ptr(), name.as_ptr(), 0, null(), null())
    };
    nvrtc.check("nvrtcCreateProgram", created)?;
    let program = Living(nvrtc, program);
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    // SAFETY: a living program and as many C strings.
    let compiled = unsafe { (nvrtc.compile)(program.1, count, pointers.as_ptr()) };
    if compiled != SUCCESS {
        let log = nvrtc.bytes("nvrtcGetProgramLog", program.1, nvrtc.log_size, nvrtc.log)?;
        let reason = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        return Err(Error::Call { call: "nvrtcCompileProgram", reason });
    }
    match target {
        Target::Code(_) => nvrtc.bytes("nvrtcGetCUBIN", program.1, nvrtc.code_size, nvrtc.code),
        Target::Ptx(_) => nvrtc.bytes("nvrtcGetPTX", program.1, nvrtc.ptx_size, nvrtc.ptx),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_the_gpus_own_or_the_newest_that_it_runs() {
        let cuda_13 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];
        let cuda_11 = [35, 50, 60, 70, 75, 80, 86, 87, 89, 90];
        let of = |capability, known: &[c_int], version| Target::of(capability, known, version);
        let code = |name: &str| Some(Target::Code(name.to_owned()));
        assert_eq!(of([9, 0], &cuda_13, 13), code("sm_90a"));
        assert_eq!(of([12, 1], &cuda_13, 13), code("sm_121a"));
        assert_eq!(of([8, 9], &cuda_13, 13), code("sm_89"));
        assert_eq!(of([9, 0], &cuda_11, 11), code("sm_90"));
        assert_eq!(of([8, 8], &cuda_11, 11), code("sm_87"), "of the same generation");
        assert_eq!(of([12, 0], &cuda_11, 11), Some(Target::Ptx("compute_90".to_owned())));
        assert_eq!(of([7, 0], &cuda_13, 13), None);
        assert_eq!(of([7, 0], &[], 11), code("sm_70"));
    }
}
