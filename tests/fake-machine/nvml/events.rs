//! Events of GPUs: Xid errors, from the file that the part `xids=` of the faults names. Each of its
//! lines is a GPU's index and a number; what is appended is reported to whoever waits.
//!
//! *Invariant:* a set reports each line once, and only those of GPUs that were registered in it.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

use crate::abi::Return;
use crate::{Fake, Handle, device, fake, handle, system};

/// `nvmlEventTypeXidCriticalError`.
const XID: c_ulonglong = 0x8;

/// What `nvmlEventSet_t` points to.
pub struct Set {
    registered: Vec<Handle>,
    read: usize,
}

/// `nvmlEventData_t`.
#[repr(C)]
pub struct EventData {
    device: Handle,
    eventType: c_ulonglong,
    eventData: c_ulonglong,
    gpuInstanceId: c_uint,
    computeInstanceId: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut *mut Set) -> Return {
    system("nvmlEventSetCreate", |_| {
        let new = Box::new(Set { registered: Vec::new(), read: 0 });
        // SAFETY: NVML's contract: `set` points to a set's handle.
        unsafe { set.write(Box::into_raw(new)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetFree(set: *mut Set) -> Return {
    // SAFETY: NVML's contract: `set` came from `nvmlEventSetCreate`, and is freed once.
    drop(unsafe { Box::from_raw(set) });
    Return::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceRegisterEvents(
    at: Handle,
    events: c_ulonglong,
    set: *mut Set,
) -> Return {
    device("nvmlDeviceRegisterEvents", at, |_, _| {
        if events != XID {
            return Err(Return::NotSupported);
        }
        // SAFETY: NVML's contract: `set` is a set that no other thread uses now.
        unsafe { &mut *set }.registered.push(at);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    set: *mut Set,
    data: *mut EventData,
    timeout_ms: c_uint,
) -> Return {
    let until = Instant::now() + Duration::from_millis(timeout_ms.into());
    // SAFETY: NVML's contract: `set` is a set that no other thread uses now.
    let set = unsafe { &mut *set };
    loop {
        match fake().map(|fake| set.next(fake)) {
            Err(error) => return error,
            Ok(Some(event)) => {
                // SAFETY: NVML's contract: `data` points to an event.
                unsafe { data.write(event) };
                return Return::Success;
            }
            Ok(None) if Instant::now() >= until => return Return::Timeout,
            Ok(None) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

impl Set {
    /// The next complete line of the file that concerns a registered GPU.
    fn next(&mut self, fake: &'static Fake) -> Option<EventData> {
        let text = std::fs::read_to_string(fake.faults.xids.as_ref()?).ok()?;
        loop {
            let line = text.get(self.read..)?.split_inclusive('\n').next()?.strip_suffix('\n')?;
            self.read += line.len() + 1;
            let (gpu, xid) = line.split_once(' ')?;
            let gpu: u32 = gpu.parse().ok()?;
            let position = fake.machine.gpus.iter().position(|other| other.index == gpu)?;
            let at = handle(position, None);
            if self.registered.contains(&at) {
                return Some(EventData {
                    device: at,
                    eventType: XID,
                    eventData: xid.parse().ok()?,
                    gpuInstanceId: c_uint::MAX,
                    computeInstanceId: c_uint::MAX,
                });
            }
        }
    }
}
