//! The types and functions of libpmix that a server uses, opened at run time.
//!
//! Layouts and numbers are those of the PMIx standard 4.1, sections 3.2, 3.5 and 16.3, compared
//! with OpenPMIx's headers `pmix_common.h` and `pmix_server.h` of 3.2.4, 4.2.2, 5.0.11 and 6.1.0:
//! the same in all of them. The table of a server's functions only grows at its end; those that are
//! used stand before what differs.
//!
//! *Invariant:* every layout below is asserted, and no function is called that was not found.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// `pmix_status_t`, `PMIX_SUCCESS`.
pub(super) const SUCCESS: c_int = 0;
/// The request was done at once, and nothing is called back.
pub(super) const OPERATION_SUCCEEDED: c_int = -157;

/// `pmix_data_type_t`.
const BOOL: u16 = 1;
const STRING: u16 = 3;
const UINT16: u16 = 13;
const UINT32: u16 = 14;
const INFO: u16 = 24;
const DATA_ARRAY: u16 = 39;
const PROC_RANK: u16 = 40;

/// `PMIX_MAX_NSLEN`, without the byte that ends it.
pub(super) const LONGEST_NAME: usize = 255;

/// `pmix_proc_t`.
#[repr(C)]
pub(super) struct Proc {
    nspace: [c_char; LONGEST_NAME + 1],
    rank: u32,
}

/// `pmix_value_t`'s union; `envar` of three words is its largest member.
#[repr(C)]
#[derive(Clone, Copy)]
union Data {
    flag: bool,
    uint16: u16,
    uint32: u32,
    string: *mut c_char,
    array: *mut DataArray,
    largest: [u64; 3],
}

/// `pmix_value_t`.
#[repr(C)]
struct RawValue {
    kind: u16,
    data: Data,
}

/// `pmix_data_array_t`.
#[repr(C)]
struct DataArray {
    kind: u16,
    size: usize,
    array: *mut c_void,
}

/// `pmix_info_t`.
#[repr(C)]
pub(super) struct Info {
    key: [c_char; 512],
    flags: u32,
    value: RawValue,
}

/// `pmix_server_module_t`, with room for functions that later versions may add.
#[repr(C)]
pub(super) struct Module([*const c_void; 64]);

const _: () = assert!(size_of::<Proc>() == 260 && size_of::<RawValue>() == 32);
const _: () = assert!(size_of::<Info>() == 552 && size_of::<DataArray>() == 24);

/// A value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Yes,
    Small(u16),
    Number(u32),
    Rank(u32),
    Text(String),
    Attributes(Vec<Attribute>),
}

