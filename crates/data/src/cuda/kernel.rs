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

/// A parameter of a kernel that is no pointer. An `I32` or `U32` may also be given for a narrower
/// type, such as `bool`; every other value must have the size that the kernel declares.
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
    fn slot(self) -> Slot {
        let narrows = matches!(self, Scalar::I32(_) | Scalar::U32(_));
        let four = |value: [u8; 4]| Slot { bytes: low(value), size: 4, narrows };
        let eight = |bytes| Slot { bytes, size: 8, narrows };
        match self {
            Scalar::I32(value) => four(value.to_ne_bytes()),
            Scalar::U32(value) => four(value.to_ne_bytes()),
            Scalar::F32(value) => four(value.to_ne_bytes()),
            Scalar::I64(value) => eight(value.to_ne_bytes()),
            Scalar::U64(value) => eight(value.to_ne_bytes()),
            Scalar::F64(value) => eight(value.to_ne_bytes()),
        }
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

/// Four bytes at the beginning of eight.
fn low(value: [u8; 4]) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&value);
    bytes
}

/// A parameter's value, to which the driver's launch is given a pointer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// The value at the beginning, then zeros.
    pub(super) bytes: [u8; 8],
    /// Its size in bytes.
    pub(super) size: usize,
    /// Whether its first bytes alone are the same number.
    narrows: bool,
}

impl Slot {
    /// Whether it is a value for a parameter of this size.
    pub(super) fn fits(&self, declared: usize) -> bool {
        declared == self.size || (self.narrows && declared < self.size)
    }
}

/// The values of the parameters, in order.
pub(super) fn slots(parameters: &mut [Parameter<'_>]) -> Vec<Slot> {
    let address = |pointer: usize| Slot {
        bytes: (pointer as u64).to_ne_bytes(),
        size: size_of::<u64>(),
        narrows: false,
    };
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
            assert_eq!(usize::from_ne_bytes(slot.bytes), pointer);
        }
        assert_eq!(slots[2].bytes[..4], 1.5f32.to_ne_bytes());
        assert_eq!(slots[3].bytes[..4], (-1i32).to_ne_bytes());
        assert_eq!(u64::from_ne_bytes(slots[4].bytes), 1 << 40);
        let fitting = |slot: &Slot| -> Vec<usize> {
            [1, 2, 4, 8, 16].into_iter().filter(|size| slot.fits(*size)).collect()
        };
        let fitting: Vec<_> = slots.iter().map(fitting).collect();
        assert_eq!(fitting, [vec![8], vec![8], vec![4], vec![1, 2, 4], vec![8]]);
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
