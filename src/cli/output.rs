//! Standard output and standard error: tables, JSON, errors, colours where they are wanted.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;

use super::failure::{Exit, Failure};

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
    let mut err = anstream::stderr().lock();
    // When standard error is gone there is nobody left to tell.
    let _ = writeln!(err, "{red}error:{red:#} {}", failure.error);
    for cause in failure.error.chain().skip(1) {
        let _ = writeln!(err, "  caused by: {cause}");
    }
    if let Some(hint) = &failure.hint {
        let _ = writeln!(err, "{cyan}hint:{cyan:#} {hint}");
    }
}

/// Prints a remark that is not the answer: `note: …` on standard error.
pub(super) fn note(text: &dyn std::fmt::Display) {
    remark("note", text);
}

/// Prints a remark under a heading word of its own on standard error.
pub(super) fn remark(word: &str, text: &dyn std::fmt::Display) {
    let yellow = heading(AnsiColor::Yellow);
    let _ = writeln!(anstream::stderr().lock(), "{yellow}{word}:{yellow:#} {text}");
}

/// Prints what is going on, on standard error.
pub(super) fn status(text: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// Prints the answer.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(unwritable)
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
