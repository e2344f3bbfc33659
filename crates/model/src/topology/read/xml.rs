//! XML with limits, and errors that name the element.
//!
//! Does not know what the elements mean.
//!
//! *Invariant:* a document that is parsed has bounded depth, attributes and nodes, and neither
//! entities nor namespaces, so that the cost of reading it is linear in its length.

use roxmltree::{Document, Node, ParsingOptions};

use crate::text::Position;

/// Deepest nesting of elements; real machines have about twenty levels.
const DEPTH_LIMIT: usize = 128;
/// Most attributes (or quoted texts) in one tag.
const QUOTED_LIMIT: usize = 128;
/// Most nodes, texts included.
const NODE_LIMIT: u32 = 200_000;

/// Why a text cannot be read as XML.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum XmlError {
    /// It is not well-formed.
    #[error("{position}: not well-formed XML: {problem}")]
    Syntax { position: Position, problem: String },
    /// It is larger or more complex than any machine's description.
    #[error("{position}: {what}")]
    Unreasonable {
        position: Position,
        /// What is too much.
        what: &'static str,
    },
    /// An attribute has an invalid value.
    #[error("{position}: <{element}>: {attribute}=\"{value}\": {problem}")]
    Attribute {
        position: Position,
        element: String,
        attribute: &'static str,
        value: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An element lacks an attribute that it needs.
    #[error("{position}: <{element}> has no attribute {attribute:?}")]
    Missing { position: Position, element: String, attribute: &'static str },
    /// An element that is not allowed here, or occurs twice.
    #[error("{position}: <{element}>: {problem}")]
    Element {
        position: Position,
        element: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Parses XML within the limits.
pub(super) fn parse(text: &str) -> Result<Document<'_>, XmlError> {
    Scan { text, at: 0 }.check()?;
    let options = ParsingOptions { allow_dtd: true, nodes_limit: NODE_LIMIT, ..Default::default() };
    Document::parse_with_options(text, options).map_err(|error| {
        let problem = error.to_string();
        let problem = problem.rsplit_once(" at ").map_or(problem.as_str(), |(words, _)| words);
        XmlError::Syntax { position: of(error.pos()), problem: problem.to_owned() }
    })
}

fn of(at: roxmltree::TextPos) -> Position {
    let whole = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    Position { line: whole(at.row), column: whole(at.col) }
}

pub(super) fn position(node: Node<'_, '_>) -> Position {
    of(node.document().text_pos_at(node.range().start))
}

/// A required attribute.
pub(super) fn required<'a>(
    node: Node<'a, '_>,
    attribute: &'static str,
) -> Result<&'a str, XmlError> {
    node.attribute(attribute).ok_or_else(|| XmlError::Missing {
        position: position(node),
        element: node.tag_name().name().to_owned(),
        attribute,
    })
}

/// An attribute's value as another type; `None` when it is absent.
pub(super) fn parsed<T>(
    node: Node<'_, '_>,
    attribute: &'static str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, XmlError> {
    let Some(value) = node.attribute(attribute) else { return Ok(None) };
    parse(value.trim()).map(Some).map_err(|problem| XmlError::Attribute {
        position: position(node),
        element: node.tag_name().name().to_owned(),
        attribute,
        value: value.chars().take(80).collect(),
        problem,
    })
}

/// An error about an element as a whole.
pub(super) fn wrong(node: Node<'_, '_>, problem: impl Into<String>) -> XmlError {
    XmlError::Element {
        position: position(node),
        element: node.tag_name().name().to_owned(),
        problem: problem.into(),
    }
}

/// Checks the text before the parser reads it, for anything that would make parsing slow.
struct Scan<'a> {
    text: &'a str,
    at: usize,
}

impl Scan<'_> {
    fn check(&mut self) -> Result<(), XmlError> {
        let mut depth = 0usize;
        while let Some(start) = self.text[self.at..].find('<') {
            self.at += start;
            let rest = &self.text[self.at..];
            if rest.starts_with("<!--") {
                self.skip("-->");
            } else if rest.starts_with("<![CDATA[") {
                self.skip("]]>");
            } else if rest.starts_with("<?") {
                self.skip("?>");
            } else {
                let tag = self.tag()?;
                match tag.as_bytes() {
                    [b'<', b'!', ..] if tag.contains(['[', '%']) => {
                        return Err(self.unreasonable("entity declarations are not read"));
                    }
                    [b'<', b'!', ..] | [.., b'/', b'>'] => {}
                    [b'<', b'/', ..] => depth = depth.saturating_sub(1),
                    _ => depth += 1,
                }
                if tag.contains("xmlns") {
                    return Err(self.unreasonable("namespaces are not read"));
                }
                if depth > DEPTH_LIMIT {
                    return Err(self.unreasonable("elements are nested too deeply"));
                }
                self.at += tag.len();
            }
        }
        Ok(())
    }

    fn skip(&mut self, end: &str) {
        let found = self.text[self.at..].find(end).map(|at| at + end.len());
        self.at += found.unwrap_or(self.text.len() - self.at);
    }

    /// The tag that begins here; `>` inside quotes does not end it.
    fn tag(&self) -> Result<&str, XmlError> {
        let rest = &self.text[self.at..];
        let mut quote = None;
        let mut quoted = 0;
        for (at, byte) in rest.bytes().enumerate() {
            match (byte, quote) {
                (b'"' | b'\'', None) => {
                    quote = Some(byte);
                    quoted += 1;
                    if quoted > QUOTED_LIMIT {
                        return Err(self.unreasonable("an element has too many attributes"));
                    }
                }
                (_, Some(open)) if byte == open => quote = None,
                (b'>', None) => return Ok(&rest[..=at]),
                _ => {}
            }
        }
        // The parser has the better error for this.
        Ok(rest)
    }

    fn unreasonable(&self, what: &'static str) -> XmlError {
        XmlError::Unreasonable { position: Position::of_byte(self.text, self.at), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_slow_is_refused_before_it_is_parsed() {
        let deep = "<a>".repeat(DEPTH_LIMIT + 1);
        let wide = format!("<a {}/>", "b='' ".repeat(QUOTED_LIMIT + 1));
        let entities = "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>";
        for text in [deep.as_str(), &wide, entities, "<a xmlns:b='c'/>"] {
            assert!(matches!(parse(text), Err(XmlError::Unreasonable { .. })), "{text}");
        }
    }

    #[test]
    fn what_is_usual_is_parsed() {
        let text = "<?xml version='1.0'?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n\
                    <!-- < xmlns --><topology a='>'><![CDATA[<<]]></topology>";
        assert!(parse(text).is_ok());
        let broken = parse("<a>\n<b></a>").err().map(|error| error.to_string());
        assert!(broken.is_some_and(|words| words.starts_with("line 2, column ")));
    }
}