/// An attribute's key, which the standard gives, with its value.
pub(super) type Attribute = (&'static str, Value);

type Completed = extern "C" fn(c_int, *mut c_void);
type Exchanged = extern "C" fn(
    c_int,
    *const c_char,
    usize,
    *mut c_void,
    Option<extern "C" fn(*mut c_void)>,
    *mut c_void,
);
type Abort = extern "C" fn(
    *const Proc,
    *mut c_void,
    c_int,
    *const c_char,
    *const Proc,
    usize,
    Option<Completed>,
    *mut c_void,
) -> c_int;
type Fence = extern "C" fn(
    *const Proc,
    usize,
    *const Info,
    usize,
    *mut c_char,
    usize,
    Option<Exchanged>,
    *mut c_void,
) -> c_int;
type RegisterEvents =
    extern "C" fn(*const c_int, usize, *const Info, usize, Option<Completed>, *mut c_void) -> c_int;
type DeregisterEvents = extern "C" fn(*const c_int, usize, Option<Completed>, *mut c_void) -> c_int;
type Notify = extern "C" fn(
    c_int,
    *const Proc,
    u8,
    *const Info,
    usize,
    Option<Completed>,
    *mut c_void,
) -> c_int;
type JobControl = extern "C" fn(
    *const Proc,
    *const Proc,
    usize,
    *const Info,
    usize,
    *const c_void,
    *mut c_void,
) -> c_int;

/// A rank aborts: it ends with its status next, and thereby the job.
extern "C" fn abort(
    _: *const Proc,
    _: *mut c_void,
    _: c_int,
    _: *const c_char,
    _: *const Proc,
    _: usize,
    _: Option<Completed>,
    _: *mut c_void,
) -> c_int {
    OPERATION_SUCCEEDED
}

/// All ranks of a machine have come to a fence, and there is no other machine. The library mostly
/// ends such a fence by itself; it asks when a rank has gone meanwhile.
extern "C" fn fence(
    _: *const Proc,
    _: usize,
    _: *const Info,
    _: usize,
    data: *mut c_char,
    length: usize,
    exchanged: Option<Exchanged>,
    of_library: *mut c_void,
) -> c_int {
    if let Some(exchanged) = exchanged {
        // It passes the answer to its own thread, so it can be called from here
        // (`pmix_server_fence`); the data stay ours, and are few.
        exchanged(SUCCESS, data, length, of_library, None, null_mut());
    }
    SUCCESS
}

extern "C" fn register_events(
    _: *const c_int,
    _: usize,
    _: *const Info,
    _: usize,
    _: Option<Completed>,
    _: *mut c_void,
) -> c_int {
    OPERATION_SUCCEEDED
}

extern "C" fn deregister_events(
    _: *const c_int,
    _: usize,
    _: Option<Completed>,
    _: *mut c_void,
) -> c_int {
    OPERATION_SUCCEEDED
}

/// Ranks of this machine are told by the library; there are no others.
extern "C" fn notify(
    _: c_int,
    _: *const Proc,
    _: u8,
    _: *const Info,
    _: usize,
    _: Option<Completed>,
    _: *mut c_void,
) -> c_int {
    OPERATION_SUCCEEDED
}

/// Files that the library is to remove at a rank's end it notes itself, if there is such a
/// function at all (`pmix_server_job_ctrl`); nothing else is controlled.
extern "C" fn job_control(
    _: *const Proc,
    _: *const Proc,
    _: usize,
    _: *const Info,
    _: usize,
    _: *const c_void,
    _: *mut c_void,
) -> c_int {
    OPERATION_SUCCEEDED
}

/// What this server answers itself. The library says of all else that it is not supported:
/// starting more processes, connecting jobs, published names, groups.
fn module() -> Module {
    let mut functions = [std::ptr::null(); 64];
    functions[2] = abort as Abort as *const c_void;
    functions[3] = fence as Fence as *const c_void;
    functions[11] = register_events as RegisterEvents as *const c_void;
    functions[12] = deregister_events as DeregisterEvents as *const c_void;
    functions[14] = notify as Notify as *const c_void;
    functions[19] = job_control as JobControl as *const c_void;
    Module(functions)
}

/// Why libpmix can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum PmixError {
    #[error("{}: {source}", path.display())]
    Open { path: PathBuf, source: libloading::Error },
    #[error("{} is {version}; needed is version 3 or newer", path.display())]
    Old { path: PathBuf, version: String },
    #[error("{function} of libpmix failed with status {status}{said}")]
    Refused { function: &'static str, status: c_int, said: String },
    #[error("{0:?} has a zero byte")]
    Zero(String),
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// An opened libpmix.
        pub(super) struct Pmix {
            /// Never closed: its threads run in it.
            _library: std::mem::ManuallyDrop<Library>,
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Pmix {
            fn of(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the headers that the module's documentation names.
                unsafe {
                    Ok(Self {
                        $($field: *library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                            concat!($name, "\0").as_bytes(),
                        )?,)*
                        _library: std::mem::ManuallyDrop::new(library),
                    })
                }
            }
        }
    };
}

functions! {
    get_version = "PMIx_Get_version": fn() -> *const c_char;
    error_string = "PMIx_Error_string": fn(c_int) -> *const c_char;
    server_init = "PMIx_server_init": fn(*mut Module, *mut Info, usize) -> c_int;
    generate_regex = "PMIx_generate_regex": fn(*const c_char, *mut *mut c_char) -> c_int;
    generate_ppn = "PMIx_generate_ppn": fn(*const c_char, *mut *mut c_char) -> c_int;
    register_nspace = "PMIx_server_register_nspace":
        fn(*const c_char, c_int, *mut Info, usize, Option<Completed>, *mut c_void) -> c_int;
    register_client = "PMIx_server_register_client":
        fn(*const Proc, u32, u32, *mut c_void, Option<Completed>, *mut c_void) -> c_int;
    setup_fork = "PMIx_server_setup_fork": fn(*const Proc, *mut *mut *mut c_char) -> c_int;
}

