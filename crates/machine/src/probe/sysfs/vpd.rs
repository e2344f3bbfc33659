//! Vital product data of a PCI function: which card it belongs to.
//!
//! Reads one keyword and one mark, and nothing that a device can be told by besides.
//!
//! *Invariant:* every text of bytes is read in one pass, and gives a card or none.

use std::io::{self, Read};
use std::path::Path;

/// The space that an address of fifteen bits reaches (PCI Local Bus Specification 3.0, 6.4).
const SIZE: u64 = 1 << 15;

/// The small resource that ends the data, without and with a checksum.
const ENDS: [u8; 2] = [0x78, 0x79];
/// The large resource with read-only keywords (VPD-R).
const READ_ONLY: u8 = 0x90;
/// The vendor's keyword for the UUID that all functions of a ConnectX card share (rdma-core's
/// `rdma_topo` pairs them by it).
const CARD: &[u8] = b"V3";

/// What the data of a baseboard's own adapter have in a vendor's keyword (NVIDIA, Fabric Manager).
const SWITCH_MANAGER: &[u8] = b"SMDL=SW_MNG";

/// The card's UUID in a function's `vpd`; `None` if the data do not tell it.
///
/// # Errors
/// If the file can't be read: it is root's alone, or the device has none.
pub(super) fn card(function: &Path) -> io::Result<Option<String>> {
    Ok(card_in(&data(function)?))
}

/// Whether a function's data say that fabric manager reaches the NVSwitches through it. Data that
/// can't be read do not.
pub(super) fn manages_switches(function: &Path) -> bool {
    let told =
        |data: Vec<u8>| data.windows(SWITCH_MANAGER.len()).any(|part| part == SWITCH_MANAGER);
    data(function).is_ok_and(told)
}

fn data(function: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(function.join("vpd"))?.take(SIZE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The card's UUID in vital product data (the specification's appendix I).
fn card_in(data: &[u8]) -> Option<String> {
    let mut rest = data;
    while let Some((&tag, after)) = rest.split_first() {
        if ENDS.contains(&tag) {
            return None;
        }
        let (length, after) = match tag & 0x80 {
            0 => (usize::from(tag & 0x7), after),
            _ => {
                let (length, after) = after.split_first_chunk::<2>()?;
                (usize::from(u16::from_le_bytes(*length)), after)
            }
        };
        let (item, after) = after.split_at_checked(length)?;
        if tag == READ_ONLY
            && let Some(value) = keyword(item, CARD)
        {
            return text(value);
        }
        rest = after;
    }
    None
}

/// A keyword's value: two letters, a length and so many bytes follow each other.
fn keyword<'a>(item: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    let mut rest = item;
    while let Some((&[first, second, length], after)) = rest.split_first_chunk::<3>() {
        let (value, after) = after.split_at_checked(usize::from(length))?;
        if [first, second] == wanted {
            return Some(value);
        }
        rest = after;
    }
    None
}

/// A value of visible characters; devices pad it with blanks and zeros.
fn text(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\0']);
    let visible = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    visible.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const UUID: &str = "2f5ba20ec4f1ef118000fc6a1c0f7f4e";

    fn large(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_le_bytes();
        [&[tag], &length[..], content].concat()
    }

    fn word(name: &[u8; 2], value: &[u8]) -> Vec<u8> {
        [&name[..], &[u8::try_from(value.len()).unwrap()], value].concat()
    }

    /// As a ConnectX-8 has it: a name, read-only keywords, an end.
    fn whole(words: &[Vec<u8>]) -> Vec<u8> {
        [large(0x82, b"ConnectX-8"), large(READ_ONLY, &words.concat()), vec![ENDS[0]]].concat()
    }

    #[test]
    fn the_cards_uuid_is_among_the_read_only_keywords() {
        let words = [word(b"PN", b"900-9X81E"), word(b"V3", UUID.as_bytes()), word(b"RV", &[0; 9])];
        assert_eq!(card_in(&whole(&words)).as_deref(), Some(UUID));
        let padded = [word(b"V3", format!("{UUID}  \0\0").as_bytes())];
        assert_eq!(card_in(&whole(&padded)).as_deref(), Some(UUID));
        // Small resources are passed over.
        let small = [&[0x0a, 1, 2][..], &whole(&words)].concat();
        assert_eq!(card_in(&small).as_deref(), Some(UUID));
    }

    #[test]
    fn what_is_elsewhere_or_unreadable_is_no_card() {
        let of = |words: &[Vec<u8>]| card_in(&whole(words));
        assert_eq!(of(&[word(b"V2", UUID.as_bytes())]), None);
        assert_eq!(of(&[word(b"V3", b"")]), None);
        assert_eq!(of(&[word(b"V3", b"\xff\xfe")]), None);
        assert_eq!(of(&[word(b"V3", b"a\x1b[2Jb")]), None);
        let writable = [large(0x91, &word(b"V3", UUID.as_bytes())), vec![ENDS[0]]].concat();
        assert_eq!(card_in(&writable), None);
        for end in [&[ENDS[0]][..], &[ENDS[1], 0]] {
            let after_it = [end, &whole(&[word(b"V3", UUID.as_bytes())])].concat();
            assert_eq!(card_in(&after_it), None, "{end:?}");
        }
        let cut = whole(&[word(b"PN", b"x"), word(b"V3", UUID.as_bytes())]);
        for length in 0..cut.len() - 1 {
            assert_eq!(card_in(&cut[..length]), None, "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fail_or_give_what_is_not_in_them(
            bytes in vec(prop_oneof![any::<u8>(), Just(READ_ONLY), Just(b'V'), Just(b'3')], 0..300)
        ) {
            if let Some(card) = card_in(&bytes) {
                prop_assert!(bytes.windows(card.len()).any(|part| part == card.as_bytes()));
                prop_assert!(card.bytes().all(|byte| byte.is_ascii_graphic()));
            }
        }

        #[test]
        fn a_card_is_found_behind_any_other_keywords(
            others in vec(("[A-UW-Z][0-9A-Z]", vec(any::<u8>(), 0..40)), 0..5),
            card in "[0-9a-f]{32}"
        ) {
            let others = others.iter().map(|(name, value)| {
                word(name.as_bytes().try_into().unwrap(), value)
            });
            let words: Vec<Vec<u8>> = others.chain([word(b"V3", card.as_bytes())]).collect();
            prop_assert_eq!(card_in(&whole(&words)), Some(card));
        }
    }
}
