//! Quantities with their units: sizes in bytes, spans of time.
//!
//! Does not decide what a fraction refers to; the planner does.
//!
//! *Invariant:* every text form names its unit or is a plain number of the base unit.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a text is not a size or a span of time.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{text:?} is not {expected}{}", instead(.text, .expected))]
pub struct UnitError {
    /// The text as it was given, cut after 40 characters.
    pub text: String,
    /// What it should have been, with examples.
    pub expected: &'static str,
}

/// The fraction to write instead of a percentage, where a fraction was possible.
fn instead(text: &str, expected: &str) -> String {
    let percent =
        text.trim().strip_suffix('%').and_then(|digits| digits.trim().parse::<f64>().ok());
    match percent.filter(|percent| *percent > 0.0 && *percent <= 100.0) {
        Some(percent) if expected.contains("fraction") => {
            format!("; write {}", Size::Fraction(percent / 100.0))
        }
        _ => String::new(),
    }
}

/// A size as people write it: an absolute number of bytes, or a share of a total.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// A share of the total, above 0 and at most 1.
    Fraction(f64),
}

impl Size {
    /// The size in bytes, given the total that a fraction refers to.
    pub fn of(self, whole_bytes: u64) -> u64 {
        match self {
            Size::Bytes(bytes) => bytes,
            // A share is at most 1, so the product fits; sub-byte parts do not matter.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "0 < share <= 1"
            )]
            Size::Fraction(share) => (whole_bytes as f64 * share) as u64,
        }
    }
}

const SIZE: &str = "a size: bytes, '5GB', '5000MiB', or a fraction of the whole like 0.8";

/// Expected when the digits are valid but too many.
const SIZE_THAT_FITS: &str = "a size below 16 EiB";

/// Suffixes as dask's `parse_bytes` has them: decimal without an `i`, binary with one.
const SUFFIXES: [(&str, u64); 12] = [
    ("", 1),
    ("b", 1),
    ("k", 1000),
    ("kb", 1000),
    ("kib", 1 << 10),
    ("mb", 1_000_000),
    ("mib", 1 << 20),
    ("gb", 1_000_000_000),
    ("gib", 1 << 30),
    ("tb", 1_000_000_000_000),
    ("tib", 1 << 40),
    ("m", 1_000_000),
];

impl FromStr for Size {
    type Err = UnitError;

    /// A plain number up to 1 with a decimal point is a fraction; without one, bytes.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let error = || UnitError { text: text.chars().take(40).collect(), expected: SIZE };
        let trimmed = text.trim();
        let split = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
            .unwrap_or(trimmed.len());
        let (digits, suffix) = trimmed.split_at(split);
        let suffix = suffix.trim().to_ascii_lowercase();
        let digits = digits.replace('_', "");
        if !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()) {
            let unit = factor(&suffix).ok_or_else(error)?;
            let bytes = digits.parse::<u64>().ok().and_then(|whole| whole.checked_mul(unit));
            let too_large = || UnitError { expected: SIZE_THAT_FITS, ..error() };
            return bytes.map(Size::Bytes).ok_or_else(too_large);
        }
        let number: f64 = digits.parse().map_err(|_| error())?;
        if suffix.is_empty() {
            return if number > 0.0 && number <= 1.0 {
                Ok(Size::Fraction(number))
            } else {
                Err(error())
            };
        }
        let bytes = number * factor(&suffix).ok_or_else(error)? as f64;
        // Below 2^53 bytes, f64 is exact enough for a limit.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be in range"
        )]
        if (0.0..9e15).contains(&bytes) { Ok(Size::Bytes(bytes as u64)) } else { Err(error()) }
    }
}

fn factor(suffix: &str) -> Option<u64> {
    match suffix {
        "g" => Some(1_000_000_000),
        "t" => Some(1_000_000_000_000),
        _ => SUFFIXES.iter().find(|(name, _)| *name == suffix).map(|(_, factor)| *factor),
    }
}

impl fmt::Display for Size {
    /// The shortest exact text: a fraction, or bytes in the largest binary unit that divides them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            // The point in `1.0` distinguishes it from one byte; `{:?}` would keep it, but write
            // 1e-5.
            Size::Fraction(share) if share.fract() == 0.0 => write!(f, "{share:.1}"),
            Size::Fraction(share) => write!(f, "{share}"),
            Size::Bytes(bytes) => {
                let units =
                    [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
                match units.iter().find(|(_, unit)| bytes >= *unit && bytes % unit == 0) {
                    Some((name, unit)) => write!(f, "{}{name}", bytes / unit),
                    None => write!(f, "{bytes}"),
                }
            }
        }
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Size::Bytes(bytes) => serializer.serialize_u64(bytes),
            Size::Fraction(share) => serializer.serialize_f64(share),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor { expected: SIZE, whole: Size::Bytes })
    }
}

impl schemars::JsonSchema for Size {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["number", "string"], "description": SIZE })
    }
}