impl Pmix {
    /// Opens the library, with its names for its plug-ins to see.
    pub(super) fn open(path: &Path) -> Result<Self, PmixError> {
        // SAFETY: what libpmix and the libraries that it needs do when they are loaded is what they
        // do in every Open MPI; this process does nothing else.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        let opened = library.and_then(Self::of);
        let pmix = opened.map_err(|source| PmixError::Open { path: path.to_owned(), source })?;
        let version = pmix.version();
        match major(&version) {
            Some(..3) => Err(PmixError::Old { path: path.to_owned(), version }),
            _ => Ok(pmix),
        }
    }

    /// What it calls itself: `OpenPMIx 4.2.2, repo rev: v4.2.2 (PMIx Standard: …)`.
    pub(super) fn version(&self) -> String {
        // SAFETY: takes nothing and may be called at any time; returns a text of the library.
        unsafe { text((self.get_version)()) }
    }

    /// Becomes a server.
    pub(super) fn init(&self, attributes: Vec<Attribute>) -> Result<(), PmixError> {
        let (infos, count) = leak(attributes)?;
        let module = Box::leak(Box::new(module()));
        // SAFETY: module and attributes have the layouts of the headers and stay for good.
        self.judge("PMIx_server_init", unsafe { (self.server_init)(module, infos, count) })
    }

    /// The library's short form of the names of the machines.
    pub(super) fn node_map(&self, host: &str) -> Result<String, PmixError> {
        self.short("PMIx_generate_regex", self.generate_regex, host)
    }

    /// The library's short form of the ranks on each machine.
    pub(super) fn proc_map(&self, ranks: &str) -> Result<String, PmixError> {
        self.short("PMIx_generate_ppn", self.generate_ppn, ranks)
    }

    fn short(
        &self,
        name: &'static str,
        function: unsafe extern "C" fn(*const c_char, *mut *mut c_char) -> c_int,
        long: &str,
    ) -> Result<String, PmixError> {
        let (long, mut found) = (c_text(long)?, null_mut());
        // SAFETY: a text that ends with a zero, and a place for the address of another.
        self.judge(name, unsafe { function(long.as_ptr(), &raw mut found) })?;
        // SAFETY: the library has just made it; it stays for good.
        Ok(unsafe { text(found) })
    }

    /// Tells of a job whose ranks are all on this machine, and waits until that is done.
    pub(super) fn register_job(
        &self,
        name: &str,
        ranks: u32,
        attributes: Vec<Attribute>,
    ) -> Result<(), PmixError> {
        let job = Proc::new(name, 0);
        let (infos, count) = leak(attributes)?;
        let ranks = c_int::try_from(ranks).unwrap_or(c_int::MAX);
        let nspace = job.nspace.as_ptr();
        // SAFETY: without a function to call back it returns when it is done; the attributes stay.
        let status =
            unsafe { (self.register_nspace)(nspace, ranks, infos, count, None, null_mut()) };
        self.judge("PMIx_server_register_nspace", status)
    }

    /// Expects a rank, of this process's user.
    pub(super) fn register_rank(&self, name: &str, rank: u32) -> Result<(), PmixError> {
        let proc = Proc::new(name, rank);
        let (user, group) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        // SAFETY: as for the job.
        let status = unsafe {
            (self.register_client)(&raw const proc, user, group, null_mut(), None, null_mut())
        };
        self.judge("PMIx_server_register_client", status)
    }

    /// The variables by which a rank finds this server, as `NAME=value`.
    pub(super) fn variables(&self, name: &str, rank: u32) -> Result<Vec<String>, PmixError> {
        let (proc, mut found) = (Proc::new(name, rank), null_mut::<*mut c_char>());
        // SAFETY: an environment may be null; the library allocates what it adds.
        let status = unsafe { (self.setup_fork)(&raw const proc, &raw mut found) };
        self.judge("PMIx_server_setup_fork", status)?;
        let mut variables = Vec::new();
        while !found.is_null() {
            // SAFETY: within the array, which a null pointer ends.
            let variable = unsafe { *found };
            if variable.is_null() {
                break;
            }
            // SAFETY: a text of that array.
            variables.push(unsafe { text(variable) });
            // SAFETY: this was not the null pointer, so there is one more.
            found = unsafe { found.add(1) };
        }
        Ok(variables)
    }

    fn judge(&self, function: &'static str, status: c_int) -> Result<(), PmixError> {
        if matches!(status, SUCCESS | OPERATION_SUCCEEDED) {
            return Ok(());
        }
        // SAFETY: takes any number and returns a text of the library.
        let said = unsafe { text((self.error_string)(status)) };
        let said = if said.is_empty() { said } else { format!(" ({said})") };
        Err(PmixError::Refused { function, status, said })
    }
}

