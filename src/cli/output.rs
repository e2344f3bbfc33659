//! Prints tables, JSON and errors on standard output and standard error, in colour where supported.
//!
//! *Invariant:* text for a terminal has passed [`super::sanitize`]; bytes of a program ([`relay`])
//! that go elsewhere are unchanged.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::sanitize::{plain, sanitized, sanitized_lines};
use super::screen::{self, To};

/// Output formats of commands that print a table.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub(super) enum Form {
    /// For people
    #[default]
    Table,
    /// JSON with a stable schema
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
    let width = width(&io::stderr());
    let mut text =
        format!("{red}error:{red:#} {}\n", wrapped(&plain(&failure.error.to_string()), 7, width));
    for cause in failure.error.chain().skip(1) {
        text.push_str(&format!(
            "  caused by: {}\n",
            wrapped(&plain(&cause.to_string()), 13, width)
        ));
    }
    if let Some(hint) = &failure.hint {
        text.push_str(&format!("{cyan}hint:{cyan:#} {}\n", wrapped(&plain(hint), 6, width)));
    }
    tell(&text);
}

/// Writes to standard error. A failure is ignored, because there is no other place to report it.
fn tell(text: &str) {
    let _ = emit(To::Error, text.as_bytes(), Author::Us);
}

/// The author of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Author {
    /// Ours: coloured only if the terminal supports it.
    Us,
    /// A program's: its colours are kept.
    Program,
}

