//! Standard output and standard error: tables, JSON, errors, colours where they are wanted.
//!
//! *Invariant:* whatever goes to a terminal has passed [`super::sanitize`]; what goes elsewhere and
//! was written by a program ([`relay`]) is that program's bytes.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::sanitize::sanitized;
use super::screen::{self, To};

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
    if failure.exit == Exit::BROKEN_PIPE {
        return;
    }
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
    let _ = emit(To::Error, text.as_bytes(), Wrote::We);
}

/// Who wrote a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrote {
    /// Its colours are for terminals that want them.
    We,
    /// Its colours are the program's business.
    AProgram,
}

/// Writes a text where it belongs: filtered for a terminal, and by the screen's thread where there
/// is one.
fn emit(to: To, text: &[u8], wrote: Wrote) -> io::Result<()> {
    let (terminal, choice) = match to {
        To::Output => (io::stdout().is_terminal(), AutoStream::choice(&io::stdout())),
        To::Error => (io::stderr().is_terminal(), AutoStream::choice(&io::stderr())),
    };
    let harmless = if terminal { Cow::Owned(sanitized(text)) } else { Cow::Borrowed(text) };
    let bytes = match wrote {
        Wrote::AProgram => harmless.into_owned(),
        Wrote::We => {
            let mut coloured = AutoStream::new(Vec::new(), choice);
            coloured.write_all(&harmless)?;
            coloured.into_inner()
        }
    };
    screen::write(to, &bytes).unwrap_or_else(|| match to {
        To::Output => {
            let mut out = io::stdout().lock();
            out.write_all(&bytes).and_then(|()| out.flush())
        }
        To::Error => io::stderr().lock().write_all(&bytes),
    })
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
    emit(To::Output, text.as_bytes(), Wrote::We).map_err(unwritable)
}

/// Prints a whole line that a program wrote, with its line feed, under a heading of ours:
/// sanitized on a terminal, byte for byte elsewhere.
pub(super) fn relay(heading: &str, line: &[u8]) -> Result<(), Failure> {
    print(heading)?;
    emit(To::Output, line, Wrote::AProgram).map_err(unwritable)
}

/// Prints the answer as JSON, two blanks a level, with a line feed.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::new(Exit::Failed, error))?;
    print(&(text + "\n"))
}

/// What a command ends with that cannot print its answer. A reader that has gone, as in
/// `cuda-cluster … | head`, is no error to tell of; the command ends as if by SIGPIPE.
pub(super) fn unwritable(error: io::Error) -> Failure {
    let exit = match error.kind() {
        io::ErrorKind::BrokenPipe => Exit::BROKEN_PIPE,
        _ => Exit::Failed,
    };
    Failure::new(exit, anyhow::Error::new(error).context("cannot write to standard output"))
}

/// Whether standard output and standard error go to the same place, as in a terminal or after
/// `2>&1`.
pub(super) fn streams_are_one() -> bool {
    let identity = |stream: &dyn AsFd| -> io::Result<(u64, u64)> {
        let file = File::from(stream.as_fd().try_clone_to_owned()?).metadata()?;
        Ok((file.dev(), file.ino()))
    };
    match (identity(&io::stdout()), identity(&io::stderr())) {
        (Ok(output), Ok(error)) => output == error,
        _ => false,
    }
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
