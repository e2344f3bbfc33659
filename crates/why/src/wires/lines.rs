//! Text as records: one for each thing that a process has said, with who said it.
//!
//! Knows where NCCL and UCX write names, and nothing of what they say.
//!
//! *Invariant:* no record is longer than its line: what one rank has said is not given to another.

use std::borrow::Cow;

/// Something that a process has said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Record<'a> {
    /// The machine, as far as it is named; else empty.
    pub(super) host: &'a str,
    /// `host:pid`, as far as it is named; else empty.
    pub(super) process: &'a str,
    /// What it said, without its name.
    pub(super) body: &'a str,
    /// With its name.
    pub(super) whole: &'a str,
    by_nccl: bool,
}

impl Record<'_> {
    /// Whether it is NCCL or UCX that has said so.
    pub(super) fn speaks(&self) -> bool {
        self.by_nccl || is_ucx(self.whole)
    }
}

/// The lines, without colours; a line that a terminal has broken after `via` is whole again.
pub(super) fn lines(text: &str) -> Vec<Cow<'_, str>> {
    let mut lines: Vec<Cow<'_, str>> = Vec::new();
    for line in text.lines() {
        let line = without_colours(line.trim_end());
        match lines.last_mut() {
            Some(last) if last.ends_with(" via") && line.trim_start().starts_with(WIRES) => {
                *last = format!("{last} {}", line.trim_start()).into();
            }
            _ => lines.push(line),
        }
    }
    lines
}

const WIRES: [char; 4] = ['N', 'P', 'S', 'd'];

fn without_colours(line: &str) -> Cow<'_, str> {
    if !line.contains('\u{1b}') {
        return line.into();
    }
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        text.push_str(before);
        let sequence = after.strip_prefix('[').unwrap_or(after);
        let end = sequence.find(|letter: char| letter.is_ascii_alphabetic());
        rest = end.and_then(|end| sequence.get(end + 1..)).unwrap_or("");
    }
    text.push_str(rest);
    text.into()
}

/// What has been said in a line: mostly one thing, but lines of several processes run together.
pub(super) fn records(line: &str) -> Vec<Record<'_>> {
    let marks: Vec<(usize, usize)> = marks(line);
    if marks.is_empty() {
        let process = ucx_process(line);
        let host = process.rsplit_once(':').map_or("", |(host, _)| host);
        return vec![Record {
            host,
            process,
            body: line.trim(),
            whole: line.trim(),
            by_nccl: false,
        }];
    }
    let names: Vec<(usize, &str)> = marks.iter().map(|(mark, _)| name(line, *mark)).collect();
    let one = |(at, (_, end)): (usize, &(usize, usize))| {
        let (start, process) = names.get(at).copied().unwrap_or((0, ""));
        let next = names.get(at + 1).map_or(line.len(), |(next, _)| *next);
        Record {
            host: process.rsplit_once(':').map_or("", |(host, _)| host),
            process,
            body: line.get(*end..next).unwrap_or("").trim(),
            whole: line.get(start..next).unwrap_or("").trim(),
            by_nccl: true,
        }
    };
    marks.iter().enumerate().map(one).collect()
}

/// Where NCCL says that it speaks: the start and the end of `NCCL INFO `.
fn marks(line: &str) -> Vec<(usize, usize)> {
    let end = |start: usize| {
        let rest = line.get(start..).unwrap_or("");
        ["NCCL INFO", "NCCL WARN", "NCCL TRACE", "NCCL ERROR"]
            .into_iter()
            .find(|mark| rest.starts_with(mark))
            .map(|mark| (start, start + mark.len()))
    };
    line.match_indices("NCCL ").filter_map(|(start, _)| end(start)).collect()
}

/// Before a mark stand `host:pid:tid [gpu] ` and, in warnings, `file:line `: where that begins, and
/// the process.
fn name(line: &str, mark: usize) -> (usize, &str) {
    let mut rest = line.get(..mark).unwrap_or("").trim_end();
    let mut start = rest.len();
    for _ in 0..3 {
        let from = rest.rfind(char::is_whitespace).map_or(0, |space| {
            space + rest.get(space..).and_then(|rest| rest.chars().next()).map_or(1, char::len_utf8)
        });
        let word = rest.get(from..).unwrap_or("");
        if let Some(process) = process(word) {
            return (from, process);
        }
        if !is_gpu(word) && !is_place(word) {
            break;
        }
        start = from;
        rest = rest.get(..from).unwrap_or("").trim_end();
    }
    (start, "")
}

