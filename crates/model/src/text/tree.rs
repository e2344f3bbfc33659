//! A YAML text as a tree whose scalars stay as they were written, so that keys can be merged and
//! left out before `serde_yaml` reads the rest with its types.
//!
//! Does not interpret scalars.
//!
//! *Invariant:* a tree has at most [`NODES`] nodes and [`DEPTH_LIMIT`] levels, whatever its aliases
//! multiply, and no key twice.

use std::fmt::Write;

use saphyr_parser::{Event, Parser, ScalarStyle};

use super::outline::{DEPTH_LIMIT, TOO_DEEP, position};
use super::{Place, Position};

/// The most nodes of a tree; a spec of ours with a thousand workers' overrides has a tenth.
const NODES: usize = 100_000;

/// The key whose mappings become a part of the mapping that it is in.
const MERGE: &str = "<<";

/// How a scalar is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without quotes, so that it may be a number or a word like `true`.
    Plain,
    /// In quotes.
    Quoted,
    /// Lines after `|` or `>`.
    Block,
}

/// Visits a scalar: its key path, what it says, and how it is written.
pub(super) type Visit<'a, E> = dyn FnMut(&str, &mut String, &mut Style) -> Result<(), E> + 'a;

#[derive(Clone, Debug)]
pub(super) enum Tree {
    /// What it says, and how it is written.
    Scalar(String, Style),
    List(Vec<Tree>),
    /// Keys, with the place of each, and values.
    Mapping(Vec<(String, Tree)>),
}

/// Why a text is no tree.
pub(super) enum Refusal {
    /// It is not YAML; another parser may say it better.
    Malformed(Position, String),
    /// A key that occurs twice, by its path.
    Twice(String, Place),
    /// Something that specs and topologies do not have.
    Unread(Position, &'static str),
}

/// Reads a text's first document; `None` if it is empty.
pub(super) fn read(text: &str) -> Result<Option<Tree>, Refusal> {
    let mut builder = Builder {
        events: Parser::new_from_str(text),
        anchors: Vec::new(),
        nodes: 0,
        depth: 0,
        path: String::new(),
    };
    let mut root = None;
    loop {
        let (event, at) = builder.next()?;
        match event {
            Event::StreamEnd => return Ok(root),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            _ if root.is_some() => {
                return Err(Refusal::Unread(at, "a second document is not read"));
            }
            event => root = Some(builder.value(event, at)?),
        }
    }
}

struct Builder<'a> {
    events: Parser<'a, saphyr_parser::StrInput<'a>>,
    /// Values by the number of their anchor.
    anchors: Vec<(usize, Tree)>,
    nodes: usize,
    /// Lists and mappings whose end has not come yet.
    depth: usize,
    path: String,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Position), Refusal> {
        match self.events.next() {
            Some(Ok((event, span))) => Ok((event, position(&span.start))),
            Some(Err(error)) => {
                Err(Refusal::Malformed(position(error.marker()), error.info().to_owned()))
            }
            None => Ok((Event::StreamEnd, Position::START)),
        }
    }

    fn value(&mut self, event: Event<'a>, at: Position) -> Result<Tree, Refusal> {
        self.count(1, at)?;
        let (anchor, tree) = match event {
            Event::Scalar(content, style, anchor, tag) => {
                let style = match (&tag, style) {
                    (None, ScalarStyle::Plain) => Style::Plain,
                    (None, ScalarStyle::Literal | ScalarStyle::Folded) => Style::Block,
                    (None, _) => Style::Quoted,
                    (Some(tag), _) if tag.is_yaml_core_schema() && tag.suffix == "str" => {
                        Style::Quoted
                    }
                    (Some(_), _) => return Err(Refusal::Unread(at, "tags are not read")),
                };
                (anchor, Tree::Scalar(content.into_owned(), style))
            }
            Event::SequenceStart(anchor, None) => (anchor, self.nested(at, Self::list)?),
            Event::MappingStart(anchor, None) => (anchor, self.nested(at, Self::mapping)?),
            Event::Alias(anchor) => {
                let named = self.anchors.iter().rev().find(|(number, _)| *number == anchor);
                let Some((_, tree)) = named else {
                    return Err(Refusal::Unread(
                        at,
                        "an alias inside of what it names is not read",
                    ));
                };
                let tree = tree.clone();
                self.count(tree.size(), at)?;
                if self.depth + tree.depth() > DEPTH_LIMIT {
                    return Err(Refusal::Unread(at, "what this alias names nests it too deeply"));
                }
                return Ok(tree);
            }
            _ => return Err(Refusal::Unread(at, "tags are not read")),
        };
        if anchor != 0 {
            self.anchors.push((anchor, tree.clone()));
        }
        Ok(tree)
    }

    fn count(&mut self, more: usize, at: Position) -> Result<(), Refusal> {
        self.nodes += more;
        if self.nodes > NODES {
            return Err(Refusal::Unread(at, "aliases multiply it beyond all measure"));
        }
        Ok(())
    }

    fn nested(
        &mut self,
        at: Position,
        read: impl FnOnce(&mut Self) -> Result<Tree, Refusal>,
    ) -> Result<Tree, Refusal> {
        self.depth += 1;
        if self.depth > DEPTH_LIMIT {
            return Err(Refusal::Unread(at, TOO_DEEP));
        }
        let tree = read(self)?;
        self.depth -= 1;
        Ok(tree)
    }

    fn list(&mut self) -> Result<Tree, Refusal> {
        let (mut items, length) = (Vec::new(), self.path.len());
        loop {
            let (event, at) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(Tree::List(items));
            }
            let _ = write!(self.path, "[{}]", items.len());
            items.push(self.value(event, at)?);
            self.path.truncate(length);
        }
    }

    fn mapping(&mut self) -> Result<Tree, Refusal> {
        let (mut entries, mut merged) = (Vec::<(String, Tree)>::new(), Vec::new());
        let length = self.path.len();
        loop {
            let (event, at) = self.next()?;
            let (key, plain) = match event {
                Event::MappingEnd => break,
                Event::Scalar(key, style, ..) => (key.into_owned(), style == ScalarStyle::Plain),
                _ => return Err(Refusal::Unread(at, "a key is a text")),
            };
            let dot = if self.path.is_empty() { "" } else { "." };
            let _ = write!(self.path, "{dot}{key}");
            let (event, value_at) = self.next()?;
            let value = self.value(event, value_at)?;
            if key == MERGE && plain {
                merged.push((value, value_at));
            } else if entries.iter().any(|(other, _)| *other == key) {
                return Err(Refusal::Twice(self.path.clone(), Place { key: at, value: value_at }));
            } else {
                entries.push((key, value));
            }
            self.path.truncate(length);
        }
        for (value, at) in merged {
            let parts = match value {
                Tree::List(parts) => parts,
                part => vec![part],
            };
            for part in parts {
                let Tree::Mapping(part) = part else {
                    return Err(Refusal::Unread(at, "'<<' takes a mapping, or a list of them"));
                };
                for (key, value) in part {
                    // What is written in the mapping itself, or merged first, wins.
                    if !entries.iter().any(|(other, _)| *other == key) {
                        entries.push((key, value));
                    }
                }
            }
        }
        Ok(Tree::Mapping(entries))
    }
}

