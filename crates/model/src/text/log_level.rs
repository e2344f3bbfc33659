//! How serious a line of a log is, from the formats in which programs write it: `tracing`, Python's
//! `logging`, warnings and tracebacks, Dask, glog (PyTorch, XLA), NCCL, UCX, lines of JSON, and
//! tools that say `error: …`.
//!
//! *Invariant:* only the beginning of a line is looked at, so a long line costs what a short one
//! does.

use std::fmt;
use std::str::FromStr;

/// How serious a line is, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogLevel {
    /// For those who look for a mistake in the program.
    Debug,
    /// What happens.
    Info,
    /// Something is not as it should be.
    Warning,
    /// Something has failed.
    Error,
}

/// Most bytes of a line that are looked at: times, process ids and names come before the level.
const HEAD: usize = 200;

/// Most words before the level; what comes later belongs to the message.
const WORDS: usize = 8;

/// What a line begins with that tells its level by itself.
const BEGINNINGS: [(&str, LogLevel); 8] = [
    ("Traceback (most recent call last):", LogLevel::Error),
    ("thread '", LogLevel::Error),
    ("error:", LogLevel::Error),
    ("Error:", LogLevel::Error),
    ("fatal:", LogLevel::Error),
    ("warning:", LogLevel::Warning),
    ("Warning:", LogLevel::Warning),
    ("note:", LogLevel::Info),
];

impl LogLevel {
    /// The level that a line tells; `None` if it tells none, as the lines of a traceback.
    pub fn of(line: &[u8]) -> Option<Self> {
        let head = &line[..line.len().min(HEAD)];
        let head = without_escapes(&String::from_utf8_lossy(head));
        let head = head.trim_start();
        let beginning = BEGINNINGS.iter().find(|(begin, _)| head.starts_with(begin));
        match beginning {
            Some(("thread '", _)) if !head.contains("' panicked at") => None,
            Some((_, level)) => Some(*level),
            None => of_glog(head).or_else(|| of_json(head)).or_else(|| of_words(head)),
        }
    }

    fn of_word(word: &str) -> Option<Self> {
        match word {
            "ERROR" | "CRITICAL" | "FATAL" | "PANIC" => Some(Self::Error),
            "WARN" | "WARNING" => Some(Self::Warning),
            "INFO" | "NOTICE" | "DIAG" => Some(Self::Info),
            "DEBUG" | "TRACE" => Some(Self::Debug),
            _ => None,
        }
    }
}

/// As in `E0131 23:59:59.123456 …]`, and `[rank0]:[W131 23:59:59 …` of PyTorch (`c10/util`).
fn of_glog(head: &str) -> Option<LogLevel> {
    let after_rank = head.strip_prefix("[rank").and_then(|rest| rest.split_once("]:"));
    let rest = after_rank.map_or(head, |(_, rest)| rest);
    let rest = rest.strip_prefix('[').unwrap_or(rest);
    let mut letters = rest.chars();
    let level = match letters.next()? {
        'E' | 'F' => LogLevel::Error,
        'W' => LogLevel::Warning,
        'I' => LogLevel::Info,
        _ => return None,
    };
    let (day, _) = letters.as_str().split_once(' ')?;
    let is_day = (3..=8).contains(&day.len()) && day.bytes().all(|byte| byte.is_ascii_digit());
    is_day.then_some(level)
}

/// As in `{"timestamp":"…","level":"INFO",…`.
fn of_json(head: &str) -> Option<LogLevel> {
    let after = head.starts_with('{').then(|| head.split_once("\"level\""))??.1;
    let word = after.trim_start_matches([':', ' ', '"']).split('"').next()?;
    LogLevel::of_word(&word.to_uppercase())
}

/// A word in capitals near the beginning, as in `… - distributed.core - INFO - …`,
/// `WARNING:root:…`, `… NCCL WARN …`, `… UCX  ERROR …`, or the category of a Python warning,
/// `…: UserWarning: …`.
fn of_words(head: &str) -> Option<LogLevel> {
    head.split_whitespace().take(WORDS).find_map(|word| {
        if word.ends_with("Warning:") {
            return Some(LogLevel::Warning);
        }
        let name = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        LogLevel::of_word(name.split(':').next().unwrap_or(name))
    })
}

/// A text without what colours it on a terminal: `ESC [ … letter`.
pub fn without_escapes(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !(c.is_ascii_digit() || ";:?".contains(c)));
        let letter = end.and_then(|end| part[end..].chars().next().map(|c| end + c.len_utf8()));
        out.push_str(&part[letter.unwrap_or(part.len())..]);
    }
    out
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// A word that is no level.
#[derive(Debug, thiserror::Error)]
#[error("{word:?} is no level: debug, info, warning or error")]
pub struct NoLevel {
    /// The word.
    pub word: String,
}