impl Proc {
    fn new(name: &str, rank: u32) -> Self {
        let mut nspace = [0; LONGEST_NAME + 1];
        copy(name, &mut nspace);
        Self { nspace, rank }
    }
}

/// Copies as much as has room, with a zero at its end.
fn copy(text: &str, room: &mut [c_char]) {
    let most = room.len() - 1;
    for (to, from) in room[..most].iter_mut().zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
}

/// # Safety
/// `text` is null, or ends with a zero and does not change meanwhile.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn c_text(text: &str) -> Result<CString, PmixError> {
    CString::new(text).map_err(|_| PmixError::Zero(text.to_owned()))
}

/// The attributes as the library has them. They stay for good: it reads them on its own thread.
fn leak(attributes: Vec<Attribute>) -> Result<(*mut Info, usize), PmixError> {
    let infos: Result<Vec<Info>, PmixError> = attributes.into_iter().map(info).collect();
    let infos = infos?.leak();
    Ok((infos.as_mut_ptr(), infos.len()))
}

fn info((name, value): Attribute) -> Result<Info, PmixError> {
    let mut key = [0; 512];
    copy(name, &mut key);
    // Texts and arrays have a pointer in the first word, and the rest is not read.
    let mut data = Data { largest: [0; 3] };
    let kind = match value {
        Value::Yes => {
            data.flag = true;
            BOOL
        }
        Value::Small(number) => {
            data.uint16 = number;
            UINT16
        }
        Value::Number(number) => {
            data.uint32 = number;
            UINT32
        }
        Value::Rank(rank) => {
            data.uint32 = rank;
            PROC_RANK
        }
        Value::Text(text) => {
            data.string = c_text(&text)?.into_raw();
            STRING
        }
        Value::Attributes(attributes) => {
            let (infos, size) = leak(attributes)?;
            let array = DataArray { kind: INFO, size, array: infos.cast() };
            data.array = Box::leak(Box::new(array));
            DATA_ARRAY
        }
    };
    Ok(Info { key, flags: 0, value: RawValue { kind, data } })
}

/// The first number of `OpenPMIx 4.2.2, repo rev: …`.
fn major(version: &str) -> Option<u32> {
    let digits = version.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_laid_out_as_the_headers_say() {
        let inner = vec![("pmix.rank", Value::Rank(7)), ("pmix.lrank", Value::Small(3))];
        let all = vec![
            ("pmix.jobid", Value::Text("a job".to_owned())),
            ("pmix.job.size", Value::Number(8)),
            ("pmix.tdir.rmclean", Value::Yes),
            ("pmix.pdata", Value::Attributes(inner)),
        ];
        let (infos, count) = leak(all).expect("no zero bytes");
        // SAFETY: made just now, and never freed.
        let infos = unsafe { std::slice::from_raw_parts(infos, count) };
        let kinds: Vec<u16> = infos.iter().map(|info| info.value.kind).collect();
        assert_eq!(kinds, [STRING, UINT32, BOOL, DATA_ARRAY]);
        // SAFETY: each is read as what it was written as.
        unsafe {
            assert_eq!(text(infos[0].key.as_ptr()), "pmix.jobid");
            assert_eq!(text(infos[0].value.data.string), "a job");
            assert_eq!(infos[1].value.data.uint32, 8);
            assert!(infos[2].value.data.flag);
            let array = &*infos[3].value.data.array;
            assert_eq!((array.kind, array.size), (INFO, 2));
            let ranks = std::slice::from_raw_parts(array.array.cast::<Info>(), 2);
            assert_eq!((ranks[0].value.data.uint32, ranks[1].value.data.uint16), (7, 3));
        }
        assert!(leak(vec![("pmix.jobid", Value::Text("a\0b".to_owned()))]).is_err());
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(major("OpenPMIx 4.2.2, repo rev: v4.2.2 (PMIx Standard: 4.1)"), Some(4));
        assert_eq!((major("2.1.1"), major("")), (Some(2), None));
    }

    #[test]
    fn a_long_name_ends_with_a_zero() {
        let proc = Proc::new(&"x".repeat(400), 1);
        assert_eq!(
            (proc.nspace[LONGEST_NAME - 1].cast_unsigned(), proc.nspace[LONGEST_NAME]),
            (b'x', 0)
        );
    }
}
