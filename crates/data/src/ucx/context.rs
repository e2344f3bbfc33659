//! UCX's context: the library's settings and transports in this process.
//!
//! Does not read the environment itself; UCX reads its `UCX_*` variables, and the caller's settings
//! override them.
//!
//! *Invariant:* a context outlives its workers, because they hold a reference to it.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use super::Error;
use super::abi::{self, ucp_config_t, ucp_context_attr_t, ucp_context_h, ucp_params_t, zeroed};
use super::lanes;
use super::library::{Library, OLDEST};
use super::status::Status;

/// One of UCX's settings, by its variable's name without `UCX_`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Like `TLS`.
    pub name: String,
    /// Like `sm,self,tcp`.
    pub value: String,
}

impl Setting {
    /// A setting.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

/// A UCX context with active messages and wake-up.
///
/// A CUDA context that UCX is to use must be current on the calling thread beforehand.
#[derive(Clone)]
pub struct UcpContext {
    pub(super) inner: Rc<ContextInner>,
}

pub(super) struct ContextInner {
    pub(super) library: Arc<Library>,
    pub(super) raw: ucp_context_h,
    /// Whether UCX can access device memory: whether it has opened CUDA's transports.
    pub(super) reaches_devices: bool,
}

impl UcpContext {
    /// Initialises UCX with the `UCX_*` variables of the environment, overridden by `settings`.
    ///
    /// # Errors
    /// If UCX refuses a setting, finds no usable transport, or has no descriptors left, without
    /// which it ends the process.
    #[doc(alias = "ucp_init")]
    pub fn new(library: &Arc<Library>, settings: &[Setting]) -> Result<Self, Error> {
        let spare: io::Result<Vec<File>> = (0..FILES).map(|_| File::open("/dev/null")).collect();
        spare.map_err(|source| Error::System { action: "open UCX's files", source })?;
        let config = Configuration::read(library)?;
        for setting in settings {
            config.set(setting)?;
        }
        // SAFETY: a parameter structure of UCX.
        let mut params: ucp_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(ucx1_sys::ucp_params_field::UCP_PARAM_FIELD_FEATURES.0);
        params.features = u64::from(
            ucx1_sys::ucp_feature::UCP_FEATURE_AM.0 | ucx1_sys::ucp_feature::UCP_FEATURE_WAKEUP.0,
        );
        let mut raw: ucp_context_h = std::ptr::null_mut();
        // SAFETY: parameters and configuration are valid for the call; `raw` is a place for the
        // result.
        let status = unsafe {
            (library.functions.ucp_init_version)(
                OLDEST.major,
                OLDEST.minor,
                &raw const params,
                config.raw,
                &raw mut raw,
            )
        };
        Status(status).result("ucp_init")?;
        // Cleans up if the rest fails.
        let mut inner = ContextInner { library: Arc::clone(library), raw, reaches_devices: false };
        inner.reaches_devices = inner.memory_types()? & CUDA_MEMORY != 0;
        Ok(Self { inner: Rc::new(inner) })
    }

    /// What UCX has opened, `transport/device` each, in its order: `rc_mlx5/mlx5_0:1`.
    ///
    /// # Errors
    /// If the system has no memory for the text.
    #[doc(alias = "ucp_context_print_info")]
    pub fn resources(&self) -> Result<Vec<String>, Error> {
        // SAFETY: a live context and the stream that `printed` opened.
        let text = printed(|stream| unsafe {
            (self.inner.library.functions.ucp_context_print_info)(self.inner.raw, stream);
        })?;
        Ok(lanes::parse_resources(&text))
    }

    /// The library behind the context.
    pub fn library(&self) -> &Arc<Library> {
        &self.inner.library
    }
}

/// Descriptors that UCX opens at once, and some to spare. It opens more with its worker.
const FILES: usize = 24;

/// CUDA's device memory among the types of memory (`ucs_memory_type_t`).
const CUDA_MEMORY: u64 = 1 << ucx1_sys::ucs_memory_type_t::UCS_MEMORY_TYPE_CUDA as u32;

impl ContextInner {
    /// The types of memory that the transports in use can access, a bit each.
    #[doc(alias = "ucp_context_query")]
    fn memory_types(&self) -> Result<u64, Error> {
        use ucx1_sys::ucp_context_attr_field as field;
        // SAFETY: a structure of UCX; zero is a value of each field.
        let mut attributes: ucp_context_attr_t = unsafe { zeroed() };
        attributes.field_mask = u64::from(field::UCP_ATTR_FIELD_MEMORY_TYPES.0);
        // SAFETY: a live context; UCX writes the requested field only.
        let status =
            unsafe { (self.library.functions.ucp_context_query)(self.raw, &raw mut attributes) };
        Status(status).result("ucp_context_query")?;
        Ok(attributes.memory_types)
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: every worker of the context holds it, so none is left.
        unsafe { (self.library.functions.ucp_cleanup)(self.raw) };
    }
}

/// UCX's configuration, from its variables.
struct Configuration<'a> {
    functions: &'a abi::Functions,
    raw: *mut ucp_config_t,
}

impl<'a> Configuration<'a> {
    #[doc(alias = "ucp_config_read")]
    fn read(library: &'a Library) -> Result<Self, Error> {
        let functions = &library.functions;
        let mut raw = std::ptr::null_mut();
        // SAFETY: no prefix and no file; `raw` is a place for the result.
        let status = unsafe {
            (functions.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut raw)
        };
        Status(status).result("ucp_config_read")?;
        Ok(Self { functions, raw })
    }

    #[doc(alias = "ucp_config_modify")]
    fn set(&self, setting: &Setting) -> Result<(), Error> {
        let refused = |status| Error::Setting {
            name: setting.name.clone(),
            value: setting.value.clone(),
            status,
        };
        // UCX's code for an invalid parameter; a NUL byte in a text is one.
        let text = |text: &str| CString::new(text).map_err(|_| refused(Status(-5)));
        let (name, value) = (text(&setting.name)?, text(&setting.value)?);
        // SAFETY: a configuration from `ucp_config_read` and two C strings, which UCX copies.
        let status =
            unsafe { (self.functions.ucp_config_modify)(self.raw, name.as_ptr(), value.as_ptr()) };
        let status = Status(status);
        if status.is_error() { Err(refused(status)) } else { Ok(()) }
    }
}

impl Drop for Configuration<'_> {
    fn drop(&mut self) {
        // SAFETY: from `ucp_config_read`, released once.
        unsafe { (self.functions.ucp_config_release)(self.raw) };
    }
}

/// What `print` writes to the stream it gets, because UCX describes itself only to streams.
///
/// # Errors
/// If the system has no memory for the text.
pub(super) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Result<String, Error> {
    let system = |action| Error::System { action, source: io::Error::last_os_error() };
    let (mut text, mut length) = (std::ptr::null_mut(), 0usize);
    // SAFETY: two places that stay valid until the stream is closed.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut length) };
    if stream.is_null() {
        return Err(system("open a stream in memory"));
    }
    print(stream);
    // SAFETY: the stream is open, and is not used after this.
    if unsafe { libc::fclose(stream) } != 0 || text.is_null() {
        return Err(system("close a stream in memory"));
    }
    // SAFETY: a closed memory stream leaves a C string.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the caller of `open_memstream` frees the text, once.
    unsafe { libc::free(text.cast()) };
    Ok(copy)
}
