//! Makes text from outside safe for a terminal: colours pass, all other control sequences are made
//! visible.
//!
//! A log, a worker's output or a name in a topology file can contain sequences that retitle the
//! window, clear the screen, hide text, or make the terminal type an answer, and characters that
//! reverse the order of others or can't be seen. Nothing is dropped: an active control byte is
//! shown as `\x1b`, so that an unfinished sequence can't swallow the text after it.
//!
//! *Invariant:* the output depends on the bytes alone, not on how they were split. It consists of
//! printable UTF-8, line feeds (possibly after a carriage return), tabs, and complete SGR
//! sequences that don't conceal.

use std::borrow::Cow;

use crate::text::is_deceptive;

/// Longest SGR sequence that passes, in bytes; a 24-bit foreground and background need 40.
const SGR_LIMIT: usize = 64;

/// Filters one stream of bytes for a terminal. An incomplete sequence is held back until the rest
/// of it arrives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sanitizer {
    /// An incomplete sequence or character, at most [`SGR_LIMIT`] bytes.
    pending: Vec<u8>,
    /// Whether a colour is in effect.
    styled: bool,
}

/// What some bytes begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// This many harmless bytes.
    Plain(usize),
    /// This many bytes of an SGR sequence, and whether it leaves a colour in effect.
    Sgr(usize, bool),
    /// This many bytes to show in hexadecimal.
    Hidden(usize),
    /// Undecided without the next bytes.
    Incomplete,
}

impl Sanitizer {
    /// Appends the safe form of `bytes` to `out`.
    pub(crate) fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.pending.is_empty() {
            let left = self.pass(bytes, out);
            self.pending.extend_from_slice(left);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            let left = self.pass(&joined, out).len();
            joined.drain(..joined.len() - left);
            self.pending = joined;
        }
    }

    /// Ends the text: shows an incomplete sequence, and resets colours.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        for byte in std::mem::take(&mut self.pending) {
            show(byte, out);
        }
        if std::mem::take(&mut self.styled) {
            out.extend_from_slice(b"\x1b[0m");
        }
    }

    /// Filters as much as can be decided, and returns the rest.
    fn pass<'a>(&mut self, mut bytes: &'a [u8], out: &mut Vec<u8>) -> &'a [u8] {
        while !bytes.is_empty() {
            let length = match first_piece(bytes) {
                Piece::Plain(length) => {
                    out.extend_from_slice(&bytes[..length]);
                    length
                }
                Piece::Sgr(length, styled) => {
                    self.styled = styled;
                    out.extend_from_slice(&bytes[..length]);
                    length
                }
                Piece::Hidden(length) => {
                    bytes[..length].iter().for_each(|&byte| show(byte, out));
                    length
                }
                Piece::Incomplete => break,
            };
            bytes = &bytes[length..];
        }
        bytes
    }
}

/// The safe form of a whole text.
pub(crate) fn sanitized(text: &[u8]) -> Vec<u8> {
    let mut sanitizer = Sanitizer::default();
    let mut out = Vec::with_capacity(text.len());
    sanitizer.feed(text, &mut out);
    sanitizer.finish(&mut out);
    out
}

/// The safe form of a text in which each line has its own colours: one that a line does not end
/// does not reach the next.
pub(crate) fn sanitized_lines(text: &[u8]) -> Vec<u8> {
    let safe = |line: &[u8]| match line.strip_suffix(b"\n") {
        Some(line) => [sanitized(line), b"\n".to_vec()].concat(),
        None => sanitized(line),
    };
    text.split_inclusive(|byte| *byte == b'\n').flat_map(safe).collect()
}

/// The safe form of words that are not to have colours, such as a name or a message: in our own
/// text, between our own colours, they would be taken for ours.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    let harmless = |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || is_deceptive(c));
    if text.chars().all(harmless) {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len() + 16);
    let mut character = [0; 4];
    for c in text.chars() {
        let bytes = c.encode_utf8(&mut character).as_bytes();
        match harmless(c) {
            true => out.extend_from_slice(bytes),
            false => bytes.iter().for_each(|&byte| show(byte, &mut out)),
        }
    }
    Cow::Owned(String::from_utf8_lossy(&out).into_owned())
}

