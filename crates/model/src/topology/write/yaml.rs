//! The project's own YAML: one or a few lines for each device, node and bridge.
//!
//! Writes the same keys as the JSON form; only the layout differs.
//!
//! *Invariant:* `read::document` reads back the same topology, and a YAML 1.1 reader sees the same
//! strings: everything that could be read as a number, a time or a word like `no` is quoted.

use serde_yaml::{Mapping, Value};

use crate::topology::Topology;

const WIDTH: usize = 100;

impl Topology {
    /// The machine as a complete file, in block style with one flow mapping for each list item.
    pub fn to_yaml(&self) -> String {
        // A topology holds only strings, numbers, lists and maps with string keys.
        let Ok(Value::Mapping(keys)) = serde_yaml::to_value(self) else { return String::new() };
        let mut text = String::new();
        for (key, value) in &keys {
            top_level(key.as_str().unwrap_or_default(), value, &mut text);
        }
        text
    }
}

fn top_level(key: &str, value: &Value, text: &mut String) {
    match value {
        Value::Sequence(items) if items.iter().any(Value::is_mapping) => {
            text.push_str(&format!("{key}:\n"));
            for item in items {
                fill("  - ", &pieces(item), text);
            }
        }
        _ => fill(&format!("{key}: "), &pieces(value), text),
    }
}

/// A value in flow style, split where a line may break.
fn pieces(value: &Value) -> Vec<String> {
    let mut out = vec![String::new()];
    flow(value, &mut out);
    out
}

fn flow(value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Sequence(items) => list(items, out),
        Value::Mapping(keys) => mapping(keys, out),
        scalar => push(out, &plain_or_quoted(scalar)),
    }
}

fn push(out: &mut [String], text: &str) {
    if let Some(last) = out.last_mut() {
        last.push_str(text);
    }
}

fn list(items: &[Value], out: &mut Vec<String>) {
    push(out, "[");
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            push(out, ",");
            out.push(String::new());
        }
        // A short mapping is not broken, so a list of them reads like a table.
        let whole = pieces(item).join(" ");
        if whole.chars().count() < WIDTH - 10 { push(out, &whole) } else { flow(item, out) }
    }
    push(out, "]");
}

fn mapping(keys: &Mapping, out: &mut Vec<String>) {
    push(out, "{");
    for (at, (key, value)) in keys.iter().enumerate() {
        if at > 0 {
            push(out, ",");
            out.push(String::new());
        }
        push(out, &format!("{}: ", key.as_str().unwrap_or_default()));
        flow(value, out);
    }
    push(out, "}");
}

/// Writes pieces one space apart, broken before the margin and continued below the first piece.
fn fill(start: &str, pieces: &[String], text: &mut String) {
    let indent = if start.starts_with(' ') { start.len() + 1 } else { 2 };
    let mut column = start.chars().count();
    text.push_str(start);
    for (at, piece) in pieces.iter().enumerate() {
        let width = piece.chars().count();
        if at > 0 && column + 1 + width > WIDTH {
            text.push('\n');
            text.push_str(&" ".repeat(indent));
            column = indent;
        } else if at > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(piece);
        column += width;
    }
    text.push('\n');
}

fn plain_or_quoted(scalar: &Value) -> String {
    match scalar {
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => quoted(text),
        Value::Number(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        _ => "null".to_owned(),
    }
}

/// A YAML double-quoted scalar; characters that are neither ASCII nor letters are escaped.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            _ if c.is_alphanumeric() => out.push(c),
            _ => out.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

/// Whether every YAML reader reads the text, unquoted in a flow mapping, as this very string.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    let inner = |c: char| c.is_ascii_alphanumeric() || "_-./ ()+".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && !text.ends_with(' ')
        && text.chars().all(inner)
        && !WORDS.contains(&text.to_ascii_lowercase().as_str())
}
