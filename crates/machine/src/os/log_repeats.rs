//! Recognises log lines that say the same thing, and limits how often UCX repeats one.
//!
//! UCX repeats an error for as long as it tries again: a megabyte in a few seconds, for a limit on
//! locked memory. The 1st to 8th line of one shape are written, then the 16th, 32nd, and so on.
//! Only UCX's errors and warnings are limited, never a program's own output.
//!
//! Pure.
//!
//! *Invariant:* every line that is left out is counted in a later one.

use std::collections::HashMap;

/// Lines of one shape that are written before any is left out.
const FIRST: u64 = 8;

/// Most shapes to remember.
const SHAPES: usize = 256;

/// What to do with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Write it.
    Write,
    /// Write it after a line that says how many were left out before it.
    WriteAfter {
        /// How many.
        left_out: u64,
    },
    /// Leave it out.
    LeaveOut,
}

/// Counts UCX's errors and warnings by shape.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// By shape: all lines so far, and those left out since one was written. Under the empty shape,
    /// those of all shapes beyond [`SHAPES`]: so many are no repetition, but may be as long.
    seen: HashMap<Vec<u8>, (u64, u64)>,
}

impl Repeats {
    /// Judges a complete line.
    pub(super) fn judge(&mut self, line: &[u8]) -> Verdict {
        let Some(message) = ucx_message(line) else { return Verdict::Write };
        let shape = shape(message);
        let is_remembered = self.seen.len() < SHAPES || self.seen.contains_key(&shape);
        let (count, left_out) =
            self.seen.entry(if is_remembered { shape } else { Vec::new() }).or_default();
        *count += 1;
        if *count > FIRST && !count.is_power_of_two() {
            *left_out += 1;
            return Verdict::LeaveOut;
        }
        match std::mem::take(left_out) {
            0 => Verdict::Write,
            left_out => Verdict::WriteAfter { left_out },
        }
    }

    /// Forgets all, and returns how many lines were left out and not counted in another yet.
    pub(super) fn finish(&mut self) -> u64 {
        self.seen.drain().map(|(_, (_, left_out))| left_out).sum()
    }
}

/// The place and the text of an error or warning of UCX:
/// `[1700000000.123456] [host:1234 :0]   ib_md.c:300  UCX  ERROR ibv_reg_mr(...) failed: …`.
fn ucx_message(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"[")?;
    let at = rest.windows(6).position(|window| window == b" UCX  ")?;
    let (prefix, message) = rest.split_at(at);
    let level = [&b" UCX  ERROR"[..], b" UCX  WARN", b" UCX  DIAG"];
    if !level.iter().any(|level| message.starts_with(level)) {
        return None;
    }
    let place = prefix.iter().rposition(|byte| *byte == b']')?;
    rest.get(place + 1..)
}

/// A line without what differs between repetitions: every word that begins with a digit.
pub(super) fn shape(line: &[u8]) -> Vec<u8> {
    let mut shape = Vec::with_capacity(line.len());
    let mut in_word = false;
    let mut in_number = false;
    for byte in line {
        let word = byte.is_ascii_alphanumeric();
        if word && !in_word {
            in_number = byte.is_ascii_digit();
            shape.push(if in_number { b'0' } else { *byte });
        } else if !word || !in_number {
            shape.push(*byte);
        }
        in_word = word;
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(number: u32) -> String {
        format!(
            "[17000{number}.123456] [host:1234 :0]          ib_md.c:300  UCX  ERROR \
             ibv_reg_mr(address=0x7f{number:08x}, length=65536) failed: Cannot allocate memory\n"
        )
    }

    #[test]
    fn an_error_that_ucx_repeats_is_written_ever_more_rarely_and_counted() {
        let mut repeats = Repeats::default();
        let verdicts: Vec<Verdict> =
            (0..1000).map(|number| repeats.judge(refused(number).as_bytes())).collect();
        let written = verdicts.iter().filter(|verdict| **verdict != Verdict::LeaveOut).count();
        assert_eq!(written, 8 + 6, "and the 16th, 32nd, … 512th");
        let counted: u64 = verdicts
            .iter()
            .map(|verdict| match verdict {
                Verdict::WriteAfter { left_out } => *left_out,
                _ => 0,
            })
            .sum();
        assert_eq!(written as u64 + counted + repeats.finish(), 1000);
        assert_eq!(repeats.judge(refused(1).as_bytes()), Verdict::Write, "a new process's first");
    }

    #[test]
    fn the_limit_holds_however_many_shapes_there_are() {
        let mut repeats = Repeats::default();
        let mut judge = |shape: u32, number: u32| {
            let line = refused(number).replace("ibv_reg_mr", &format!("call_{shape}_x"));
            // Digits would be one shape.
            let letters = line.replace("call_", &"c".repeat(shape as usize + 1));
            repeats.judge(letters.as_bytes())
        };
        let mut written = 0;
        for number in 0..100 {
            for shape in 0..400 {
                written += u64::from(judge(shape, number) != Verdict::LeaveOut);
            }
        }
        // Of each remembered shape the first eight, the 16th, 32nd and 64th; of all others together
        // the first eight and the powers of two below 14,400.
        assert_eq!(written, SHAPES as u64 * (8 + 3) + 8 + 10);
    }

    #[test]
    fn what_a_program_prints_is_never_left_out() {
        let mut repeats = Repeats::default();
        let debug = "[1700000000.123456] [host:1234 :0]  x.c:1  UCX  DEBUG polling\n";
        for line in ["step 1 of 1000\n", "\n", "[1] UCX is great\n", debug] {
            assert!((0..100).all(|_| repeats.judge(line.as_bytes()) == Verdict::Write), "{line}");
        }
    }

    #[test]
    fn lines_that_differ_in_numbers_and_addresses_have_one_shape() {
        let same = |a: &str, b: &str| shape(a.as_bytes()) == shape(b.as_bytes());
        assert!(same("step 1: 0x7fab of 12MiB", "step 245: 0x7f00 of 3GiB"));
        assert!(!same("mlx5_0: failed", "mlx5_0: refused"));
        assert!(same("gpu1: a", "gpu1: a") && !same("gpu1: a", "gpu2: a"), "names are kept");
    }
}
