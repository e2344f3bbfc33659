//! Byte streams that can be regenerated from their key: what the ranks of the chaos test write, and
//! what the readers compare with.

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The next 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.bits() % bound as u64).expect("below a usize")
    }
}

/// The form of a stream's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// How many streams share the output. Each has its own bytes, none of them ASCII, so that every
    /// byte shows which stream it belongs to; a line feed belongs to the stream of the byte before
    /// it. With 0 the stream is alone, and has all byte values.
    pub(crate) sharers: u64,
    /// Mean length of a line; 0 for no ends of lines.
    pub(crate) line: u64,
}

/// One stream, generated from its beginning.
pub(crate) struct Known {
    random: Random,
    form: Form,
    rank: u64,
    /// Whether a line begins here.
    at_line_start: bool,
}

impl Known {
    /// The stream of a rank; with `error`, that of its standard error, if it has its own.
    pub(crate) fn new(seed: u64, rank: u64, error: bool, form: Form) -> Self {
        let key = seed ^ (rank + 1).wrapping_mul(0xd6e8_feb8_6659_fd93) ^ u64::from(error) << 63;
        Self { random: Random(key), form, rank, at_line_start: true }
    }

    /// Generates the next bytes.
    pub(crate) fn fill(&mut self, buffer: &mut [u8]) {
        for byte in buffer {
            let bits = self.random.bits();
            let [low, ..] = bits.to_le_bytes();
            let end = self.form.line > 0 && (bits >> 16).is_multiple_of(self.form.line);
            *byte = match self.form.sharers {
                0 if end => b'\n',
                0 => low,
                _ if end && !self.at_line_start && bits >> 61 == 0 => b'\r',
                _ if end && !self.at_line_start => b'\n',
                sharers => {
                    let own = u64::from(low) % (128 / sharers) * sharers + self.rank;
                    u8::try_from(128 + own).expect("a byte")
                }
            };
            self.at_line_start = matches!(*byte, b'\n' | b'\r');
        }
    }
}
