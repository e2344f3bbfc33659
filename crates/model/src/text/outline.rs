//! The outline of a YAML or JSON text: how deeply it is nested, and where each key path is.
//!
//! Does not interpret scalars.
//!
//! *Invariant:* for a text that passes [`check`], `serde_yaml` takes time proportional to its
//! length.

use std::fmt::Write;

use saphyr_parser::{Event, Marker, Parser};

use super::{Place, Position};

/// Deepest nesting of lists and mappings; ours have less than ten levels. The time of libyaml,
/// on which `serde_yaml` is based, grows with the length of a text times the depth of its brackets.
pub(super) const DEPTH_LIMIT: usize = 64;

/// What is said about a text that is nested more deeply.
pub(super) const TOO_DEEP: &str = "it is nested too deeply";

/// Why a text has no outline.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) at: Position,
    pub(super) message: String,
    /// Characters before it; `None` if the text is nested too deeply.
    offset: Option<usize>,
}

/// Refuses a text that is nested too deeply. A text that is not well-formed passes if what follows
/// the fault cannot be nested deeply: `serde_yaml` then gives the better error.
pub(super) fn check(text: &str) -> Result<(), Fault> {
    walk(text, |_, _| ()).or_else(|fault| {
        let Some(offset) = fault.offset else { return Err(fault) };
        // Only brackets cost libyaml time, and `serde_yaml` itself limits how deeply it descends.
        let brackets = text.chars().skip(offset).filter(|c| matches!(c, '[' | '{'));
        if brackets.take(DEPTH_LIMIT).count() < DEPTH_LIMIT { Ok(()) } else { Err(fault) }
    })
}

/// Where a key path (`gpus[3].pci`) is, or the longest leading part of it that the text has. If a
/// key occurs several times, the `nth`.
pub fn find(text: &str, path: &str, nth: usize) -> Option<Place> {
    let (mut best, mut seen) = (None, 0);
    let visit = |here: &str, place: Place| {
        let rest = path.strip_prefix(here);
        if here.is_empty()
            || !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        {
            return;
        }
        let exact = here.len() == path.len() && seen < nth;
        seen += usize::from(exact);
        if exact || best.is_none_or(|(length, _)| length < here.len()) {
            best = Some((here.len(), place));
        }
    };
    // If the text has a fault, everything before it has been visited.
    let _ = walk(text, visit);
    best.map(|(_, place)| place)
}

/// A list or mapping whose end has not come yet.
struct Open {
    /// Length of its own path.
    path: usize,
    inside: Inside,
}

enum Inside {
    /// The number of the next item.
    List(usize),
    /// The key whose value comes next.
    Mapping(Option<(Position, String)>),
}

/// Visits every value with its key path, in the order of the text.
fn walk(text: &str, mut visit: impl FnMut(&str, Place)) -> Result<(), Fault> {
    let mut open: Vec<Open> = Vec::new();
    let mut path = String::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| match error.info() {
            // The parser has its own limit, and looks ahead.
            "recursion limit exceeded" => too_deep(error.marker()),
            message => Fault {
                at: position(error.marker()),
                message: message.to_owned(),
                offset: Some(error.marker().index()),
            },
        })?;
        let at = position(&span.start);
        let inside = match &event {
            Event::SequenceStart(..) => Some(Inside::List(0)),
            Event::MappingStart(..) => Some(Inside::Mapping(None)),
            Event::Scalar(..) | Event::Alias(_) => None,
            Event::SequenceEnd | Event::MappingEnd => {
                open.pop();
                continue;
            }
            _ => continue,
        };
        let place = match open.last_mut() {
            None => Some(Place::both(at)),
            Some(parent) => {
                path.truncate(parent.path);
                match &mut parent.inside {
                    Inside::List(next) => {
                        let _ = write!(path, "[{next}]");
                        *next += 1;
                        Some(Place::both(at))
                    }
                    Inside::Mapping(key) => match key.take() {
                        Some((key, name)) => {
                            let dot = if path.is_empty() { "" } else { "." };
                            let _ = write!(path, "{dot}{name}");
                            Some(Place { key, value: at })
                        }
                        None => {
                            let name = match &event {
                                Event::Scalar(name, ..) => name.as_ref(),
                                _ => "?",
                            };
                            *key = Some((at, name.to_owned()));
                            None
                        }
                    },
                }
            }
        };
        if let Some(place) = place {
            visit(&path, place);
        }
        let Some(inside) = inside else { continue };
        open.push(Open { path: path.len(), inside });
        if open.len() > DEPTH_LIMIT {
            return Err(too_deep(&span.start));
        }
    }
    Ok(())
}

fn too_deep(mark: &Marker) -> Fault {
    Fault { at: position(mark), message: TOO_DEEP.to_owned(), offset: None }
}

