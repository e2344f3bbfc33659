//! What a check is, from the table of checks.
//!
//! *Invariant:* says nothing that the table does not.

use std::fmt::Write;

use anstyle::Style;

use super::super::failure::{Exit, Failure};
use super::super::flags::keys::in_flags;
use super::super::output::{self, Form};
use crate::preflight::{self, Check};

const BOLD: Style = Style::new().bold();

/// The word for all checks.
const ALL: &str = "all";

/// Explains a check or all, or lists all where none is named.
pub(super) fn explain(id: &str, form: Form) -> Result<Exit, Failure> {
    let wanted: Vec<&Check> = match id {
        "" | ALL => preflight::checks().collect(),
        id => vec![preflight::check(id).ok_or_else(|| unknown(id))?],
    };
    match form {
        Form::Json => {
            let all: Vec<serde_json::Value> = wanted.iter().map(|check| value(check)).collect();
            output::print_json(&serde_json::json!({ "version": 2, "checks": all }))?;
        }
        Form::Table if id.is_empty() => {
            let width = wanted.iter().map(|check| check.id.len()).max().unwrap_or(0);
            let line = |check: &&Check| format!("{:width$}  {}\n", check.id, check.title);
            output::print_text(&wanted.iter().map(line).collect::<String>())?;
        }
        Form::Table if id == ALL => output::print(&document())?,
        Form::Table => output::print_text(&wanted.iter().map(|it| page(it)).collect::<String>())?,
    }
    Ok(Exit::Done)
}

fn unknown(id: &str) -> Failure {
    let error = anyhow::anyhow!("there is no check {id:?}");
    let near = crate::text::nearest(id, preflight::checks().map(|check| check.id));
    Failure::new(Exit::Usage, error).hint(match near {
        Some(near) => format!("did you mean '{near}'?"),
        None => "cuda-cluster doctor --explain lists all".to_owned(),
    })
}

/// What is said of a check: a heading and the words.
fn rows(check: &Check) -> impl Iterator<Item = (&'static str, String)> {
    let remedy = match check.remedy {
        "" => String::new(),
        remedy => format!("{} ({})", in_flags(remedy.to_owned()), check.cost.text()),
    };
    let rows = [
        ("looks at", check.looks_at.to_owned()),
        ("if bad", check.consequence.to_owned()),
        ("source", check.source.to_owned()),
        ("do", remedy),
    ];
    rows.into_iter().filter(|(_, words)| !words.is_empty())
}

/// All checks as a document in Markdown: `src/CHECKS.md`.
fn document() -> String {
    let mut text = format!(
        "# What doctor checks\n\n`cuda-cluster doctor` makes {} checks for a plan, or for the \
         machine where there is none. `cuda-cluster doctor\n--explain ID` says the same of one \
         check. Those that are minor count for nothing; `-v` shows them.\n",
        preflight::checks().count()
    );
    for check in preflight::checks() {
        let minor = if check.minor { " (minor)" } else { "" };
        let _ = writeln!(text, "\n## {}\n\n{}{minor}\n", check.id, check.title);
        for (head, words) in rows(check) {
            let _ = writeln!(text, "- **{head}** {words}");
        }
    }
    text
}

fn page(check: &Check) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}: {}\n\n", check.id, check.title);
    for (head, words) in rows(check) {
        let _ = writeln!(text, "{head:8}  {words}");
    }
    if check.minor {
        let _ = writeln!(text, "{:8}  a minor note: doctor shows it with -v", "weight");
    }
    text
}

fn value(check: &Check) -> serde_json::Value {
    serde_json::json!({
        "id": check.id,
        "title": check.title,
        "looks_at": check.looks_at,
        "consequence": check.consequence,
        "source": check.source,
        "remedy": in_flags(check.remedy.to_owned()),
        "cost": check.cost,
        "minor": check.minor,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_is_the_tables() {
        let is = include_str!("../../CHECKS.md") == document();
        assert!(is, "cuda-cluster doctor --explain all > src/CHECKS.md");
    }
}
