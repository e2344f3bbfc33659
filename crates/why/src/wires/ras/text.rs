//! RAS's answer as text.
//!
//! Reads no JSON.
//!
//! *Invariant:* each line is read alone, within the section and the communicator that it is in.

use super::{Communicator, Count, Operation, Process, Rank, Status};

/// The answer, if the text has one.
pub(super) fn parse(text: &str) -> Option<Status> {
    let begins = ["Job summary", "Communicators...", "Group     Comms"];
    if !text.lines().any(|line| begins.iter().any(|begin| line.trim().starts_with(begin))) {
        return None;
    }
    let mut reader = Reader::default();
    for line in text.lines() {
        reader.read(line.trim_end());
    }
    let mut status = reader.status;
    let groups: Vec<Communicator> =
        status.communicators.iter().filter(|one| one.size > 0).cloned().collect();
    for one in &mut status.communicators {
        let group = one.name.split_once('-').map_or("", |(group, _)| group);
        if let Some(group) = groups.iter().find(|other| other.name == group) {
            (one.size, one.status) = (group.size, group.status.clone());
        }
        // RAS writes the largest groups first.
        for operation in &mut one.operations {
            operation.counts.sort_by_key(|count| std::cmp::Reverse(count.launched));
        }
    }
    Some(status)
}

#[derive(Default)]
struct Reader {
    status: Status,
    section: Section,
    /// Whether the table of groups has begun.
    table: bool,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Section {
    #[default]
    None,
    Missing,
    Dead,
    /// The last communicator.
    Communicator,
}

impl Reader {
    fn read(&mut self, line: &str) {
        let words = line.trim();
        if let Some(rest) = words.strip_prefix("NCCL version ") {
            let version = rest.split_whitespace().next();
            self.status.nccl = self.status.nccl.take().or(version.map(str::to_owned));
        } else if words.starts_with("Group ") {
            self.table = true;
        } else if words == "INCOMPLETE" {
            self.section = Section::Missing;
        } else if words == "DEAD" {
            self.section = Section::Dead;
        } else if let Some(head) = line.strip_prefix('#') {
            self.communicator(head);
        } else if let Some(rest) = words.strip_prefix("Encountered ") {
            self.status.timeouts = number(rest).unwrap_or(0);
        } else if words.is_empty() && self.status.communicators.len() > 1 {
            self.table = false;
        } else if self.section == Section::None && self.table {
            self.status.communicators.extend(group(words));
        } else {
            self.detail(words);
        }
    }

    /// `#0-0 (fa93daea854b060b) MISMATCH`.
    fn communicator(&mut self, head: &str) {
        let Some((name, rest)) = head.split_once(" (") else { return };
        let Some((hash, _)) = rest.split_once(')') else { return };
        self.section = Section::Communicator;
        let name = format!("#{name}");
        let known = self.status.communicators.last().is_some_and(|last| last.name == name);
        if !known {
            let hash = hash.to_owned();
            self.status.communicators.push(Communicator {
                name,
                hash,
                alike: 1,
                ..Communicator::default()
            });
        }
    }

    fn detail(&mut self, words: &str) {
        match self.section {
            Section::Missing => self.status.missing.extend(process_line(words)),
            Section::Dead => self.status.dead.extend(process_line(words)),
            Section::Communicator => {
                if let Some(last) = self.status.communicators.last_mut() {
                    of_communicator(last, words);
                }
            }
            Section::None => {}
        }
    }
}

/// `0  1  4  8  32  32  RUNNING  MISMATCH`; the ranks per node may be `7-8`.
fn group(words: &str) -> Option<Communicator> {
    let cells: Vec<&str> = words.split_whitespace().collect();
    let [number, alike, _, _, size, _, status, ..] = cells.as_slice() else { return None };
    Some(Communicator {
        name: format!("#{}", number.parse::<u64>().ok()?),
        alike: alike.parse().ok()?,
        size: size.rsplit('-').next()?.parse().ok()?,
        status: (*status).to_owned(),
        ..Communicator::default()
    })
}

/// What stands under a communicator's head.
fn of_communicator(one: &mut Communicator, words: &str) {
    if let Some(rest) = words.strip_prefix("Communicator ranks have different ") {
        let name = rest.strip_suffix(" operation counts").unwrap_or(rest);
        one.operations.push(Operation { name: name.to_owned(), counts: Vec::new() });
    } else if let Some(rest) = words.strip_prefix("The missing rank") {
        let ranks = rest.split(|letter: char| !letter.is_ascii_digit());
        let rank = |text: &str| Some(Rank { rank: text.parse().ok()?, process: None });
        one.missing.extend(ranks.filter_map(rank));
    } else if words.contains(" errors on ") || words.contains(" error on ") {
        one.errors.push(words.to_owned());
    } else if let Some((ranks, rest)) = words.split_once(" ranks have ") {
        let (Ok(ranks), Some(launched)) = (ranks.parse(), launched(rest)) else { return };
        counted(one, Count { launched, ranks, named: Vec::new() });
    } else if let Some(rest) = words.strip_prefix("Rank ") {
        rank_line(one, rest);
    }
}

/// `12 -- GPU 4 managed by …` belongs to the count before it, `5 has launched up to …` has its own.
fn rank_line(one: &mut Communicator, rest: &str) {
    let (what, place) = rest.split_once(" -- ").unwrap_or((rest, ""));
    let (number, said) = what.split_once(' ').unwrap_or((what, ""));
    let Ok(rank) = number.parse() else { return };
    let rank = Rank { rank, process: gpu_line(place) };
    if let Some(error) = said.strip_prefix("reported ") {
        one.errors.push(format!("rank {rank} reported {error}"));
        return;
    }
    let launched = said.strip_prefix("has ").and_then(launched);
    match (launched, one.operations.last_mut()) {
        (Some(launched), Some(_)) => {
            counted(one, Count { launched, ranks: 1, named: vec![rank] });
        }
        (None, Some(operation)) if said.is_empty() => {
            if let Some(count) = operation.counts.last_mut() {
                count.named.push(rank);
            }
        }
        (None, None) if said.is_empty() && one.errors.is_empty() => one.missing.push(rank),
        _ => {}
    }
}

fn counted(one: &mut Communicator, count: Count) {
    if let Some(operation) = one.operations.last_mut() {
        operation.counts.push(count);
    }
}

/// `launched up to operation 640`, `not launched any operations`.
fn launched(text: &str) -> Option<u64> {
    match text.strip_prefix("launched up to operation ") {
        Some(number) => number.trim().parse().ok(),
        None => text.starts_with("not launched any operations").then_some(0),
    }
}

/// `Process 60004 on node 192.0.2.13 managing GPU 0`.
fn process_line(words: &str) -> Option<Process> {
    let (pid, rest) = words.strip_prefix("Process ")?.split_once(" on node ")?;
    let (host, gpus) = rest.split_once(" managing GPU").unwrap_or((rest, ""));
    let gpus = gpus.trim_start_matches('s').trim();
    Some(Process { pid: pid.parse().ok()?, host: host.to_owned(), gpus: gpus.to_owned() })
}

/// `GPU 4 managed by process 3032 on node 192.0.2.24`.
fn gpu_line(words: &str) -> Option<Process> {
    let (gpu, rest) = words.strip_prefix("GPU ")?.split_once(" managed by process ")?;
    let (pid, host) = rest.split_once(" on node ")?;
    Some(Process { pid: pid.parse().ok()?, host: host.to_owned(), gpus: gpu.to_owned() })
}

/// The number that a text begins with.
fn number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}
