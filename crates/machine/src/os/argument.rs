//! Program arguments as text, for plans and instructions in JSON.
//!
//! Arguments are bytes. A byte that is not part of UTF-8 text is encoded as one of 128 private
//! characters, from U+10FF80 on, as in Unicode's own proposals for this. If a text already contains
//! such a character, the character's own bytes are encoded.
//!
//! *Invariant:* [`decoded`] returns exactly what [`encoded`] was given, and text without private
//! characters is unchanged.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The private character for byte 0x80.
const FIRST: u32 = 0x10_ff80;

/// The byte that a private character encodes.
fn byte(character: char) -> Option<u8> {
    u32::from(character).checked_sub(FIRST).and_then(|offset| u8::try_from(offset + 0x80).ok())
}

/// Encodes an argument as text.
pub fn encoded(argument: &OsStr) -> String {
    let mut text = String::new();
    for chunk in argument.as_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            match byte(character) {
                None => text.push(character),
                Some(_) => {
                    let mut bytes = [0; 4];
                    let bytes = character.encode_utf8(&mut bytes).bytes();
                    text.extend(bytes.filter_map(private));
                }
            }
        }
        text.extend(chunk.invalid().iter().copied().filter_map(private));
    }
    text
}

/// The private character for a byte from 0x80 on.
fn private(byte: u8) -> Option<char> {
    char::from_u32(FIRST + u32::from(byte & 0x7f))
}

/// Decodes an argument.
pub fn decoded(text: &str) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        match byte(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_stands_as_itself() {
        for text in ["", "--flag", "caf\u{e9} \u{1f600}"] {
            assert_eq!(encoded(OsStr::new(text)), text);
        }
        assert_eq!(encoded(OsStr::from_bytes(b"caf\xe9")), "caf\u{10ffe9}");
    }

    proptest! {
        #[test]
        fn every_argument_comes_back(bytes: Vec<u8>) {
            let argument = OsString::from_vec(bytes);
            prop_assert_eq!(decoded(&encoded(&argument)), argument);
        }

        #[test]
        fn so_does_one_with_private_characters(text in "[\u{10ff70}-\u{10ffff}a-z]{0,8}") {
            let argument = OsString::from(text);
            prop_assert_eq!(decoded(&encoded(&argument)), argument);
        }
    }
}
