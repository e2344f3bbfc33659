//! Writers of a topology's text forms.
//!
//! Returns text; does not print, and knows no terminal.
//!
//! *Invariant:* the same topology gives the same text, byte for byte.

mod matrix;
mod yaml;