/// Writes a text to its stream: filtered if that is a terminal, and through the screen's thread if
/// it is running.
fn emit(to: To, text: &[u8], wrote: Author) -> io::Result<()> {
    let (terminal, choice) = match to {
        To::Output => (io::stdout().is_terminal(), AutoStream::choice(&io::stdout())),
        To::Error => (io::stderr().is_terminal(), AutoStream::choice(&io::stderr())),
    };
    let harmless = match (terminal, wrote) {
        (true, Author::Us) => Cow::Owned(sanitized_lines(text)),
        (true, Author::Program) => Cow::Owned(sanitized(text)),
        (false, _) => Cow::Borrowed(text),
    };
    let bytes = match wrote {
        Author::Program => harmless.into_owned(),
        Author::Us => {
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

/// Prints clap's messages: wrong usage on standard error, help and version on standard output.
pub(super) fn usage(error: &clap::Error, hint: Option<&str>) -> Result<Exit, Failure> {
    let mut text = error.render().ansi().to_string();
    if let Some(hint) = hint {
        let cyan = heading(AnsiColor::Cyan);
        text.push_str(&format!("{cyan}hint:{cyan:#} {hint}\n"));
    }
    if error.use_stderr() {
        tell(&text);
        return Ok(Exit::Usage);
    }
    print(&text).map(|()| Exit::Done)
}

/// Prints a note on standard error: `note: …`.
pub(super) fn note(text: &dyn std::fmt::Display) {
    remark("note", text);
}

/// Prints a remark with a heading of its own on standard error.
pub(super) fn remark(word: &str, text: &dyn std::fmt::Display) {
    let yellow = heading(AnsiColor::Yellow);
    let text = wrapped(&plain(&text.to_string()), word.len() + 2, width(&io::stderr()));
    tell(&format!("{yellow}{word}:{yellow:#} {text}\n"));
}

/// The width of a terminal; `None` for anything else.
fn width(stream: &impl IsTerminal) -> Option<usize> {
    // Both streams are of the same terminal, if they are of one at all.
    stream.is_terminal().then(|| usize::from(console::Term::stderr().size().1))
}

/// The width of standard output; `None` if it is no terminal.
pub(super) fn columns() -> Option<usize> {
    width(&io::stdout())
}

/// A text whose lines end between words, before the width, or after a comma of a word that is wider
/// than that; `first` columns of the first line are taken. What continues a line is indented by two
/// more than that line.
fn wrapped(text: &str, first: usize, width: Option<usize>) -> String {
    let Some(width) = width.filter(|width| *width >= NARROWEST) else { return text.to_owned() };
    let mut out = String::with_capacity(text.len() + text.len() / 40);
    let mut column = first;
    for (at, line) in text.split('\n').enumerate() {
        if at > 0 {
            out.push('\n');
            column = 0;
        }
        let indent = continuation(line, width);
        let mut has_word = column > 0;
        let shown = |text: &str| anstream::adapter::strip_str(text).to_string().chars().count();
        for (at, word) in line.split(' ').enumerate() {
            let is_wide = indent.chars().count() + shown(word) > width;
            let parts = if is_wide { word.split_inclusive(',').collect() } else { vec![word] };
            for (part, text) in parts.into_iter().enumerate() {
                let space = usize::from(at > 0 && part == 0);
                let follows = at + part > 0;
                if follows && has_word && column + space + shown(text) > width {
                    out.push('\n');
                    out.push_str(&indent);
                    column = indent.chars().count();
                } else if space > 0 {
                    out.push(' ');
                    column += 1;
                }
                has_word |= text.chars().any(char::is_alphanumeric);
                out.push_str(text);
                column += shown(text);
            }
        }
    }
    out
}

/// What a line's continuation begins with: its indentation, in which the branches of a tree go on.
/// After columns the continuation is below the last one, if that begins in the left half.
fn continuation(line: &str, width: usize) -> String {
    let line = anstream::adapter::strip_str(line).to_string();
    let is_lead = |c: char| " │├└─".contains(c);
    let lead = line.chars().take_while(|c| is_lead(*c));
    let lead: String = lead.map(|c| if "│├".contains(c) { '│' } else { ' ' }).collect();
    let text: Vec<char> = line.chars().skip(lead.chars().count()).collect();
    let begins = |at: &usize| text[at - 2] == ' ' && text[at - 1] == ' ' && text[*at] != ' ';
    let taken = lead.chars().count();
    let mut columns = (2..text.len()).rev().filter(begins);
    let indent = columns.find(|at| taken + at <= width / 2).unwrap_or(2);
    lead + &" ".repeat(indent)
}

/// Text without a terminal's commands, in lines that fit; all but the first are indented.
pub(super) fn indented(text: &str, indent: &str) -> String {
    let width = columns().unwrap_or(100).max(20);
    let lines = crate::text::wrapped(&plain(text), width.saturating_sub(indent.len()));
    lines.join(&format!("\n{indent}"))
}

/// Prints an answer that is prose or a tree: on a terminal its lines end between words.
pub(super) fn print_text(text: &str) -> Result<(), Failure> {
    print(&wrapped(text, 0, columns()))
}

/// Prints a status message on standard error.
pub(super) fn status(text: &str) {
    tell(&format!("{}\n", wrapped(&plain(text), 0, width(&io::stderr()))));
}

/// Prints the answer on standard output.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    emit(To::Output, text.as_bytes(), Author::Us).map_err(unwritable)
}

/// Prints a whole line of a program's output, including its line feed, after a heading of ours:
/// sanitized on a terminal, byte for byte elsewhere.
pub(super) fn relay(heading: &str, line: &[u8]) -> Result<(), Failure> {
    print(heading)?;
    emit(To::Output, line, Author::Program).map_err(unwritable)
}

/// Prints the answer as JSON, indented by two spaces and followed by a line feed.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::new(Exit::Failed, error))?;
    // The only character that JSON may have as it is and a stream without colours loses.
    print(&(text.replace('\u{7f}', "\\u007f") + "\n"))
}

/// Writes a value as JSON into a file that only this user can read.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_vec_pretty(value);
    let text = text.map_err(|error| Failure::new(Exit::Failed, error))?;
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(&text)).map_err(|error| {
        let what = format!("cannot write {}", path.display());
        Failure::new(Exit::Failed, anyhow::Error::new(error).context(what))
    })
}

/// Lines under a heading, if there are any.
pub(super) fn section(text: &mut String, heading: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    const BOLD: Style = Style::new().bold();
    text.push_str(&format!("\n{BOLD}{heading}{BOLD:#}\n"));
    for line in lines {
        text.push_str(&format!("  {line}\n"));
    }
}