impl FromStr for LogLevel {
    type Err = NoLevel;

    fn from_str(word: &str) -> Result<Self, NoLevel> {
        let all = [Self::Debug, Self::Info, Self::Warning, Self::Error];
        let found = all.into_iter().find(|level| level.to_string() == word);
        found.ok_or_else(|| NoLevel { word: word.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_level_is_read_from_the_formats_that_programs_write() {
        use LogLevel::{Debug, Error, Info, Warning};
        for (line, level) in [
            // tracing, plain, with colours, and as JSON.
            ("2026-01-31T23:59:59.000000Z  INFO cuda_cluster_native::worker: ready", Some(Info)),
            ("\u{1b}[2m2026-01-31T23:59:59Z\u{1b}[0m \u{1b}[33m WARN\u{1b}[0m w: x", Some(Warning)),
            (" ERROR cuda_cluster: no", Some(Error)),
            ("2026-01-31T23:59:59.000000Z TRACE cuda_cluster: x", Some(Debug)),
            (r#"{"timestamp":"2026-01-31T23:59:59Z","level":"ERROR","fields":{}}"#, Some(Error)),
            (r#"{"msg":"x","level": "warning"}"#, Some(Warning)),
            // Python.
            ("WARNING:root:something", Some(Warning)),
            ("CRITICAL:app.core:it is over", Some(Error)),
            ("2026-01-31 23:59:59,123 - distributed.worker - INFO - Starting", Some(Info)),
            ("2026-01-31 23:59:59,123 - distributed.worker - ERROR - failed", Some(Error)),
            ("[2026-01-31 23:59:59,123] [DEBUG] [launch.py:12:main] x", Some(Debug)),
            ("/lib/x.py:12: UserWarning: old", Some(Warning)),
            ("Traceback (most recent call last):", Some(Error)),
            ("  File \"x.py\", line 1, in <module>", None),
            ("ValueError: no", None),
            // glog, c10.
            ("E0131 23:59:59.123456 1234 x.cc:12] failed", Some(Error)),
            ("I20260131 23:59:59.123456 1234 x.cc:12] fine", Some(Info)),
            ("[rank0]:[W131 23:59:59.1 ProcessGroupNCCL.cpp:1] x", Some(Warning)),
            ("[rank1]:[E131 23:59:59.1 ProcessGroupNCCL.cpp:1] x", Some(Error)),
            // NCCL, UCX.
            ("host:123:456 [0] NCCL INFO NET/IB : Using mlx5_0", Some(Info)),
            ("host:123:456 [0] misc/socket.cc:40 NCCL WARN no", Some(Warning)),
            ("[1700000000.123456] [host:1   :0]  ib_md.c:300  UCX  ERROR ibv_reg_mr", Some(Error)),
            ("[1700000000.123456] [host:1   :0]  x.c:300  UCX  DIAG  retry", Some(Info)),
            // Tools, Rust.
            ("error: no such file", Some(Error)),
            ("warning: unused", Some(Warning)),
            ("note: fine", Some(Info)),
            ("thread 'main' panicked at src/main.rs:1:1:", Some(Error)),
            ("thread 'main' goes on", None),
            // None of these.
            ("", None),
            ("step 12, loss 0.3", None),
            ("Every information is here", None),
            ("I am here", None),
            ("E = mc2", None),
            ("a b c d e f g h ERROR is a word of the message", None),
        ] {
            assert_eq!(LogLevel::of(line.as_bytes()), level, "{line}");
        }
    }

    #[test]
    fn colours_are_left_out_and_nothing_else() {
        for (text, plain) in [
            ("a\u{1b}[31mred\u{1b}[0m b", "ared b"),
            ("\u{1b}[38:2:1;2;3mx", "x"),
            ("cut \u{1b}[3", "cut "),
            ("\u{1b}]0;title", "\u{1b}]0;title"),
            ("\u{1b}[é", ""),
        ] {
            assert_eq!(without_escapes(text), plain, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_level_or_none(line in proptest::collection::vec(any::<u8>(), 0..400)) {
            let level = LogLevel::of(&line);
            let head = &line[..line.len().min(HEAD)];
            prop_assert_eq!(LogLevel::of(head), level, "by the beginning alone");
        }

        #[test]
        fn a_level_reads_as_it_is_written(word in "[a-z]{0,8}") {
            if let Ok(level) = word.parse::<LogLevel>() {
                prop_assert_eq!(level.to_string(), word);
            }
        }
    }
}
