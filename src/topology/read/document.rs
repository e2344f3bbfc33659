//! The project's own form, as YAML or JSON.
//!
//! Fills what a hand-written file may leave out because the rest of it says so: the NUMA node of a
//! device (from the bridges above it), a GPU's CPUs (from its NUMA node), and the links (from
//! bridges and NVLinks). An explicit `null` or `[]` is left as it is: it says "unknown".
//!
//! *Invariant:* what is read has passed [`consistency::check`].

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::locate::locate;
use super::{Fault, Format, Position, consistency};
use crate::cpuset::CpuSet;
use crate::ids::NumaId;
use crate::topology::{Topology, VERSION};

/// Why YAML or JSON is no topology.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DocumentError {
    /// It is not well-formed.
    #[error("{position}: not well-formed {format}: {problem}")]
    Syntax {
        /// Which of the two it was read as.
        format: Format,
        /// Where.
        position: Position,
        /// The parser's words.
        problem: String,
    },
    /// A key has a value that it cannot have, or a key is missing.
    #[error("{position}: {path}: {problem}")]
    Value {
        /// Where.
        position: Position,
        /// Key path, like `gpus[3].pci`.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// There is no such key.
    #[error("{position}: {path}: there is no such key")]
    UnknownKey {
        /// Where.
        position: Position,
        /// Key path, like `gpus[3].nuam`.
        path: String,
        /// The keys that may stand there.
        known: Vec<String>,
    },
    /// It is of another version of this form, or says none.
    #[error("{position}: version: {found} is not supported; this program reads version {VERSION}")]
    Version {
        /// Where.
        position: Position,
        /// What the document says.
        found: String,
    },
    /// Its parts contradict each other.
    #[error("{position}: {path}: {fault}")]
    Inconsistent {
        /// Where.
        position: Position,
        /// Key path, like `gpus[3].parent`.
        path: String,
        /// What contradicts what.
        fault: Fault,
    },
}

impl DocumentError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            DocumentError::Syntax { .. }
            | DocumentError::Value { .. }
            | DocumentError::Inconsistent { .. } => None,
            DocumentError::UnknownKey { path, known, .. } => Some(nearest_key(path, known)),
            DocumentError::Version { .. } => {
                Some(format!("write `version: {VERSION}` if the file is of that form"))
            }
        }
    }
}

fn nearest_key(path: &str, known: &[String]) -> String {
    let key = path.rsplit('.').next().unwrap_or(path);
    let likeness = |other: &String| strsim::jaro_winkler(key, other);
    let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    match nearest.filter(|name| likeness(name) > 0.7) {
        Some(name) => format!("did you mean `{name}`?"),
        None => format!("the keys here are {}", known.join(", ")),
    }
}

/// Which keys a document has, whatever their values are.
#[derive(Deserialize)]
struct Outline {
    version: Option<IgnoredAny>,
    #[serde(default)]
    gpus: Vec<BTreeMap<String, IgnoredAny>>,
    #[serde(default)]
    nics: Vec<BTreeMap<String, IgnoredAny>>,
    links: Option<IgnoredAny>,
}

/// Only the version, as it is written.
#[derive(Deserialize)]
struct Head {
    version: serde_json::Value,
}

/// Deepest nesting of brackets. Ours is four; the YAML parser's time grows with length times depth.
const DEPTH_LIMIT: usize = 64;

/// Most of length times depth where it is not certain what closes.
const WORK_LIMIT: usize = 1 << 26;

/// Refuses nesting that would keep the parser busy, before it sees it.
///
/// Outside of brackets a bracket within a word (`mlx5_{`) opens nothing, unless the word is an
/// anchor or a tag. Within brackets a quoted text that is whole on its line is passed over; once
/// there is any other quote, or a comment, nothing is taken to close. JSON's parser has a limit of
/// its own.
fn check_depth(text: &str, format: Format) -> Result<(), DocumentError> {
    if format == Format::Json {
        return Ok(());
    }
    let (mut depth, mut certain) = (0usize, true);
    // What precedes a byte: whether something may begin there, and the first byte of its word.
    let (mut begins, mut word) = (true, b' ');
    // The last byte that is no blank, and where a quoted text ends that was passed over.
    let (mut last, mut passed) = (b' ', 0);
    for (at, byte) in text.bytes().enumerate() {
        if at < passed {
            continue;
        }
        if depth > 0
            && matches!(last, b',' | b':' | b'[' | b'{')
            && let Some(length) = quoted(&text.as_bytes()[at..])
        {
            (begins, word, last, passed) = (false, b'"', b'"', at + length);
            continue;
        }
        if !byte.is_ascii_whitespace() {
            last = byte;
        }
        match byte {
            b'[' | b'{' if depth > 0 || begins || matches!(word, b'&' | b'!' | b'*') => depth += 1,
            b']' | b'}' if certain => depth = depth.saturating_sub(1),
            b'"' | b'\'' | b'#' if depth > 0 => certain = false,
            _ => {}
        }
        begins = byte.is_ascii_whitespace() || matches!(byte, b',' | b':' | b'-');
        word = match byte {
            _ if byte.is_ascii_whitespace() => b' ',
            _ if word == b' ' => byte,
            _ => word,
        };
        let busy = certain || depth.saturating_mul(text.len()) > WORK_LIMIT;
        if depth > DEPTH_LIMIT && busy {
            let before = &text[..at];
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            let position = Position { line: before.matches('\n').count() + 1, column };
            let problem = "brackets are nested too deeply".to_owned();
            return Err(DocumentError::Syntax { format, position, problem });
        }
    }
    Ok(())
}

