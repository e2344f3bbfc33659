//! What a program may ask for and does not get here; each is counted where it is refused.

use std::ffi::c_int;

use crate::codes::{INVALID_VALUE, NOT_SUPPORTED};
use crate::driver::call;

macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            call(stringify!($name), |_| Err(NOT_SUPPORTED))
        }
    )*};
}

refused! {
    cuMemAddressFree
    cuMemAddressReserve
    cuMemCreate
    cuMemExportToShareableHandle
    cuMemGetAllocationGranularity
    cuMemGetAllocationPropertiesFromHandle
    cuMemGetHandleForAddressRange
    cuMemImportFromShareableHandle
    cuMemPoolDestroy
    cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle
    cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer
    cuMemPoolSetAccess
    cuMemRangeGetAttribute
    cuMemRelease
    cuMemSetAccess
}

/// "Not memory of the virtual memory management."
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRetainAllocationHandle() -> c_int {
    call("cuMemRetainAllocationHandle", |_| Err(INVALID_VALUE))
}

/// NVRTC wants it to exist, and to have nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetExportTable(table: *mut usize, _id: *const u8) -> c_int {
    if !table.is_null() {
        // SAFETY: see `lib.rs`.
        unsafe { table.write(0) };
    }
    crate::codes::NOT_FOUND
}
