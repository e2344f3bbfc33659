//! The lines of a log that tell why a process ended or hangs.
//!
//! The last lines alone may not: UCX prints its error and then a backtrace of twenty lines, and
//! what repeats an error fills any tail.
//!
//! *Invariant:* an excerpt has at most as many lines as asked for, in their order; wherever lines
//! are left out, a line in brackets says how many.

use std::path::Path;
use std::time::SystemTime;

use super::log_file;
use super::log_repeats::shape;

/// Lines of a backtrace that are kept.
const FRAMES: usize = 4;

/// Words in the line with which trouble begins.
const TROUBLE: [&str; 8] =
    ["fatal", "error", "panicked", "abort", "assert", "exception", "traceback", "failed"];

/// At most `most` lines of the log at `path` that were written since `since`; none if the log can't
/// be read.
pub fn excerpt(path: &Path, since: SystemTime, most: usize) -> Vec<String> {
    let lines = log_file::last_stored(path).into_iter().filter(|line| line.at >= since);
    chosen(lines.map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect(), most)
}

/// The last lines, without most of the backtraces and repetitions among them. If the first sign of
/// trouble is before those, it comes first.
fn chosen(lines: Vec<String>, most: usize) -> Vec<String> {
    let is_frame = |line: &String| is_frame(line);
    let lines = fold(lines, |run| run.iter().all(is_frame), FRAMES, 0, "of a backtrace");
    let alike = |run: &[String]| match run {
        [.., before, last] => shape(before.as_bytes()) == shape(last.as_bytes()),
        _ => true,
    };
    let mut lines = fold(lines, alike, 1, 1, "like it");
    let Some(tail) = lines.len().checked_sub(most).filter(|surplus| *surplus > 0) else {
        return lines;
    };
    let trouble = |line: &String| {
        let line = line.to_ascii_lowercase();
        TROUBLE.iter().any(|word| line.contains(word))
    };
    let head = most / 4;
    if let (Some(at), true) = (lines[..tail].iter().position(trouble), head > 0) {
        let mut excerpt = lines[at..at + head].to_vec();
        let rest = tail + head + 1;
        excerpt.push(format!("[{} more lines]", rest - at - head));
        excerpt.extend(lines.drain(rest..));
        return excerpt;
    }
    lines.drain(..tail);
    lines
}

/// Shortens each longest run of lines that belong together, as `one` decides for a run and its next
/// line, to its `first` and `last` lines.
fn fold(
    lines: Vec<String>,
    one: impl Fn(&[String]) -> bool,
    first: usize,
    last: usize,
    what: &str,
) -> Vec<String> {
    let mut folded = Vec::with_capacity(lines.len());
    let mut rest = &lines[..];
    while !rest.is_empty() {
        let longer = |length: &usize| one(&rest[..*length]);
        let length = (1..=rest.len()).take_while(longer).last().unwrap_or(1);
        let (run, after) = rest.split_at(length);
        if length > first + last + 1 {
            folded.extend_from_slice(&run[..first]);
            folded.push(format!("[{} more lines {what}]", length - first - last));
            folded.extend_from_slice(&run[length - last..]);
        } else {
            folded.extend_from_slice(run);
        }
        rest = after;
    }
    folded
}

/// Whether it is a line of a backtrace: ` 3  /lib/libucs.so.0(+0x2f4) [0x7f1]` from UCX, `   3:
/// core::panicking::panic` and `at src/main.rs:7` from Rust.
fn is_frame(line: &str) -> bool {
    let line = line.trim_start();
    let after = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered =
        after.len() < line.len() && (after.starts_with(": ") || after.starts_with("  /"));
    numbered || line.starts_with("at /") || line.starts_with("at ./")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    /// What UCX 1.13 prints when a port goes down under it.
    fn crash(frames: usize) -> Vec<String> {
        let mut said = lines(
            "INFO UCX is open\nINFO ready peers=7\n\
             [1700000000.123456] [host:1234 :0]  ud_verbs.c:399  Fatal: send completion failed\n\
             ==== backtrace (tid:   1234) ====",
        );
        said.extend((0..frames).map(|n| format!("{n:2}  /lib/libucs.so.0(ucs_x+0x{n}) [0x7f{n}]")));
        said.push("=================================".to_owned());
        said
    }

    #[test]
    fn the_error_above_a_long_backtrace_is_in_the_excerpt() {
        let excerpt = chosen(crash(40), 20);
        assert!(excerpt.iter().any(|line| line.contains("Fatal: send completion")), "{excerpt:#?}");
        assert!(excerpt.contains(&"[36 more lines of a backtrace]".to_owned()), "{excerpt:#?}");
        assert!(excerpt.len() <= 20);
        assert_eq!(chosen(crash(3), 20), crash(3), "a short one is not shortened");
    }

    #[test]
    fn the_first_sign_of_trouble_is_kept_and_the_gap_is_counted() {
        let mut said = lines("fine\nUCX ERROR no memory\n");
        said.extend(('a'..='z').cycle().take(200).map(|letter| format!("then {letter}")));
        let excerpt = chosen(said, 20);
        assert_eq!(excerpt.len(), 20);
        assert_eq!(excerpt[0], "UCX ERROR no memory");
        assert_eq!(excerpt[5], "[182 more lines]");
        assert_eq!(excerpt[19], "then r");
    }

    #[test]
    fn repetitions_are_counted_and_the_last_is_kept() {
        let said = (1..=900).map(|step| format!("step {step} failed")).collect();
        assert_eq!(
            chosen(said, 20),
            ["step 1 failed", "[898 more lines like it]", "step 900 failed"]
        );
    }

    proptest! {
        #[test]
        fn an_excerpt_is_never_too_long_and_ends_with_the_last_line(
            said in proptest::collection::vec("(error|fine|at /x| 3: y)( [a-c])?", 0..80),
            most in 4usize..30,
        ) {
            let last = said.last().cloned();
            let excerpt = chosen(said, most);
            prop_assert!(excerpt.len() <= most);
            let bracketed = excerpt.last().is_some_and(|line| line.starts_with('['));
            prop_assert!(bracketed || excerpt.last() == last.as_ref());
        }
    }
}