/// A byte in hexadecimal, or unchanged if it is printable.
fn show(byte: u8, out: &mut Vec<u8>) {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    match byte {
        b' '..=b'~' => out.push(byte),
        _ => {
            let (high, low) = (DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]);
            out.extend_from_slice(&[b'\\', b'x', high, low]);
        }
    }
}

/// What the non-empty `bytes` begin with.
fn first_piece(bytes: &[u8]) -> Piece {
    let plain = bytes.iter().take_while(|byte| matches!(byte, b' '..=b'~' | b'\n' | b'\t')).count();
    match bytes[plain.min(bytes.len() - 1)] {
        _ if plain > 0 => Piece::Plain(plain),
        b'\x1b' => sgr(bytes),
        b'\r' => match bytes.get(1) {
            None => Piece::Incomplete,
            Some(b'\n') => Piece::Plain(2),
            // A lone carriage return would let the rest of a line overwrite its beginning.
            Some(_) => Piece::Hidden(1),
        },
        0x80.. => character(bytes),
        _ => Piece::Hidden(1),
    }
}

/// Classifies bytes that begin with an escape: `ESC [ 0-9;: m` or not.
fn sgr(bytes: &[u8]) -> Piece {
    let known = &bytes[..bytes.len().min(SGR_LIMIT)];
    match known.get(1) {
        None => return Piece::Incomplete,
        Some(b'[') => {}
        Some(_) => return Piece::Hidden(1),
    }
    let parameters = &known[2..];
    let length = parameters.iter().take_while(|byte| matches!(byte, b'0'..=b';')).count();
    match parameters.get(length) {
        Some(b'm') => match effect(&parameters[..length]) {
            Effect::Conceals => Piece::Hidden(1),
            effect => Piece::Sgr(length + 3, effect == Effect::Styles),
        },
        None if known.len() < SGR_LIMIT => Piece::Incomplete,
        _ => Piece::Hidden(1),
    }
}

/// What a whole SGR sequence does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// It ends with a reset, as `ESC [ m` and `ESC [ 31 ; 0 m` do.
    Resets,
    /// It leaves a colour or another style in effect.
    Styles,
    /// It makes the text after it invisible.
    Conceals,
}

/// What the parameters of an SGR sequence do (ECMA-48, 8.3.117). Those of a colour, as in
/// `38 ; 5 ; 8` and `48 ; 2 ; 8 ; 0 ; 0`, are not styles of their own.
fn effect(parameters: &[u8]) -> Effect {
    // Only the first of several parts with colons says what it is.
    let number = |text: &[u8]| {
        let digits = text.split(|byte| *byte == b':').next().unwrap_or_default();
        digits.iter().fold(0u32, |all, digit| {
            all.saturating_mul(10).saturating_add(u32::from(digit.saturating_sub(b'0')))
        })
    };
    let mut numbers = parameters.split(|byte| *byte == b';').map(number).peekable();
    let mut whole = parameters.split(|byte| *byte == b';');
    let mut effect = Effect::Resets;
    while let Some(style) = numbers.next() {
        let is_alone = whole.next().is_some_and(|text| !text.contains(&b':'));
        let arguments = match (style, numbers.peek()) {
            (38 | 48 | 58, Some(5)) if is_alone => 2,
            (38 | 48 | 58, Some(2)) if is_alone => 4,
            _ => 0,
        };
        for _ in 0..arguments {
            // A colour that is cut short ends the sequence.
            let _ = (numbers.next(), whole.next());
        }
        effect = match style {
            8 => return Effect::Conceals,
            0 => Effect::Resets,
            _ => Effect::Styles,
        };
    }
    effect
}