/// Lines that begin with a word each, and go on below each other.
pub(super) fn headed(rows: Vec<(String, String)>, page: usize) -> Vec<String> {
    let widest = rows.iter().map(|(head, _)| head.len()).max().unwrap_or(0);
    let lines = rows.iter().flat_map(|(head, text)| {
        let words = crate::text::wrapped(text, page.saturating_sub(widest + 2));
        let head = |at: usize| if at == 0 { head.as_str() } else { "" };
        let line = |(at, words): (usize, &String)| format!("{:widest$}  {words}", head(at));
        words.iter().enumerate().map(line).collect::<Vec<_>>()
    });
    lines.collect()
}

/// The failure of a command that cannot print its answer. If the reader has gone, as in
/// `cuda-cluster …
/// head`, there is no message, and the command ends as if by SIGPIPE.
pub(super) fn unwritable(error: io::Error) -> Failure {
    unwritable_to("standard output", error)
}

/// The same, of this stream.
pub(super) fn unwritable_to(stream: &'static str, error: io::Error) -> Failure {
    let exit = match error.kind() {
        io::ErrorKind::BrokenPipe => Exit::BROKEN_PIPE,
        _ => Exit::Failed,
    };
    Failure::new(exit, anyhow::Error::new(error).context(format!("cannot write to {stream}")))
}

/// How often a command that waits for something to print looks for its reader.
const LOOK: Duration = Duration::from_millis(100);

/// Fails if the reader of standard output has gone, which is otherwise found out by writing.
pub(super) fn expect_reader() -> Result<(), Failure> {
    let stdout = io::stdout();
    let mut watched = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
    let looked = poll(&mut watched, PollTimeout::ZERO);
    let found = watched[0].revents().unwrap_or(PollFlags::empty());
    if looked.is_ok() && found.intersects(PollFlags::POLLERR) {
        return Err(unwritable(io::ErrorKind::BrokenPipe.into()));
    }
    Ok(())
}

