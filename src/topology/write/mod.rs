//! Writers of a topology's text forms.
//!
//! Returns text; does not print, and knows no terminal.
//!
//! *Invariant:* the same topology gives the same text, byte for byte.

mod dot;
mod hierarchy;
mod matrix;
mod nccl;
mod svg;
mod tree;
mod yaml;

pub use nccl::NcclFormError;

/// Text as it stands in XML, in quotes or between tags; what XML cannot hold is left out.
fn xml_escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => {}
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}