/// A number of bytes as people write it; unlike a [`Size`] no fraction, because there is no whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

const BYTES: &str = "a size in bytes, like '5GB' or '5000MiB'";

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match text.parse() {
            Ok(Size::Bytes(bytes)) => Ok(Self(bytes)),
            Err(error) if error.expected == SIZE_THAT_FITS => Err(error),
            _ => Err(UnitError { text: text.chars().take(40).collect(), expected: BYTES }),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Size::Bytes(self.0).fmt(f)
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor { expected: BYTES, whole: Bytes })
    }
}

impl schemars::JsonSchema for Bytes {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["number", "string"], "description": BYTES })
    }
}

/// Reads a size that is a number or a text.
struct SizeVisitor<T> {
    expected: &'static str,
    whole: fn(u64) -> T,
}

impl<T: FromStr<Err = UnitError>> serde::de::Visitor<'_> for SizeVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<T, E> {
        Ok((self.whole)(bytes))
    }

    fn visit_u128<E: serde::de::Error>(self, bytes: u128) -> Result<T, E> {
        bytes.to_string().parse().map_err(E::custom)
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<T, E> {
        Size::Fraction(number).to_string().parse().map_err(E::custom)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// A number of bytes for display: `79.6 GiB`; with `{:#}` as it was probably written, if it is a
/// whole number in some unit: `500 MB`, `1 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct HumanBytes(pub u64);

impl HumanBytes {
    /// The number and unit that it is written with if it is below 10,000 in a unit that divides it.
    fn round(self) -> Option<(u64, &'static str)> {
        let units = [
            ("TiB", 1u64 << 40),
            ("TB", 1_000_000_000_000),
            ("GiB", 1 << 30),
            ("GB", 1_000_000_000),
            ("MiB", 1 << 20),
            ("MB", 1_000_000),
            ("KiB", 1 << 10),
            ("kB", 1000),
        ];
        let (name, unit) =
            units.into_iter().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit))?;
        Some((self.0 / unit, name)).filter(|(count, _)| *count < 10_000)
    }
}

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((count, unit)) = self.round().filter(|_| f.alternate()) {
            return write!(f, "{count} {unit}");
        }
        let mut value = self.0 as f64;
        let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].iter().peekable();
        while value >= 1024.0 && units.len() > 1 {
            value /= 1024.0;
            units.next();
        }
        let unit = units.peek().copied().copied().unwrap_or("B");
        if unit == "B" { write!(f, "{value:.0} {unit}") } else { write!(f, "{value:.1} {unit}") }
    }
}

/// A span of time as people read it: `12 s`, `3 min`, `2 h 5 min`, `3 d 4 h`; with `{:#}` in its
/// largest unit alone: `2 h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanSpan(pub Duration);

impl fmt::Display for HumanSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
        match seconds {
            0..60 => write!(f, "{seconds} s"),
            60..3600 => write!(f, "{minutes} min"),
            3600..86_400 if f.alternate() => write!(f, "{hours} h"),
            86_400.. if f.alternate() => write!(f, "{days} d"),
            3600..86_400 => write!(f, "{hours} h {} min", minutes % 60),
            _ => write!(f, "{days} d {} h", hours % 24),
        }
    }
}

/// A span of time as people write it: `30s`, `250ms`, `5m`, `1h`, or plain seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

const SPAN: &str = "a span of time, like 250ms, 30s, 5m, 1h, or plain seconds";

/// Expected when the text is valid but the span too long.
const SPAN_THAT_ENDS: &str = "a span of time of at most ten years";

impl Span {
    /// A span of whole seconds.
    pub const fn secs(secs: u64) -> Self {
        Self(Duration::from_secs(secs))
    }

