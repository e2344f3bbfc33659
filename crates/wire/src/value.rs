//! Values that clients and functions exchange: arguments and results.
//!
//! They are MessagePack, in which every value states its type and every struct names its fields. In
//! postcard, which encodes the messages themselves, a text could be read as a number. `()` and
//! `None` take no bytes: most arguments and many results are `()`, and they should need no memory.
//!
//! *Invariant:* bytes can only be read as a value of the type that was written, except that a
//! number may become one of another type that is exactly the same, and a tuple a struct with as
//! many fields.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::exact::Exact;

/// MessagePack's encoding of `()` and `None`, which stands for no bytes.
const NIL: &[u8] = &[0xc0];

/// Why a value cannot be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value cannot be encoded.
    #[error("a value cannot be written: {reason}")]
    Unwritable {
        /// The type's error.
        reason: String,
    },
    /// The bytes are not a value of this type.
    #[error("the value is not of type {expected}: {reason}")]
    Type {
        /// The type that was asked for.
        expected: &'static str,
        /// What was found instead.
        reason: String,
    },
    /// There are further bytes after such a value.
    #[error("after a {expected} there {} left over", bytes_are(*bytes))]
    LeftOver {
        /// The type that was asked for.
        expected: &'static str,
        /// How many.
        bytes: usize,
    },
}

fn bytes_are(count: usize) -> String {
    if count == 1 { "is 1 byte".to_owned() } else { format!("are {count} bytes") }
}

/// The bytes of a value.
///
/// # Errors
/// If its type cannot be encoded.
pub fn encode(value: &(impl Serialize + ?Sized)) -> Result<Vec<u8>, ValueError> {
    // Not `rmp_serde::to_vec_named`, which begins with 128 bytes: most arguments are far smaller.
    let mut bytes = Vec::new();
    rmp_serde::encode::write_named(&mut bytes, value)
        .map_err(|error| ValueError::Unwritable { reason: error.to_string() })?;
    Ok(if bytes == NIL { Vec::new() } else { bytes })
}

