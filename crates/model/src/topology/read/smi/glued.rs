//! Cells that ran together when a matrix was copied from a terminal: `NIC7NIC8`, `SYSSYS`.
//!
//! Parts only what can be read in one way. Does not know how many cells a row needs; the reader
//! checks that afterwards, and that both cells of a pair agree.
//!
//! *Invariant:* the parts of a word, put together again, are the word.

use super::words::Word;

/// The words that a cell can have, none of which begins another.
const CELLS: [&str; 8] = ["X", "PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "N/A"];

/// The words of a line, each cell and name by itself, and how many words were parted.
pub(super) fn parted(words: Vec<Word<'_>>) -> (Vec<Word<'_>>, usize) {
    let mut all = Vec::with_capacity(words.len());
    let mut count = 0;
    for word in words {
        let ends = ends(word.text);
        if ends.len() < 2 {
            all.push(word);
            continue;
        }
        count += 1;
        let begins = std::iter::once(0).chain(ends.iter().copied());
        for (begin, end) in begins.zip(ends.iter().copied()) {
            let tabs = if begin == 0 { word.tabs } else { 0 };
            let column = word.column + word.text[..begin].chars().count();
            all.push(Word { text: &word.text[begin..end], column, tabs });
        }
    }
    (all, count)
}

/// Where the parts of a word end; none if it has one part alone, or if it is no sequence of cells
/// and names.
fn ends(text: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let begins_list = rest.starts_with(|c: char| c.is_ascii_digit());
        let length = match part(rest) {
            Some(length) => length,
            // The list of CPUs after a cell that has no number of its own.
            None if at > 0 && begins_list && !numbered_before(&text[..at]) => rest.len(),
            None => return Vec::new(),
        };
        at += length;
        ends.push(at);
    }
    ends
}

/// Whether a text ends with a digit, so that one more would belong to the same number.
fn numbered_before(text: &str) -> bool {
    text.ends_with(|c: char| c.is_ascii_digit())
}

/// The length of the cell or device name at the start of a text.
fn part(text: &str) -> Option<usize> {
    if let Some(cell) = CELLS.iter().find(|cell| text.starts_with(**cell)) {
        return Some(cell.len());
    }
    let kind = ["NV", "GPU", "NIC"].into_iter().find(|kind| text.starts_with(kind))?;
    let digits = text[kind.len()..].bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then_some(kind.len() + digits)
}

#[cfg(test)]
mod tests {
    use super::super::words::words;
    use super::*;
    use proptest::prelude::*;

    fn texts(line: &str) -> Vec<(&str, usize)> {
        parted(words(line)).0.iter().map(|word| (word.text, word.column)).collect()
    }

    #[test]
    fn only_what_can_be_read_in_one_way_is_parted() {
        assert_eq!(texts("NIC7NIC8"), [("NIC7", 1), ("NIC8", 5)]);
        assert_eq!(
            texts("GPU0 X NV12SYSSYS"),
            [("GPU0", 1), ("X", 6), ("NV12", 8), ("SYS", 12), ("SYS", 15)]
        );
        assert_eq!(texts("GPU10X PIXNODE"), [("GPU10", 1), ("X", 6), ("PIX", 8), ("NODE", 11)]);
        assert_eq!(texts("SYS24-31,88-95"), [("SYS", 1), ("24-31,88-95", 4)]);
        // Whose digit would that be?
        assert_eq!(texts("NV180-31"), [("NV180-31", 1)]);
        for whole in ["mlx5_0", "GPU", "NV", "PIXEL", "SYSTEM", "N/A", "0-31", "CPU", "NIC0:"] {
            assert_eq!(texts(whole), [(whole, 1)]);
        }
    }

    proptest! {
        #[test]
        fn parts_are_the_word_and_no_part_is_parted_again(
            text in "(X|SYS|PIX|NV|NIC|[0-9]|-|N/A|z|ä){0,8}"
        ) {
            let line = text.clone();
            let (parts, _) = parted(words(&line));
            let joined: String = parts.iter().map(|word| word.text).collect();
            prop_assert_eq!(joined, words(&line).iter().map(|word| word.text).collect::<String>());
            let (again, count) = parted(parts.clone());
            prop_assert_eq!((again, count), (parts, 0));
        }
    }
}
