//! Numbers as the bytes of objects, in this machine's order: objects stay on one machine.
//!
//! *Invariant:* bytes are read as whole numbers or not at all.

use std::any::type_name;
use std::borrow::Cow;

use super::value::ValueError;

mod sealed {
    /// Any bytes are a value of such a type, and it has no padding.
    pub trait Plain: bytemuck::Pod {}
}

/// A number that objects can hold without being encoded.
pub trait Number: Copy + Default + Send + sealed::Plain {}

macro_rules! numbers {
    ($($number:ty)*) => {
        $(impl sealed::Plain for $number {}
        impl Number for $number {})*
    };
}

numbers!(f32 f64 i8 i16 i32 i64 u8 u16 u32 u64);

/// The bytes of numbers, without a copy.
pub fn bytes<N: Number>(numbers: &[N]) -> &[u8] {
    bytemuck::cast_slice(numbers)
}

/// The bytes as numbers, without a copy if they are aligned.
///
/// # Errors
/// If they are not whole numbers.
pub fn read<N: Number>(bytes: &[u8]) -> Result<Cow<'_, [N]>, ValueError> {
    if !bytes.len().is_multiple_of(size_of::<N>()) {
        let (length, size) = (bytes.len(), size_of::<N>());
        let reason = format!("{length} bytes are not whole numbers of {size} bytes");
        return Err(ValueError::Type { expected: type_name::<[N]>(), reason });
    }
    Ok(match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) => Cow::Borrowed(numbers),
        Err(_) => {
            let mut numbers = vec![N::default(); bytes.len() / size_of::<N>()];
            bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
            Cow::Owned(numbers)
        }
    })
}

/// The bytes as numbers to be written; `None` if they are not aligned or not whole numbers.
pub fn in_place<N: Number>(bytes: &mut [u8]) -> Option<&mut [N]> {
    bytemuck::try_cast_slice_mut(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_wherever_their_bytes_lie() {
        let numbers = [1.5f32, -2.0, f32::MAX];
        let mut shifted = vec![0];
        shifted.extend(bytes(&numbers));
        assert_eq!(read::<f32>(bytes(&numbers)).expect("aligned"), &numbers[..]);
        assert_eq!(read::<f32>(&shifted[1..]).expect("copied"), &numbers[..]);
    }

    #[test]
    fn a_part_of_a_number_is_an_error() {
        let error = read::<f64>(&[0; 12]).expect_err("one and a half");
        assert!(error.to_string().contains("12 bytes are not whole numbers of 8 bytes"), "{error}");
    }
}