/// Reads a value.
///
/// # Errors
/// If the bytes are another value, or have trailing bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ValueError> {
    let expected = std::any::type_name::<T>();
    let mut rest = if bytes.is_empty() { NIL } else { bytes };
    let value = T::deserialize(Exact(&mut rmp_serde::Deserializer::new(&mut rest)))
        .map_err(|error| ValueError::Type { expected, reason: error.to_string() })?;
    match rest.len() {
        0 => Ok(value),
        bytes => Err(ValueError::LeftOver { expected, bytes }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    enum Shape {
        Point,
        Circle(f64),
        Box { width: u32, height: u32 },
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Span {
        first: u64,
        last: u64,
    }

    #[test]
    fn a_value_is_not_read_as_one_of_another_type() {
        let text = encode("text").expect("bytes");
        assert!(matches!(decode::<u64>(&text), Err(ValueError::Type { .. })));
        assert!(decode::<String>(&encode(&4u64).expect("bytes")).is_err());
        assert!(decode::<u64>(&encode(&-1i32).expect("bytes")).is_err());
        assert!(decode::<bool>(&encode(&1u8).expect("bytes")).is_err());
        assert!(decode::<(u64, u64)>(&encode(&(1u64, 2u64, 3u64)).expect("bytes")).is_err());
        let span = encode(&Span { first: 1, last: 2 }).expect("bytes");
        assert!(decode::<(u64, u64)>(&span).is_err());
        assert!(decode::<Shape>(&span).is_err());
        assert!(decode::<u64>(&[]).is_err());
    }

    #[test]
    fn a_number_may_become_only_one_that_is_the_same() {
        assert_eq!(decode::<u64>(&encode(&7u8).expect("bytes")), Ok(7));
        assert!(decode::<u8>(&encode(&300u64).expect("bytes")).is_err());
        assert_eq!(decode::<f64>(&encode(&0.1f32).expect("bytes")), Ok(f64::from(0.1f32)));
        assert_eq!(decode::<f32>(&encode(&0.5f64).expect("bytes")), Ok(0.5));
        assert_eq!(decode::<f32>(&encode(&-3i64).expect("bytes")), Ok(-3.0));
        assert!(decode::<f32>(&encode(&f64::NAN).expect("bytes")).is_ok_and(f32::is_nan));
        assert_eq!(decode::<f32>(&encode(&f64::INFINITY).expect("bytes")), Ok(f32::INFINITY));
        for lossy in [
            encode(&1e300f64),
            encode(&0.1f64),
            encode(&16_777_217u32),
            encode(&-16_777_217i32),
            encode(&u64::MAX),
        ] {
            let error = decode::<f32>(&lossy.expect("bytes")).expect_err("not the same");
            assert!(error.to_string().contains("is not exactly a number of f32"), "{error}");
        }
        for lossy in [encode(&((1u64 << 53) + 1)), encode(&u64::MAX), encode(&i64::MAX)] {
            assert!(decode::<f64>(&lossy.expect("bytes")).is_err());
        }
        assert!(decode::<u8>(&encode(&1.0f64).expect("bytes")).is_err());
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Kind<F> {
        One(F),
        Named { length: F },
        Two(F, F),
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Wrapped<F>(F);

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Deep<F> {
        some: Option<F>,
        list: Vec<F>,
        map: BTreeMap<String, F>,
        kinds: [Kind<F>; 3],
        wrapped: Wrapped<F>,
        pair: (F, F),
    }

    /// A value of many parts, of which one has another number than the rest.
    fn deep<F: Copy>(usual: F, other: F, place: usize) -> Deep<F> {
        let number = |at: usize| if at == place { other } else { usual };
        Deep {
            some: Some(number(0)),
            list: vec![number(1); 2],
            map: BTreeMap::from([("a".to_owned(), number(2))]),
            kinds: [
                Kind::One(number(3)),
                Kind::Named { length: number(4) },
                Kind::Two(usual, number(5)),
            ],
            wrapped: Wrapped(number(6)),
            pair: (usual, number(7)),
        }
    }

    #[test]
    fn no_number_within_a_value_is_rounded() {
        let exact = encode(&deep(0.5f64, 0.5, 0)).expect("bytes");
        assert_eq!(decode(&exact), Ok(deep(0.5f32, 0.5, 0)));
        for place in 0..8 {
            let bytes = encode(&deep(0.5f64, 0.1, place)).expect("bytes");
            assert!(decode::<Deep<f32>>(&bytes).is_err(), "{place}");
            assert_eq!(decode(&bytes), Ok(deep(0.5f64, 0.1, place)));
        }
    }

    #[test]
    fn nothing_takes_no_bytes() {
        assert_eq!(encode(&()), Ok(Vec::new()));
        assert_eq!(decode(&[]), Ok(()));
        assert_eq!(decode::<Option<u8>>(&encode(&None::<u8>).expect("bytes")), Ok(None));
        assert_eq!(decode(NIL), Ok(()));
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let mut bytes = encode(&7u64).expect("bytes");
        bytes.extend([1, 2]);
        let left = decode::<u64>(&bytes);
        assert_eq!(left, Err(ValueError::LeftOver { expected: "u64", bytes: 2 }));
    }

    fn shapes() -> impl Strategy<Value = Shape> {
        prop_oneof![
            Just(Shape::Point),
            (-1e9..1e9).prop_map(Shape::Circle),
            any::<(u32, u32)>().prop_map(|(width, height)| Shape::Box { width, height }),
        ]
    }

    proptest! {
        #[test]
        fn a_value_survives_its_bytes(
            numbers: Vec<u64>, text: Option<String>, shape in shapes(), small: i8,
            reals: Vec<f32>, wide: f64,
        ) {
            let value = (numbers, text, shape, small, (), reals, vec![wide; 3]);
            let bytes = encode(&value).expect("bytes");
            prop_assert_eq!(decode(&bytes), Ok(value));
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<(u64, String, Vec<Shape>, Option<Span>)>(&bytes);
        }
    }
}