/// `host:pid` of `host:pid:tid`, behind what a launcher has written before it.
fn process(word: &str) -> Option<&str> {
    let (rest, tid) = word.rsplit_once(':')?;
    let (host, pid) = rest.rsplit_once(':')?;
    let numbers = is_number(tid) && is_number(pid);
    let start = host.rfind(':').map_or(0, |colon| colon + 1);
    if numbers { rest.get(start..) } else { None }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_gpu(word: &str) -> bool {
    word.strip_prefix('[').and_then(|word| word.strip_suffix(']')).is_some_and(is_number)
}

fn is_place(word: &str) -> bool {
    word.rsplit_once(':').is_some_and(|(file, line)| file.contains('.') && is_number(line))
}

/// `host:pid` of `[1700000001.5] [host:pid:tid]`; some put a space before the last colon.
fn ucx_process(line: &str) -> &str {
    let inside = line.split_once("] [").and_then(|(_, rest)| rest.split_once(']'));
    let whole = inside.and_then(|(name, _)| name.rsplit_once(':')).map(|(name, _)| name.trim_end());
    let named = |name: &&str| name.rsplit_once(':').is_some_and(|(_, pid)| is_number(pid));
    whole.filter(named).unwrap_or("")
}

/// Whether UCX says that it speaks.
fn is_ucx(line: &str) -> bool {
    let level = |rest: &str| {
        let word = rest.trim_start();
        ["INFO", "WARN", "ERROR", "DEBUG", "DIAG", "TRACE"].iter().any(|one| word.starts_with(one))
    };
    line.match_indices("UCX ").any(|(at, mark)| line.get(at + mark.len()..).is_some_and(level))
}

/// What NCCL says in every job.
const USUAL: [&str; 28] = [
    "Trees ",
    "Tree ",
    "Setting affinity",
    "P2P Chunksize",
    "Connected all",
    "Connected to proxy",
    "Connected NVLS",
    "threadThresholds",
    "coll channels",
    "comm 0x",
    "ncclCommInitRank",
    "Init timings",
    "Using ",
    "NET/",
    "TUNER/",
    "PROFILER/",
    "ENV/",
    "Bootstrap",
    "cudaDriverVersion",
    "set by environment",
    "set to ",
    "NVLS",
    "MNNVL",
    "Proxy",
    "proxy",
    "DMA-BUF",
    "Launch mode",
    "Plugin Path",
];

/// Whether it is what NCCL says in every job: nothing follows from it.
pub(super) fn is_usual(record: &Record<'_>) -> bool {
    let body = record.body;
    let order = || {
        let rest = body.strip_prefix("Channel ").and_then(|rest| rest.split_once(':'));
        rest.is_some_and(|(_, ranks)| ranks.split_whitespace().all(is_number))
    };
    record.by_nccl && (USUAL.iter().any(|usual| body.contains(usual)) || order() || is_trace(body))
}

/// `transport/net.cc:592 -> 2`: by what way an error came.
fn is_trace(body: &str) -> bool {
    body.split_once(" -> ").is_some_and(|(place, _)| is_place(place.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(line: &str) -> Record<'_> {
        let records = records(line);
        assert_eq!(records.len(), 1, "{line}");
        records[0]
    }

    #[test]
    fn a_line_says_who_speaks() {
        let record = only("node-a:11:21 [3] NCCL INFO Connected all rings");
        assert_eq!((record.host, record.process), ("node-a", "node-a:11"));
        assert_eq!(record.body, "Connected all rings");
        let record = only("[1,2]<stdout>:node-a:12:22 [0] init.cc:497 NCCL WARN Duplicate GPU");
        assert_eq!((record.host, record.body), ("node-a", "Duplicate GPU"));
        assert_eq!(only("[3] include/shm.h:28 NCCL WARN Call").process, "");
        assert_eq!(only("[1.5] [node-a:101 :0]  select.c:438  UCX  ERROR x").process, "node-a:101");
    }

    #[test]
    fn lines_that_ran_together_are_parted() {
        let line = "NCCL INFO a -> b     n:1:2 [2] NCCL INFO c     n:3:4 [0] x.cc:4 NCCL WARN d";
        let all: Vec<(&str, &str)> =
            records(line).iter().map(|record| (record.process, record.body)).collect();
        assert_eq!(all, [("", "a -> b"), ("n:1", "c"), ("n:3", "d")]);
    }

    #[test]
    fn colours_go_and_broken_lines_are_whole_again() {
        let lines = lines("\u{1b}[33mone\u{1b}[0m\nx via\n  NET/IB/0\nx via\n\u{1b}");
        assert_eq!(lines, ["one", "x via NET/IB/0", "x via", ""]);
    }
}
