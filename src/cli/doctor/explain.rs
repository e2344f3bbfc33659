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

/// Explains a check, or lists all where none is named.
pub(super) fn explain(id: &str, form: Form) -> Result<Exit, Failure> {
    let wanted: Vec<&Check> = match id {
        "" => preflight::checks().collect(),
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

fn page(check: &Check) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}: {}\n\n", check.id, check.title);
    let cost = check.cost.text();
    let rows = [
        ("looks at", check.looks_at),
        ("if bad", check.consequence),
        ("source", check.source),
        ("do", &in_flags(check.remedy.to_owned())),
        ("which", cost),
    ];
    for (head, words) in rows {
        if !words.is_empty() {
            let _ = writeln!(text, "{head:8}  {words}");
        }
    }
    if check.minor {
        let _ = writeln!(text, "{:8}  it counts for nothing: doctor shows it with -v", "weight");
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
