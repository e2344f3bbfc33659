//! Where a process has its program and its libraries.

use std::fs;
use std::ops::Range;

/// A file by its device and its number there.
pub(super) type FileId = (String, u64);

/// Code of a file in a process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) range: Range<u64>,
    /// The place in the file of the first byte.
    pub(super) offset: u64,
    pub(super) file: FileId,
    pub(super) path: String,
}

/// All code of a process that is in files.
pub(super) fn mappings(pid: u32) -> Vec<Mapping> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

/// `7f…000-7f…000 r-xp 00026000 fd:00 1234   /usr/lib/libc.so.6`
fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let is_code = words.next()?.contains('x');
    let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
    let offset = hexadecimal(words.next()?)?;
    let device = words.next()?.to_owned();
    let file = (device, words.next()?.parse().ok()?);
    let path = &line[line.find('/')?..];
    let range = hexadecimal(begin)?..hexadecimal(end)?;
    is_code.then(|| Mapping { range, offset, file, path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_mapped() {
        let code = "7f10-7f20 r-xp 00026000 fd:00 1234        /usr/lib/a b.so";
        let mapping = parse(code).expect("code");
        assert_eq!((mapping.range, mapping.offset), (0x7f10..0x7f20, 0x26000));
        assert_eq!((mapping.file.1, &*mapping.path), (1234, "/usr/lib/a b.so"));
        for other in [
            "7f10-7f20 rw-p 00026000 fd:00 1234        /usr/lib/a.so",
            "7f10-7f20 r-xp 00000000 00:00 0           [vdso]",
            "7f10-7f20 r-xp 00000000 00:00 0",
            "",
            "7f10 r-xp",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