    /// A span of milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }
}

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let error = || UnitError { text: text.chars().take(40).collect(), expected: SPAN };
        let mut rest = text.trim();
        let (mut seconds, mut larger) = (0.0, f64::INFINITY);
        loop {
            let split =
                rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
            let (digits, after) = rest.split_at(split);
            let number: f64 = digits.parse().map_err(|_| error())?;
            let after = after.trim_start();
            let end = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
            let (unit, after) = after.split_at(end);
            let unit = match unit.trim() {
                "ms" => 1e-3,
                "s" => 1.0,
                // `90`; but who writes `1h30` means minutes.
                "" if larger.is_infinite() => 1.0,
                "m" | "min" => 60.0,
                "h" => 3600.0,
                "d" => 86400.0,
                _ => return Err(error()),
            };
            // `1m30s`: each unit once, the larger first.
            if unit >= larger {
                return Err(error());
            }
            seconds += number * unit;
            larger = unit;
            if after.is_empty() {
                break;
            }
            rest = after;
        }
        // Ten years: anything longer is a mistake.
        if seconds > 3.2e8 {
            return Err(UnitError { expected: SPAN_THAT_ENDS, ..error() });
        }
        Duration::try_from_secs_f64(seconds).map(Self).map_err(|_| error())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        match micros {
            0 => f.write_str("0s"),
            _ if micros.is_multiple_of(3_600_000_000) => write!(f, "{}h", micros / 3_600_000_000),
            _ if micros.is_multiple_of(60_000_000) => write!(f, "{}m", micros / 60_000_000),
            _ if micros.is_multiple_of(1_000_000) => write!(f, "{}s", micros / 1_000_000),
            _ if micros.is_multiple_of(1_000) => write!(f, "{}ms", micros / 1_000),
            _ => write!(f, "{}s", self.0.as_secs_f64()),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    /// A text with its unit, or a plain number of seconds.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Span;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(SPAN)
            }

            fn visit_u64<E: serde::de::Error>(self, seconds: u64) -> Result<Span, E> {
                seconds.to_string().parse().map_err(E::custom)
            }

            fn visit_u128<E: serde::de::Error>(self, seconds: u128) -> Result<Span, E> {
                seconds.to_string().parse().map_err(E::custom)
            }

            fn visit_f64<E: serde::de::Error>(self, seconds: f64) -> Result<Span, E> {
                seconds.to_string().parse().map_err(E::custom)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Span, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl schemars::JsonSchema for Span {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Span".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["number", "string"], "description": SPAN })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_limit_is_shown_as_it_was_written() {
        let shown = |bytes| format!("{:#}", HumanBytes(bytes));
        assert_eq!(shown(1 << 30), "1 GiB");
        assert_eq!(shown(500_000_000), "500 MB");
        assert_eq!(shown(1500 << 20), "1500 MiB");
        assert_eq!(shown(8_438_000_123), "7.9 GiB", "nobody wrote that");
    }

    #[test]
    fn a_span_is_read_in_its_two_largest_units() {
        let said = |seconds| HumanSpan(Duration::from_secs(seconds)).to_string();
        assert_eq!([said(0), said(59), said(60)], ["0 s", "59 s", "1 min"]);
        assert_eq!([said(3599), said(7500)], ["59 min", "2 h 5 min"]);
        assert_eq!(said(3 * 86_400 + 4 * 3600 + 59), "3 d 4 h");
        assert_eq!(format!("{:#}", HumanSpan(Duration::from_secs(7500))), "2 h");
    }

    #[test]
    fn sizes_read_as_dask_reads_them() {
        for (text, size) in [
            ("5GB", Size::Bytes(5_000_000_000)),
            ("5000MiB", Size::Bytes(5000 << 20)),
            ("1.5 gib", Size::Bytes(3 << 29)),
            ("1024", Size::Bytes(1024)),
            ("0.8", Size::Fraction(0.8)),
            ("1.0", Size::Fraction(1.0)),
            ("1", Size::Bytes(1)),
        ] {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
        for text in ["", "GB", "1.5", "-1", "5 parsecs", "0.0", "99999999999TiB", "1e9"] {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn small_fractions_are_sizes() {
        for share in [1.0, 0.5, 1e-4, 1e-5, 1e-17, 5e-324] {
            let size = Size::Fraction(share);
            assert_eq!(size.to_string().parse(), Ok(size), "{size}");
            let json = serde_json::to_value(size).expect("a number");
            assert_eq!(serde_json::from_value::<Size>(json).expect("a size"), size);
        }
        assert_eq!(Size::Fraction(1e-5).to_string(), "0.00001");
    }

    #[test]
    fn what_is_too_large_is_said_so() {
        let digits = "12345678901234567890123456";
        let said = |error: UnitError| error.to_string();
        assert!(digits.parse::<Size>().map_err(said).is_err_and(|s| s.contains("below 16 EiB")));
        assert!(digits.parse::<Span>().map_err(said).is_err_and(|s| s.contains("ten years")));
    }

    #[test]
    fn spans_read_and_print() {
        for (text, printed) in
            [("250ms", "250ms"), ("90", "90s"), ("120s", "2m"), ("0.5h", "30m"), ("0", "0s")]
        {
            assert_eq!(text.parse::<Span>().map(|s| s.to_string()), Ok(printed.to_owned()));
        }
        for text in ["", "s", "5 weeks", "1e9", "99999999999h", "1h30", "1m30s5"] {
            assert!(text.parse::<Span>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_size_survives_its_text(bytes: u64) {
            prop_assert_eq!(Size::Bytes(bytes).to_string().parse(), Ok(Size::Bytes(bytes)));
        }

        #[test]
        fn a_fraction_survives_its_text_and_its_json(share in f64::MIN_POSITIVE..=1.0) {
            let size = Size::Fraction(share);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
            let json = serde_json::to_string(&size).expect("a number");
            prop_assert_eq!(serde_json::from_str::<Size>(&json).expect("a size"), size);
        }

        #[test]
        fn a_share_never_exceeds_its_whole(whole in 0u64..1 << 50, share in 0.001f64..=1.0) {
            prop_assert!(Size::Fraction(share).of(whole) <= whole);
        }
    }
}