impl Tree {
    fn size(&self) -> usize {
        match self {
            Tree::Scalar(..) => 1,
            Tree::List(items) => 1 + items.iter().map(Tree::size).sum::<usize>(),
            Tree::Mapping(entries) => {
                1 + entries.iter().map(|(_, value)| value.size()).sum::<usize>()
            }
        }
    }

    /// Lists and mappings that lie in each other, with this one.
    fn depth(&self) -> usize {
        match self {
            Tree::Scalar(..) => 0,
            Tree::List(items) => 1 + items.iter().map(Tree::depth).max().unwrap_or(0),
            Tree::Mapping(entries) => {
                1 + entries.iter().map(|(_, value)| value.depth()).max().unwrap_or(0)
            }
        }
    }

    /// Leaves out keys of a mapping.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        if let Tree::Mapping(entries) = self {
            entries.retain(|(key, _)| keep(key));
        }
    }

    pub(super) fn scalars<E>(&mut self, path: &str, visit: &mut Visit<'_, E>) -> Result<(), E> {
        match self {
            Tree::Scalar(content, style) => visit(path, content, style),
            Tree::List(items) => items
                .iter_mut()
                .enumerate()
                .try_for_each(|(at, item)| item.scalars(&format!("{path}[{at}]"), visit)),
            Tree::Mapping(entries) => entries.iter_mut().try_for_each(|(key, value)| {
                let dot = if path.is_empty() { "" } else { "." };
                value.scalars(&format!("{path}{dot}{key}"), visit)
            }),
        }
    }

    /// Removes what is at a key path, so that the rest can be read; false if nothing is there. Of a
    /// list also what follows, whose places would no longer be theirs.
    pub(super) fn remove(&mut self, path: &str) -> bool {
        match self {
            Tree::Scalar(..) => false,
            Tree::Mapping(entries) => {
                let within = |key: &str| {
                    let rest = path.strip_prefix(key)?;
                    (rest.is_empty() || rest.starts_with(['.', '['])).then_some(rest)
                };
                // Keys may have dots.
                let found = entries
                    .iter()
                    .enumerate()
                    .filter_map(|(at, (key, _))| Some((at, within(key)?)));
                let Some((at, rest)) = found.min_by_key(|(_, rest)| rest.len()) else {
                    return false;
                };
                if rest.is_empty() {
                    entries.remove(at);
                    return true;
                }
                entries[at].1.remove(rest.strip_prefix('.').unwrap_or(rest))
            }
            Tree::List(items) => {
                let inside = path.strip_prefix('[').and_then(|path| path.split_once(']'));
                let Some((at, rest)) = inside else { return false };
                let Some(at) = at.parse().ok().filter(|at: &usize| *at < items.len()) else {
                    return false;
                };
                if rest.is_empty() {
                    items.truncate(at);
                    return true;
                }
                items[at].remove(rest.strip_prefix('.').unwrap_or(rest))
            }
        }
    }

    /// The tree as YAML again.
    pub(super) fn to_yaml(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, 0);
        out
    }

    fn write(&self, out: &mut String, depth: usize) {
        match self {
            Tree::Scalar(content, Style::Plain) => {
                let _ = writeln!(out, " {content}");
            }
            Tree::Scalar(content, Style::Quoted | Style::Block) => {
                let _ = writeln!(out, " {}", quoted(content));
            }
            Tree::List(items) if items.is_empty() => out.push_str(" []\n"),
            Tree::Mapping(entries) if entries.is_empty() => out.push_str(" {}\n"),
            Tree::List(items) => {
                out.push('\n');
                for item in items {
                    let _ = write!(out, "{:depth$}-", "");
                    item.write(out, depth + 1);
                }
            }
            Tree::Mapping(entries) => {
                out.push('\n');
                for (key, value) in entries {
                    let _ = write!(out, "{:depth$}{}:", "", quoted(key));
                    value.write(out, depth + 1);
                }
            }
        }
    }
}