/// Classifies bytes that begin with a character beyond ASCII, or with no valid character.
fn character(bytes: &[u8]) -> Piece {
    let known = &bytes[..bytes.len().min(4)];
    let (length, text) = match std::str::from_utf8(known) {
        Ok(text) => (known.len(), text),
        Err(error) if error.valid_up_to() > 0 => {
            let valid = &known[..error.valid_up_to()];
            (valid.len(), std::str::from_utf8(valid).unwrap_or_default())
        }
        Err(error) if error.error_len().is_none() => return Piece::Incomplete,
        Err(_) => return Piece::Hidden(1),
    };
    let first = text.chars().next();
    let length = first.map_or(length, char::len_utf8);
    // U+0080 to U+009F are control characters: many terminals read U+009B as an escape and '['.
    match first.is_some_and(|first| first.is_control() || is_deceptive(first)) {
        true => Piece::Hidden(length),
        false => Piece::Plain(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn clean(text: &[u8]) -> String {
        String::from_utf8(sanitized(text)).expect("what passes is UTF-8")
    }

    #[test]
    fn colours_pass_and_nothing_else_does() {
        for (from, to) in [
            (&b"plain\ttext\n"[..], "plain\ttext\n"),
            (b"\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
            (b"\x1b[38:2::1:2:3mtrue\x1b[m", "\x1b[38:2::1:2:3mtrue\x1b[m"),
            (b"\x1b[31mleft red", "\x1b[31mleft red\x1b[0m"),
            (b"\x1b[0;31mleft red", "\x1b[0;31mleft red\x1b[0m"),
            (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
            (b"\x1b]52;c;aGk=\x1b\\", "\\x1b]52;c;aGk=\\x1b\\"),
            (b"\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
            (b"\x1b[>4m", "\\x1b[>4m"),
            (b"\x1bc", "\\x1bc"),
            (b"\x1b\x1b[31mx", "\\x1b\x1b[31mx\x1b[0m"),
            (b"forged\rline", "forged\\x0dline"),
            (b"dos\r\n", "dos\r\n"),
            (b"cut \x1b[3", "cut \\x1b[3"),
            (b"bell\x07 back\x08 delete\x7f nul\0", "bell\\x07 back\\x08 delete\\x7f nul\\x00"),
            ("caf\u{e9} \u{1f600}".as_bytes(), "caf\u{e9} \u{1f600}"),
            (b"caf\xe9!", "caf\\xe9!"),
            ("\u{9b}2J".as_bytes(), "\\xc2\\x9b2J"),
            (b"\x9b2J", "\\x9b2J"),
            // Text that is hidden, or in another order than it is read.
            (b"a\x1b[8mhidden", "a\\x1b[8mhidden"),
            (b"\x1b[1;08;31mhidden", "\\x1b[1;08;31mhidden"),
            (b"\x1b[38;8mhidden", "\\x1b[38;8mhidden"),
            (b"\x1b[38;5;8mgrey\x1b[m", "\x1b[38;5;8mgrey\x1b[m"),
            (b"\x1b[48;2;8;8;8mgrey\x1b[m", "\x1b[48;2;8;8;8mgrey\x1b[m"),
            (b"\x1b[38;2;0;0;0;8mhidden", "\\x1b[38;2;0;0;0;8mhidden"),
            (b"\x1b[38:5;8mhidden", "\\x1b[38:5;8mhidden"),
            (b"\x1b[28mshown", "\x1b[28mshown\x1b[0m"),
            (b"\x1b[38;5;0mblack", "\x1b[38;5;0mblack\x1b[0m"),
            ("rm \u{202e}gnp.exe".as_bytes(), "rm \\xe2\\x80\\xaegnp.exe"),
            ("\u{2066}a\u{2069}".as_bytes(), "\\xe2\\x81\\xa6a\\xe2\\x81\\xa9"),
            ("zero\u{200b}width".as_bytes(), "zero\\xe2\\x80\\x8bwidth"),
            ("\u{feff}bom".as_bytes(), "\\xef\\xbb\\xbfbom"),
            ("\u{645}\u{6cc}\u{200c}\u{62e}".as_bytes(), "\u{645}\u{6cc}\u{200c}\u{62e}"),
        ] {
            assert_eq!(clean(from), to, "{:?}", from.escape_ascii().to_string());
        }
    }

    #[test]
    fn a_colour_ends_with_its_line_and_words_have_none() {
        let lines = String::from_utf8(sanitized_lines(b"a\x1b[31mred\r\nb\x1b[8m\n\nc"));
        assert_eq!(lines.expect("text"), "a\x1b[31mred\\x0d\x1b[0m\nb\\x1b[8m\n\nc");
        for (from, to) in [
            ("two\nlines\tand a tab", "two\nlines\tand a tab"),
            ("H100\x1b[31m", "H100\\x1b[31m"),
            ("a\u{202e}b\u{9b}\r", "a\\xe2\\x80\\xaeb\\xc2\\x9b\\x0d"),
        ] {
            assert_eq!(plain(from), to);
        }
    }

    #[test]
    fn a_sequence_without_an_end_is_not_waited_for() {
        let mut sanitizer = Sanitizer::default();
        let mut out = Vec::new();
        sanitizer.feed(b"\x1b[", &mut out);
        assert_eq!(out, b"", "a colour may still come of it");
        sanitizer.feed(&[b'1'; SGR_LIMIT], &mut out);
        assert!(out.starts_with(b"\\x1b[111"), "{}", out.escape_ascii());
        assert!(sanitizer.pending.is_empty());
    }

    /// Pieces that make interesting streams more often than random bytes do.
    fn streams() -> impl Strategy<Value = Vec<u8>> {
        let pieces = prop_oneof![
            Just(b"\x1b".to_vec()),
            Just(b"\x1b[".to_vec()),
            Just(b"\x1b[31m".to_vec()),
            Just(b"\x1b]0;".to_vec()),
            Just(b"m".to_vec()),
            Just(b"12;34".to_vec()),
            Just(b"\r".to_vec()),
            Just(b"\n".to_vec()),
            Just("\u{9b}\u{e9}\u{1f600}".as_bytes().to_vec()),
            Just("\u{202e}\u{2069}".as_bytes().to_vec()),
            Just(b";8".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..6),
        ];
        proptest::collection::vec(pieces, 0..30).prop_map(|pieces| pieces.concat())
    }

    /// Whether a terminal may get this: a reading of the rule that shares no code with the filter.
    fn harmless(text: &str) -> bool {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '\n' | '\t' => 1,
                '\r' if rest.starts_with("\r\n") => 2,
                '\x1b' => match rest.strip_prefix("\x1b[").and_then(|rest| rest.split_once('m')) {
                    Some((inside, _))
                        if !inside.contains(|c: char| !";:0123456789".contains(c)) =>
                    {
                        inside.len() + 3
                    }
                    _ => return false,
                },
                control if control.is_control() => return false,
                '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => return false,
                plain => plain.len_utf8(),
            };
            rest = &rest[length..];
        }
        true
    }

    proptest! {
        #[test]
        fn a_terminal_gets_nothing_that_it_would_obey_but_colours(stream in streams()) {
            let shown = clean(&stream);
            prop_assert!(harmless(&shown), "{shown:?}");
        }

        #[test]
        fn splits_do_not_matter(stream in streams(), cuts in proptest::collection::vec(0usize..200, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let mut sanitizer = Sanitizer::default();
            let mut out = Vec::new();
            for ends in cuts.windows(2) {
                sanitizer.feed(&stream[ends[0]..ends[1]], &mut out);
                prop_assert!(sanitizer.pending.len() < SGR_LIMIT);
            }
            sanitizer.finish(&mut out);
            prop_assert_eq!(out, sanitized(&stream));
        }

        #[test]
        fn printable_text_is_untouched(text in "[^\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}]{0,80}") {
            prop_assert_eq!(clean(text.as_bytes()), text);
        }

        #[test]
        fn what_was_cleaned_stays_as_it_is(stream in streams()) {
            let once = sanitized(&stream);
            prop_assert_eq!(sanitized(&once), once);
        }
    }
}
