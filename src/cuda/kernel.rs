//! CUDA C++ as a value: a kernel and its parameters. Prepares the launch; the driver runs it.

use serde::{Deserialize, Serialize};

use super::DeviceBuffer;

/// A kernel: CUDA C++ source with an `extern "C" __global__` function, and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The source, compiled on the worker for its GPU when it is first used there.
    pub source: String,
    /// The function's name.
    pub function: String,
    /// Blocks, in three dimensions.
    pub grid: [u32; 3],
    /// Threads of a block, in three dimensions.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// A parameter of a kernel that is no pointer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Scalar {
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `unsigned long long`, `size_t`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl Scalar {
    /// The parameter's bytes at the beginning of eight, as the driver reads them.
    fn slot(self) -> [u8; 8] {
        let mut slot = [0; 8];
        match self {
            Scalar::I32(value) => slot[..4].copy_from_slice(&value.to_ne_bytes()),
            Scalar::U32(value) => slot[..4].copy_from_slice(&value.to_ne_bytes()),
            Scalar::F32(value) => slot[..4].copy_from_slice(&value.to_ne_bytes()),
            Scalar::I64(value) => slot = value.to_ne_bytes(),
            Scalar::U64(value) => slot = value.to_ne_bytes(),
            Scalar::F64(value) => slot = value.to_ne_bytes(),
        }
        slot
    }
}

/// A parameter of a kernel.
#[derive(Debug)]
pub enum Parameter<'a> {
    /// Memory that it reads, as a pointer.
    In(&'a DeviceBuffer),
    /// Memory that it writes, as a pointer.
    Out(&'a mut DeviceBuffer),
    Value(Scalar),
}

/// The slots that the driver's launch is given pointers to.
pub(super) fn slots(parameters: &mut [Parameter<'_>]) -> Vec<[u8; 8]> {
    let address = |pointer: usize| (pointer as u64).to_ne_bytes();
    parameters
        .iter_mut()
        .map(|parameter| match parameter {
            Parameter::In(buffer) => address(buffer.pointer().expose_provenance()),
            Parameter::Out(buffer) => address(buffer.pointer_mut().expose_provenance()),
            Parameter::Value(scalar) => scalar.slot(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Device;

    #[test]
    fn parameters_lie_as_the_driver_reads_them() {
        let device = Device::simulated("simulated", 100);
        let (input, mut output) =
            (device.allocate(8).expect("room"), device.allocate(4).expect("room"));
        let pointers = [input.pointer().addr(), output.pointer().addr()];
        let slots = slots(&mut [
            Parameter::In(&input),
            Parameter::Out(&mut output),
            Parameter::Value(Scalar::F32(1.5)),
            Parameter::Value(Scalar::I32(-1)),
            Parameter::Value(Scalar::U64(1 << 40)),
        ]);
        for (slot, pointer) in slots.iter().zip(pointers) {
            assert_eq!(usize::from_ne_bytes(*slot), pointer);
        }
        assert_eq!(slots[2][..4], 1.5f32.to_ne_bytes());
        assert_eq!(slots[3][..4], (-1i32).to_ne_bytes());
        assert_eq!(u64::from_ne_bytes(slots[4]), 1 << 40);
    }

    #[test]
    fn a_simulated_device_says_that_it_runs_no_kernels() {
        let kernel = Kernel {
            source: String::new(),
            function: "f".to_owned(),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
        };
        let error = Device::simulated("simulated GPU 0", 100).run(&kernel, &mut []);
        let error = error.expect_err("there is no GPU").to_string();
        assert_eq!(error, "simulated GPU 0 is not a GPU: it cannot run CUDA C++");
    }
}
