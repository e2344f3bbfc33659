//! Device memory: the CUDA driver, opened at run time, or a simulated device in host memory.
//!
//! Does not launch kernels.
//!
//! *Invariant:* a device buffer is freed on the device that it was allocated on, once.
