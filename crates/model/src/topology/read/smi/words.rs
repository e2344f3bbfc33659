//! Lines of pasted terminal output as words with their columns.
//!
//! Does not know what the words mean.
//!
//! *Invariant:* a word's column counts the characters of the original line, including escape
//! sequences and comment marks.

/// A word and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word<'a> {
    pub(super) text: &'a str,
    /// Column in characters, from 1.
    pub(super) column: usize,
    /// Number of tab stops between the previous word and this one.
    pub(super) tabs: usize,
}

/// Characters before the first word that belong to a comment, a quotation or a table's border.
const MARKS: [char; 10] = ['#', '*', '/', '>', ';', '%', '|', '-', ':', '!'];

/// Splits a line at white space and table borders, without terminal escapes and comment marks.
pub(super) fn words(line: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let (mut rest, mut column, mut tabs) = (line, 1, 0);
    while let Some(first) = rest.chars().next() {
        let length = escape(rest).unwrap_or_else(|| {
            let blank = first.is_whitespace()
                || first == '|'
                || (words.is_empty() && MARKS.contains(&first));
            if blank {
                tabs += usize::from(first == '\t');
                return first.len_utf8();
            }
            let end = |(at, c): (usize, char)| {
                (c.is_whitespace() || c == '|' || escape(&rest[at..]).is_some()).then_some(at)
            };
            let length = rest.char_indices().find_map(end).unwrap_or(rest.len());
            words.push(Word { text: &rest[..length], column, tabs });
            tabs = 0;
            length
        });
        column += rest[..length].chars().count();
        rest = &rest[length..];
    }
    words
}

/// The length of a terminal escape at the start of the text: raw, as caret notation, or without
/// its first character, which web forms and log collectors drop.
fn escape(text: &str) -> Option<usize> {
    let whole = text.strip_prefix("\u{1b}[").or_else(|| text.strip_prefix("^[["));
    let parameters = whole.or_else(|| text.strip_prefix('['))?;
    let end = parameters.find(|c: char| !(c.is_ascii_digit() || c == ';'))?;
    let last = parameters[end..].chars().next().filter(char::is_ascii_alphabetic)?;
    if whole.is_none() && (end == 0 || last != 'm') {
        return None;
    }
    Some(text.len() - parameters.len() + end + last.len_utf8())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(line: &str) -> Vec<(&str, usize, usize)> {
        words(line).iter().map(|word| (word.text, word.column, word.tabs)).collect()
    }

    #[test]
    fn escapes_and_comment_marks_are_no_words_but_count_as_columns() {
        assert_eq!(texts("\t\u{1b}[4mGPU0\tNIC0\u{1b}[0m"), [("GPU0", 6, 1), ("NIC0", 11, 1)]);
        assert_eq!(texts("# ^[[4mGPU0^[[0m"), [("GPU0", 8, 0)]);
        assert_eq!(texts(" * GPU0  X \t\t1"), [("GPU0", 4, 0), ("X", 10, 0), ("1", 14, 2)]);
        assert_eq!(texts("[4mGPU0\tID[0m"), [("GPU0", 4, 0), ("ID", 9, 1)]);
        assert_eq!(
            texts("x [0] [m [4x"),
            [("x", 1, 0), ("[0]", 3, 0), ("[m", 7, 0), ("[4x", 10, 0)]
        );
        assert_eq!(texts("| GPU0 | X |"), [("GPU0", 3, 0), ("X", 10, 0)]);
        assert!(texts("|:----|:---:|---:|").is_empty());
        assert_eq!(texts("\u{1b}[ ^[[4"), [("\u{1b}[", 1, 0), ("^[[4", 4, 0)]);
        assert!(words("").is_empty());
    }
}