/// Returns when the reader of standard output has gone.
pub(super) async fn reader_gone() -> Failure {
    loop {
        if let Err(failure) = expect_reader() {
            return failure;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether standard output and standard error are the same file, as in a terminal or after `2>&1`.
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

/// Below this width lines are not wrapped.
const NARROWEST: usize = 40;

/// A table that fits standard output: if that is a narrow terminal, columns of `less` are left out,
/// the first of them first. Then a line says so, and that `all` shows them. If none may be left
/// out, the table comes in parts.
pub(super) fn fitted(headings: &[&str], rows: &[Vec<String>], less: &[&str], all: &str) -> String {
    fitted_to(columns(), headings, rows, less, all)
}

fn fitted_to(
    width: Option<usize>,
    headings: &[&str],
    rows: &[Vec<String>],
    less: &[&str],
    all: &str,
) -> String {
    let mut left_out: Vec<&str> = Vec::new();
    let mut less = less.iter().filter(|name| headings.contains(name));
    loop {
        let kept: Vec<usize> =
            (0..headings.len()).filter(|at| !left_out.contains(&headings[*at])).collect();
        let shown: Vec<&str> = kept.iter().map(|at| headings[*at]).collect();
        let cells = rows.iter().map(|row| kept.iter().map(|at| row[*at].clone()).collect());
        let mut text = table(&shown, cells);
        let widest = anstream::adapter::strip_str(&text)
            .to_string()
            .lines()
            .map(|line| line.chars().count())
            .max();
        let fits = width.zip(widest).is_none_or(|(width, widest)| widest <= width);
        match less.next().filter(|_| !fits) {
            Some(name) => left_out.push(name),
            // Nothing may be left out: columns that do not fit are shown below.
            None if !fits && left_out.is_empty() => {
                return in_parts(width.unwrap_or(usize::MAX), headings, rows);
            }
            None => {
                if !left_out.is_empty() {
                    let what = left_out.join(", ");
                    let note = format!("(left out for lack of width: {what}; {all})");
                    text.push_str(&wrapped(&note, 0, width));
                    text.push('\n');
                }
                return text;
            }
        }
    }
}

/// Tables of some of the columns each, one below the other; the first column is in all.
fn in_parts(width: usize, headings: &[&str], rows: &[Vec<String>]) -> String {
    let length = |at: usize| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain([headings[at].chars().count()]).max().unwrap_or(0)
    };
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let mut taken = usize::MAX;
    for at in 1..headings.len() {
        if taken.saturating_add(2 + length(at)) > width {
            parts.push(vec![0]);
            taken = length(0);
        }
        taken += 2 + length(at);
        parts.last_mut().into_iter().for_each(|part| part.push(at));
    }
    let tables = parts.iter().map(|part| {
        let names: Vec<&str> = part.iter().map(|at| headings[*at]).collect();
        table(&names, rows.iter().map(|row| part.iter().map(|at| row[*at].clone()).collect()))
    });
    tables.collect::<Vec<_>>().join("\n")
}

/// A heading in capitals, except units such as `GB/s` and `µs`.
fn shouted(heading: &str) -> String {
    let unit = heading.contains(|c: char| c.is_uppercase() || !c.is_ascii());
    if unit { heading.to_owned() } else { heading.to_uppercase() }
}

/// A table without borders: columns two spaces apart, headings in bold.
pub(super) fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    use comfy_table::{Cell, ColumnConstraint, Table, presets};
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(headings.iter().map(|heading| Cell::new(shouted(heading))));
    for row in rows {
        table.add_row(row.iter().map(|cell| plain(cell).into_owned()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_leaves_out_what_matters_less_until_it_fits_and_says_so() {
        let rows = [vec!["gpu0".to_owned(), "0-19,40-59".to_owned(), "ready".to_owned()]];
        let fit = |width| {
            let headings = ["worker", "cpus", "state"];
            let text = fitted_to(width, &headings, &rows, &["nic", "cpus"], "-o wide shows all");
            anstream::adapter::strip_str(&text).to_string()
        };
        let whole = "WORKER  CPUS        STATE\ngpu0    0-19,40-59  ready\n";
        assert_eq!(fit(None), whole);
        assert_eq!(fit(Some(25)), whole);
        assert_eq!(
            fit(Some(24)),
            "WORKER  STATE\ngpu0    ready\n\
             (left out for lack of width: cpus; -o wide shows all)\n"
        );
        assert!(fit(Some(3)).starts_with("WORKER  STATE\n"), "the rest stays");
        let headings = ["worker", "cpus", "state"];
        let parts = fitted_to(Some(24), &headings, &rows, &[], "");
        assert_eq!(
            anstream::adapter::strip_str(&parts).to_string(),
            "WORKER  CPUS\ngpu0    0-19,40-59\n\nWORKER  STATE\ngpu0    ready\n"
        );
    }

    #[test]
    fn texts_are_wrapped_between_words_alone() {
        let text = "this machine has CPUs 0-1, and a-word-that-is-longer-than-any-line-can-be fits";
        assert_eq!(wrapped(text, 6, None), text);
        assert_eq!(
            wrapped(text, 6, Some(40)),
            "this machine has CPUs 0-1, and\n  a-word-that-is-longer-than-any-line-can-be\n  fits"
        );
        assert_eq!(wrapped("a\nb", 39, Some(40)), "a\nb", "lines stay lines");
        let tree = "│  ├─ GPU0  NVIDIA H100 80GB HBM3  NV18 to all GPUs";
        let parts = "│  ├─ GPU0  NVIDIA H100 80GB HBM3  NV18\n│  │        to all GPUs";
        assert_eq!(wrapped(tree, 0, Some(40)), parts);
        let columns = "ok       ucx   /usr/lib/libucp.so.0 of the system itself";
        let parts = "ok       ucx   /usr/lib/libucp.so.0 of\n               the system itself";
        assert_eq!(wrapped(columns, 0, Some(40)), parts);
        let long = format!("  {}", "x".repeat(50));
        assert_eq!(wrapped(&long, 0, Some(40)), long, "a word without a place to end stays whole");
    }
}
