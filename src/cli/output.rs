//! Standard output and standard error: tables, JSON, errors, colours where they are wanted.
//!
//! *Invariant:* whatever goes to a terminal has passed [`sanitize`]; what goes elsewhere and was
//! written by a program ([`relay`]) is that program's bytes.

use std::io::{self, IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::sanitize::sanitized;

/// The forms of a command that shows a table.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub(super) enum Form {
    /// For people.
    #[default]
    Table,
    /// For programs, stable.
    Json,
}

/// The style of a heading word such as `error:`.
const fn heading(colour: AnsiColor) -> Style {
    Style::new().bold().fg_color(Some(anstyle::Color::Ansi(colour)))
}

/// Prints an error with its causes and its hint.
pub(super) fn failure(failure: &Failure) {
    let (red, cyan) = (heading(AnsiColor::Red), heading(AnsiColor::Cyan));
    let mut text = format!("{red}error:{red:#} {}\n", failure.error);
    for cause in failure.error.chain().skip(1) {
        text.push_str(&format!("  caused by: {cause}\n"));
    }
    if let Some(hint) = &failure.hint {
        text.push_str(&format!("{cyan}hint:{cyan:#} {hint}\n"));
    }
    tell(&text);
}

/// Writes to standard error. When that is gone there is nobody left to tell.
fn tell(text: &str) {
    let mut err = anstream::stderr().lock();
    let _ = match io::stderr().is_terminal() {
        true => err.write_all(&sanitized(text.as_bytes())),
        false => err.write_all(text.as_bytes()),
    };
}

/// Prints what clap has to say: of wrong usage on standard error, help and version on standard
/// output.
pub(super) fn usage(error: &clap::Error) {
    let text = error.render().ansi().to_string();
    match error.use_stderr() {
        true => tell(&text),
        // Nobody reads any more, and nobody waits for an answer.
        false => drop(print(&text)),
    }
}

/// Prints a remark that is not the answer: `note: …` on standard error.
pub(super) fn note(text: &dyn std::fmt::Display) {
    remark("note", text);
}

/// Prints a remark under a heading word of its own on standard error.
pub(super) fn remark(word: &str, text: &dyn std::fmt::Display) {
    let yellow = heading(AnsiColor::Yellow);
    tell(&format!("{yellow}{word}:{yellow:#} {text}\n"));
}

/// Prints what is going on, on standard error.
pub(super) fn status(text: &str) {
    tell(&format!("{text}\n"));
}

/// Prints the answer.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut out = anstream::stdout().lock();
    let written = match io::stdout().is_terminal() {
        true => out.write_all(&sanitized(text.as_bytes())),
        false => out.write_all(text.as_bytes()),
    };
    written.and_then(|()| out.flush()).map_err(unwritable)
}

/// Prints a whole line that a program wrote, with its line feed, under a heading of ours:
/// sanitized on a terminal, byte for byte elsewhere.
pub(super) fn relay(heading: &str, line: &[u8]) -> Result<(), Failure> {
    print(heading)?;
    // Not through `anstream`: whether a program colours its lines is the program's business.
    let mut out = io::stdout().lock();
    let written = match out.is_terminal() {
        true => out.write_all(&sanitized(line)),
        false => out.write_all(line),
    };
    written.map_err(unwritable)
}

/// Prints the answer as JSON, two blanks a level, with a line feed.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::new(Exit::Failed, error))?;
    print(&(text + "\n"))
}

fn unwritable(error: io::Error) -> Failure {
    let error = anyhow::Error::new(error).context("cannot write to standard output");
    Failure::new(Exit::Failed, error)
}

/// Lets `cuda-cluster … | head` end without an error, as every Unix tool does.
pub(super) fn die_quietly_on_broken_pipe() {
    crate::os::default_broken_pipe();
}

/// A heading in capitals, unless it is a unit: `GB/s`, `µs`.
fn shouted(heading: &str) -> String {
    let unit = heading.contains(|c: char| c.is_uppercase() || !c.is_ascii());
    if unit { heading.to_owned() } else { heading.to_uppercase() }
}

/// A table without frames: columns two blanks apart, headings in bold.
pub(super) fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    use comfy_table::{Cell, ColumnConstraint, Table, presets};
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(headings.iter().map(|heading| Cell::new(shouted(heading))));
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2)).set_constraint(ColumnConstraint::ContentWidth);
    }
    let lines = table.to_string();
    let mut text = String::with_capacity(lines.len());
    for (at, line) in lines.lines().enumerate() {
        let bold = Style::new().bold();
        if at == 0 {
            text.push_str(&format!("{bold}{}{bold:#}\n", line.trim_end()));
        } else {
            text.push_str(line.trim_end());
            text.push('\n');
        }
    }
    text
}
