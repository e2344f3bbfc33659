//! Kernels on a GPU: machine code is loaded once per source, and each thread has its own stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, PoisonError};

use super::{DriverDevice, INVALID_VALUE};
use crate::cuda::kernel::{Kernel, Parameter, Slot, slots};
use crate::cuda::{Device, DeviceBuffer, Error, Memory, nvrtc};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];

/// The most bytes that the parameters of a kernel have together (CUDA C++ Programming Guide,
/// "Function Parameters"), so also the most parameters.
const PARAMETER_BYTES: usize = 32_764;

/// The shared memory of a launch that a function may have without asking for it (CUDA C++
/// Programming Guide, "Shared Memory").
const USUAL_SHARED_BYTES: u32 = 48 << 10;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const SHARED_BYTES: c_int = 8;

/// `cuFuncGetParamInfo`: function, index; offset and size of that parameter.
pub(super) type ParameterInfo =
    unsafe extern "C" fn(*mut c_void, usize, *mut usize, *mut usize) -> c_int;

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
    /// The source is trusted: it can write to any GPU memory of the process. With a driver older
    /// than CUDA 12.4, which does not tell what parameters a kernel has, missing ones are zero.
    ///
    /// # Errors
    /// If the device is simulated, a parameter's memory is on another device, there is no libnvrtc,
    /// the source does not compile, the kernel takes other parameters, or the driver refuses.
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
    fn launch(device: &Arc<Self>, kernel: &Kernel, slots: &[Slot]) -> Result<(), Error> {
        device.make_current()?;
        let function = device.function(kernel)?;
        if kernel.shared_bytes > USUAL_SHARED_BYTES {
            let bytes = c_int::try_from(kernel.shared_bytes).unwrap_or(c_int::MAX);
            // SAFETY: a function of a loaded module of this context.
            let allowed =
                unsafe { (device.functions.cuFuncSetAttribute)(function, SHARED_BYTES, bytes) };
            device.check("cuFuncSetAttribute", allowed)?;
        }
        let stream = Self::stream(device)?;
        // The driver reads as many pointers, and behind each as many bytes, as the function
        // declares. If it does not tell how many, all that a function can declare are readable.
        let spare = match device.parameter_info {
            Some(info) => {
                device.check_parameters(info, kernel, function, slots)?;
                0
            }
            None => PARAMETER_BYTES,
        };
        let mut values: Vec<u64> =
            slots.iter().map(|slot| u64::from_ne_bytes(slot.bytes)).collect();
        values.resize(slots.len() + spare.div_ceil(size_of::<u64>()), 0);
        let missing = values.get(slots.len()).map(std::ptr::from_ref);
        let mut pointers: Vec<*const u64> =
            values[..slots.len()].iter().map(std::ptr::from_ref).collect();
        pointers.extend(missing.into_iter().cycle().take(spare));
        let ([gx, gy, gz], [bx, by, bz]) = (kernel.grid, kernel.block);
        // SAFETY: the function belongs to a loaded module of this context; for each parameter that
        // it declares there is a pointer to as many readable bytes as that has: checked above, or
        // all that the limit of CUDA allows.
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

    /// Refuses values that are not what the function takes.
    fn check_parameters(
        &self,
        info: ParameterInfo,
        kernel: &Kernel,
        function: *mut c_void,
        slots: &[Slot],
    ) -> Result<(), Error> {
        let (mut takes, mut wrong) = (0, None);
        while takes <= PARAMETER_BYTES {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: a function of a loaded module, and places for the results.
            let result = unsafe { info(function, takes, &raw mut offset, &raw mut size) };
            if result == INVALID_VALUE {
                break; // The index is not less than the number of parameters.
            }
            self.check("cuFuncGetParamInfo", result)?;
            if let Some(slot) = slots.get(takes).filter(|slot| !slot.fits(size)) {
                wrong = wrong.or(Some((takes + 1, size, slot.size)));
            }
            takes += 1;
        }
        let function = || kernel.function.clone();
        if takes != slots.len() {
            return Err(Error::ParameterCount { function: function(), takes, given: slots.len() });
        }
        wrong.map_or(Ok(()), |(number, takes_bytes, given_bytes)| {
            Err(Error::ParameterSize { function: function(), number, takes_bytes, given_bytes })
        })
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
        let code = nvrtc::compile(source, self.capability()?, self.version()?)?;
        let mut module: *mut c_void = null_mut();
        // SAFETY: a place for the result, and an image that says its own length.
        let loaded =
            unsafe { (self.functions.cuModuleLoadData)(&raw mut module, code.as_ptr().cast()) };
        self.check("cuModuleLoadData", loaded)?;
        modules.insert(hash, module.expose_provenance());
        Ok(module)
    }

    /// The compiler that kernels for this GPU are made with, and what it makes.
    pub fn compiler(&self) -> Result<String, Error> {
        nvrtc::compiler(self.capability()?, self.version()?)
    }

    /// The driver's version of CUDA: 12080 for 12.8.
    fn version(&self) -> Result<c_int, Error> {
        let mut version = 0;
        // SAFETY: a place for the result.
        let asked = unsafe { (self.functions.cuDriverGetVersion)(&raw mut version) };
        self.check("cuDriverGetVersion", asked)?;
        Ok(version)
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