/// A text in YAML's double quotes, on one line.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control()
                || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}') =>
            {
                let _ = write!(out, "\\U{:08x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::text::outline::tests::{layers, written};

    fn tree(text: &str) -> Tree {
        let Ok(Some(tree)) = read(text) else { panic!("no tree: {text}") };
        tree
    }

    fn value(tree: &Tree) -> Value {
        let text = tree.to_yaml();
        serde_yaml::from_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    #[test]
    fn a_tree_says_what_the_text_says() {
        for text in [
            "a: 1\nb: [x, 'y', {c: ~, d: true}]\ne: {}\nf: []\n",
            "a: |\n  two\n  lines\nb: >\n  folded\n  text\nc: plain\n  folded\n",
            "- 1\n-\n  - 2\n  - - 3\n-\n  a:\n    - b: 1\n      c: 2\n",
            "a: \"q\\\"\\t\\u263a\"\n'b c': -1\nd: 'it''s'\n",
            "a: &x {b: 1}\nc: *x\n",
            "a: \"b\\u007fc\\ufffed\\U0001fffee\"\n",
            "a: 5 # five\nb: a#b\nc: http://x:1/\n",
        ] {
            let direct: Value = serde_yaml::from_str(text).expect(text);
            assert_eq!(value(&tree(text)), direct, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_tree_has_at_most_its_levels_however_they_are_written(
            layers in layers(),
            aliases in 0usize..9,
        ) {
            // Each alias is as deep as what it names, and what it is in.
            let (open, close) = ("[".repeat(9), "]".repeat(9));
            let mut text = format!("- &a0 {open}1{close}\n");
            for next in 1..=aliases {
                text.push_str(&format!("- &a{next} {open}*a{}{close}\n", next - 1));
            }
            let (last, lines) = written(&layers);
            for line in format!("- {last}").lines() {
                text.push_str(line);
                text.push_str("\n  ");
            }
            let deep = lines.len().max(9 * (aliases + 1)) + 1 > DEPTH_LIMIT;
            match read(&text) {
                Ok(tree) => {
                    prop_assert!(!deep && tree.expect("a tree").depth() <= DEPTH_LIMIT, "{text}");
                }
                Err(Refusal::Unread(_, what)) => {
                    // Keys that are no texts are refused however deep they are.
                    prop_assert!(deep || what == "a key is a text", "{what}\n{text}");
                }
                Err(_) => prop_assert!(deep, "{text}"),
            }
        }
    }

    #[test]
    fn mappings_are_merged_and_what_is_written_wins() {
        let text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  <<: [*x, *y]\n  a: 3\n";
        assert_eq!(value(&tree(text))["z"], json!({"a": 3, "b": 1, "c": 2}));
        assert!(matches!(read("a: {<<: 1}"), Err(Refusal::Unread(..))));
    }

    #[test]
    fn what_is_removed_leaves_the_rest_readable() {
        let mut tree = tree("a: {b.c: 1, d: [1, {e: 2, f: 3}, 4]}\ng: 5\n");
        assert!(tree.remove("a.b.c") && tree.remove("a.d[1].e") && !tree.remove("a.d[3]"));
        assert_eq!(value(&tree), json!({"a": {"d": [1, {"f": 3}, 4]}, "g": 5}));
        assert!(tree.remove("a.d[1]") && !tree.remove("h") && !tree.remove("g.x"));
        assert_eq!(value(&tree), json!({"a": {"d": [1]}, "g": 5}));
    }

    #[test]
    fn what_multiplies_or_comes_twice_is_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for (this, last) in (1..9).zip(0..) {
            let aliases = vec![format!("*a{last}"); 9].join(", ");
            text.push_str(&format!("a{this}: &a{this} [{aliases}]\n"));
        }
        assert!(matches!(read(&text), Err(Refusal::Unread(..))));
        let twice = read("a:\n  b: 1\n  b: 2\n");
        assert!(
            matches!(twice, Err(Refusal::Twice(path, place)) if path == "a.b" && place.key.line == 3)
        );
    }
}