pub(super) fn position(mark: &Marker) -> Position {
    Position { line: mark.line().max(1), column: mark.col() + 1 }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A way to nest, as it is written.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::text) enum Layer {
        ListOnTheLine,
        List,
        Mapping,
        KeyOfAMapping,
        FlowList,
        FlowMapping,
    }

    /// Documents of all forms of nesting, some far too deep.
    pub(in crate::text) fn layers() -> impl Strategy<Value = Vec<Layer>> {
        use Layer::{FlowList, FlowMapping, KeyOfAMapping, List, ListOnTheLine, Mapping};
        let block = proptest::sample::select(vec![ListOnTheLine, List, Mapping, KeyOfAMapping]);
        let flow = proptest::sample::select(vec![FlowList, FlowMapping]);
        let length = || prop_oneof![0..DEPTH_LIMIT, 0..3 * DEPTH_LIMIT, Just(0)];
        let some = |layer, length| proptest::collection::vec(layer, length);
        let lengths = (length(), length());
        lengths.prop_flat_map(move |(blocks, flows)| {
            let both = (some(block.clone(), blocks), some(flow.clone(), flows));
            both.prop_map(|(blocks, flows)| [blocks, flows].concat())
        })
    }

    /// The text, and the line of each layer.
    pub(in crate::text) fn written(layers: &[Layer]) -> (String, Vec<usize>) {
        let (mut text, mut ends) = (String::new(), String::new());
        let (mut column, mut line, mut lines) = (0, 1, Vec::new());
        for layer in layers {
            lines.push(line);
            let (opens, deeper) = match layer {
                Layer::ListOnTheLine => ("- ", 2),
                Layer::List => ("-\n", 1),
                Layer::Mapping => ("a:\n", 1),
                Layer::KeyOfAMapping => ("? ", 2),
                Layer::FlowList => ("[", 1),
                Layer::FlowMapping => ("{a: ", 1),
            };
            text.push_str(opens);
            column += deeper;
            match layer {
                Layer::FlowList => ends.insert(0, ']'),
                Layer::FlowMapping => ends.insert(0, '}'),
                _ if opens.ends_with('\n') => {
                    line += 1;
                    text.push_str(&" ".repeat(column));
                }
                _ => {}
            }
        }
        (format!("{text}1{ends}\n"), lines)
    }

    proptest! {
        #[test]
        fn whatever_nests_too_deeply_is_refused_on_the_line_where_it_does(layers in layers()) {
            let (text, lines) = written(&layers);
            match (check(&text), lines.get(DEPTH_LIMIT)) {
                (Ok(()), None) => {}
                (Err(fault), Some(line)) => {
                    prop_assert_eq!(&fault.message, TOO_DEEP);
                    prop_assert_eq!(fault.at.line, *line, "{}", text);
                }
                (found, _) => prop_assert!(false, "{} layers: {found:?}\n{text}", layers.len()),
            }
        }
    }

    fn key(text: &str, path: &str) -> Option<(usize, usize)> {
        find(text, path, 1).map(|place| (place.key.line, place.key.column))
    }

    fn value(text: &str, path: &str) -> Option<(usize, usize)> {
        find(text, path, 1).map(|place| (place.value.line, place.value.column))
    }

    #[test]
    fn a_path_is_found_where_its_key_and_its_value_stand() {
        let text = "version: 1\ngpus:\n  - {index: 0}\n  - {index: 1, pci: nonsense}\n";
        assert_eq!(value(text, "gpus[1].pci"), Some((4, 21)));
        assert_eq!(key(text, "gpus[1].pci"), Some((4, 16)));
        assert_eq!(value(text, "gpus[1]"), Some((4, 5)));
        assert_eq!(value("{\"gpus\":\n [{}]}", "gpus[0]"), Some((2, 3)));
    }

    #[test]
    fn of_a_path_that_is_not_there_the_longest_part_counts() {
        let text = "gpus:\n  - {index: 0}\ngpusets: 1\n";
        assert_eq!(key(text, "gpus[0].uuid"), Some((2, 5)));
        assert_eq!(key(text, "gpus[7].uuid"), Some((1, 1)));
        assert_eq!(key(text, "gpu"), None);
        assert_eq!(key("%", "gpus[0]"), None);
    }

    #[test]
    fn of_a_key_that_comes_twice_the_second_is_found() {
        let text = "a: {x: 1}\nb: 2\na: 3\n";
        let second = find(text, "a", 2).map(|place| place.key.line);
        assert_eq!((second, key(text, "a")), (Some(3), Some((1, 1))));
    }

    #[test]
    fn keys_with_dots_and_keys_that_are_no_words_confuse_nobody() {
        let text = "env:\n  A.B: 1\n  ? [x, {y: 1}]\n  : 2\n  C: 3\n";
        assert_eq!((key(text, "env.A.B"), key(text, "env.C")), (Some((2, 3)), Some((5, 3))));
        assert_eq!(value("a: &a 1\nC: [*a, 1]\n", "C[1]"), Some((2, 9)));
    }

    #[test]
    fn a_text_that_is_nested_too_deeply_is_refused_where_it_is_too_deep() {
        for bracket in ["[", "{a: ", "[{a: "] {
            let fault = check(&bracket.repeat(1_000_000)).expect_err("too deep");
            assert_eq!(fault.at.line, 1);
            assert!(fault.message.contains("too deeply"), "{bracket}: {}", fault.message);
        }
        let (open, close) = ("[".repeat(DEPTH_LIMIT), "]".repeat(DEPTH_LIMIT));
        check(&format!("{open}{close}")).expect("as deep as it may be");
        let hidden = format!("[{}", "\"]\", [".repeat(DEPTH_LIMIT));
        check(&hidden).expect_err("a bracket in a quoted text closes nothing");
        let behind = format!("a: 'b\nc: {}", "[".repeat(1_000_000));
        check(&behind).expect_err("nobody knows what is behind a fault");
    }
}