/// The length of the quoted text that these bytes begin with, if it has nothing in it that would
/// make its end uncertain.
fn quoted(bytes: &[u8]) -> Option<usize> {
    let quote = *bytes.first().filter(|byte| matches!(byte, b'"' | b'\''))?;
    let end =
        1 + bytes[1..].iter().position(|byte| matches!(byte, b'"' | b'\'' | b'\\' | b'\n'))?;
    let doubled = bytes.get(end + 1) == Some(&quote);
    (bytes[end] == quote && !doubled).then_some(end + 1)
}

/// Reads a topology.
pub(super) fn read(text: &str, format: Format) -> Result<Topology, DocumentError> {
    check_depth(text, format)?;
    let outline: Outline = deserialize(text, format)?;
    let found = match outline.version {
        None => "a missing version".to_owned(),
        Some(IgnoredAny) => deserialize::<Head>(text, format)?.version.to_string(),
    };
    if found != VERSION.to_string() {
        let position = position_of(text, "version");
        return Err(DocumentError::Version { position, found });
    }
    let mut topology: Topology = deserialize(text, format)?;
    super::without_zeroed_uuids(&mut topology);
    consistency::check(&topology).map_err(|(path, fault)| DocumentError::Inconsistent {
        position: position_of(text, &path),
        path,
        fault,
    })?;
    fill(&mut topology, &outline);
    Ok(topology)
}

/// Fills what the document leaves to its bridges and NUMA nodes.
fn fill(topology: &mut Topology, outline: &Outline) {
    let numa_above: Vec<Option<NumaId>> = {
        let ancestry = topology.ancestry();
        let gpus = topology.gpus.iter().map(|gpu| ancestry.numa(gpu.parent.as_deref()));
        gpus.chain(topology.nics.iter().map(|nic| ancestry.numa(nic.parent.as_deref()))).collect()
    };
    let (above_gpus, above_nics) = numa_above.split_at(topology.gpus.len());
    let cpus_of: BTreeMap<NumaId, Option<CpuSet>> =
        topology.numa.iter().map(|node| (node.id, node.cpus.clone())).collect();
    for ((gpu, keys), above) in topology.gpus.iter_mut().zip(&outline.gpus).zip(above_gpus) {
        if !keys.contains_key("numa") {
            gpu.numa = *above;
        }
        if !keys.contains_key("cpus") {
            gpu.cpus = gpu.numa.and_then(|id| cpus_of.get(&id).cloned().flatten());
        }
    }
    for ((nic, keys), above) in topology.nics.iter_mut().zip(&outline.nics).zip(above_nics) {
        if !keys.contains_key("numa") {
            nic.numa = *above;
        }
    }
    if outline.links.is_none() {
        topology.links = topology.derive_links();
    }
}

fn deserialize<T: DeserializeOwned>(text: &str, format: Format) -> Result<T, DocumentError> {
    match format {
        Format::Json => {
            let mut deserializer = serde_json::Deserializer::from_str(text);
            let read = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
                let cause = error.inner();
                let position = Position { line: cause.line(), column: cause.column().max(1) };
                let syntax = !cause.is_data();
                refusal(text, format, &error, Some(position), syntax)
            })?;
            deserializer.end().map(|()| read).map_err(|error| DocumentError::Syntax {
                format,
                position: Position { line: error.line(), column: error.column().max(1) },
                problem: without_place(&error.to_string()).to_owned(),
            })
        }
        _ => {
            let deserializer = serde_yaml::Deserializer::from_str(text);
            serde_path_to_error::deserialize(deserializer).map_err(|error| {
                let location = error.inner().location();
                let position = location.map(|at| Position { line: at.line(), column: at.column() });
                // What cannot be read even as "anything" is damaged; other errors are a value's.
                let anything = serde_yaml::Deserializer::from_str(text);
                let syntax = IgnoredAny::deserialize(anything).is_err();
                refusal(text, format, &error, position, syntax)
            })
        }
    }
}

/// Turns a parser's error into ours: at the value when its path can be found, else where the
/// parser stood.
fn refusal<E: std::fmt::Display>(
    text: &str,
    format: Format,
    error: &serde_path_to_error::Error<E>,
    parser_at: Option<Position>,
    syntax: bool,
) -> DocumentError {
    let start = Position { line: 1, column: 1 };
    let path = error.path().to_string();
    let words = error.inner().to_string();
    let words = without_place(&words);
    // serde_yaml puts the path in front, or as much of it as it knows.
    let problem = match words.split_once(": ") {
        Some((before, problem)) if path.starts_with(before) => problem,
        _ => words,
    };
    let problem = problem.to_owned();
    if syntax {
        return DocumentError::Syntax { format, position: parser_at.unwrap_or(start), problem };
    }
    let position = locate(text, &path).or(parser_at).unwrap_or(start);
    let path = if path == "." { "the document".to_owned() } else { path };
    match problem.strip_prefix("unknown field ") {
        Some(keys) => {
            // In serde's words every key stands between back quotes, the unknown one first.
            let keys = keys.split('`').skip(1).step_by(2).skip(1);
            DocumentError::UnknownKey { position, path, known: keys.map(str::to_owned).collect() }
        }
        None => DocumentError::Value { position, path, problem },
    }
}

/// A parser's message without its own ` at line 3 column 7`.
fn without_place(words: &str) -> &str {
    words.rfind(" at line ").map_or(words, |end| &words[..end])
}

fn position_of(text: &str, path: &str) -> Position {
    locate(text, path).unwrap_or(Position { line: 1, column: 1 })
}
