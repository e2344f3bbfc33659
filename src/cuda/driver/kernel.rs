//! Kernels on a GPU: machine code is loaded once per source, and each thread has its own stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, PoisonError};

use super::DriverDevice;
use crate::cuda::kernel::{Kernel, Parameter, slots};
use crate::cuda::{Device, DeviceBuffer, Error, Memory, nvrtc};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];

/// `CUmodule`s by the hash of their source, as addresses. They live as long as the process.
pub(super) type Modules = HashMap<[u8; 32], usize>;

/// A stream of one thread on one device.
struct Stream {
    device: Arc<DriverDevice>,
    stream: *mut c_void,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: created once by this thread, and not used after this.
            let _ = unsafe { (self.device.functions.cuStreamDestroy_v2)(self.stream) };
        }
    }
}

thread_local! {
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

impl Device {
    /// Runs a kernel on this thread's stream, and waits for its end.
    ///
    /// The source is trusted: it can write to any GPU memory of the process.
    ///
    /// # Errors
    /// If the device is simulated, a parameter's memory is on another device, there is no libnvrtc,
    /// the source does not compile, or the driver refuses.
    pub fn run(&self, kernel: &Kernel, parameters: &mut [Parameter<'_>]) -> Result<(), Error> {
        let Device::Driver(device) = self else {
            return Err(Error::Simulated { device: self.name().to_owned() });
        };
        let is_own = |buffer: &DeviceBuffer| match &buffer.memory {
            Memory::Driver(memory) => std::ptr::eq(memory.device(), Arc::as_ptr(device)),
            Memory::Simulated(_) | Memory::Foreign(_) => false,
        };
        let own = parameters.iter().all(|parameter| match parameter {
            Parameter::In(buffer) => is_own(buffer),
            Parameter::Out(buffer) => is_own(buffer),
            Parameter::Value(_) => true,
        });
        if !own {
            let reason = "a parameter lies on another device".to_owned();
            return Err(Error::Call { call: "cuLaunchKernel", reason });
        }
        DriverDevice::launch(device, kernel, &slots(parameters))
    }
}

impl DriverDevice {
    /// Runs a kernel on the calling thread's stream and waits for its end.
    fn launch(device: &Arc<Self>, kernel: &Kernel, slots: &[[u8; 8]]) -> Result<(), Error> {
        device.make_current()?;
        let function = device.function(kernel)?;
        let stream = Self::stream(device)?;
        let slots: Vec<u64> = slots.iter().map(|slot| u64::from_ne_bytes(*slot)).collect();
        let mut pointers: Vec<*const u64> = slots.iter().map(std::ptr::from_ref).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (kernel.grid, kernel.block);
        // SAFETY: the function belongs to a loaded module of this context; each parameter is given
        // as eight readable bytes, of which the driver copies as many as the function declares.
        let launched = unsafe {
            (device.functions.cuLaunchKernel)(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                kernel.shared_bytes,
                stream,
                pointers.as_mut_ptr().cast(),
                null_mut(),
            )
        };
        device.check("cuLaunchKernel", launched)?;
        // SAFETY: a living stream of this context.
        let ended = unsafe { (device.functions.cuStreamSynchronize)(stream) };
        device.check("cuStreamSynchronize", ended)
    }

    /// This thread's stream. It waits for the default stream, on which copies run.
    fn stream(device: &Arc<Self>) -> Result<*mut c_void, Error> {
        STREAM.with_borrow_mut(|known| {
            if let Some(Stream { device: of, stream }) = known
                && Arc::ptr_eq(of, device)
            {
                return Ok(*stream);
            }
            let mut stream = null_mut();
            // SAFETY: a place for the result; 0 is `CU_STREAM_DEFAULT`.
            let made = unsafe { (device.functions.cuStreamCreate)(&raw mut stream, 0) };
            device.check("cuStreamCreate", made)?;
            *known = Some(Stream { device: Arc::clone(device), stream });
            Ok(stream)
        })
    }

    fn function(&self, kernel: &Kernel) -> Result<*mut c_void, Error> {
        let module = self.module(&kernel.source)?;
        let name = CString::new(kernel.function.as_str()).map_err(|_| Error::Call {
            call: "cuModuleGetFunction",
            reason: "a NUL byte in the name".to_owned(),
        })?;
        let mut function = null_mut();
        // SAFETY: a place for the result, a loaded module, and a C string.
        let found = unsafe {
            (self.functions.cuModuleGetFunction)(&raw mut function, module, name.as_ptr())
        };
        self.check("cuModuleGetFunction", found)?;
        Ok(function)
    }

    /// The loaded machine code of a source, compiled if necessary.
    fn module(&self, source: &str) -> Result<*mut c_void, Error> {
        let hash = *blake3::hash(source.as_bytes()).as_bytes();
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&hash) {
            return Ok(std::ptr::with_exposed_provenance_mut(*module));
        }
        let [major, minor] = self.capability()?;
        let code = nvrtc::compile(source, major, minor)?;
        let mut module: *mut c_void = null_mut();
        // SAFETY: a place for the result, and an image that says its own length.
        let loaded =
            unsafe { (self.functions.cuModuleLoadData)(&raw mut module, code.as_ptr().cast()) };
        self.check("cuModuleLoadData", loaded)?;
        modules.insert(hash, module.expose_provenance());
        Ok(module)
    }

    fn capability(&self) -> Result<[u32; 2], Error> {
        let mut capability = [0; 2];
        for (at, attribute) in CAPABILITY.into_iter().enumerate() {
            let mut value = 0;
            // SAFETY: a place for the result, and a device of the driver.
            let asked = unsafe {
                (self.functions.cuDeviceGetAttribute)(&raw mut value, attribute, self.device)
            };
            self.check("cuDeviceGetAttribute", asked)?;
            capability[at] = u32::try_from(value).unwrap_or_default();
        }
        Ok(capability)
    }
}
