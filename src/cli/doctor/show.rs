//! Findings as people read them: the worst first, and how many are well.
//!
//! *Invariant:* every finding is shown, or counted in the last line.

use anstyle::{AnsiColor, Style};

use super::super::failure::Failure;
use super::super::output;
use super::super::sanitize::plain;
use crate::plan::Plan;
use crate::preflight::{Finding, Severity, grouped};

const BOLD: Style = Style::new().bold();

/// Prints findings; all of them where `verbose`.
pub(super) fn findings(
    findings: &[Finding],
    plan: Option<&Plan>,
    verbose: bool,
) -> Result<(), Failure> {
    let shown = |finding: &&Finding| match finding.severity {
        Severity::Error | Severity::Warning | Severity::CannotTell => true,
        Severity::Note => verbose || !finding.minor,
        Severity::Ok => verbose,
    };
    let findings = grouped(findings);
    let mut all: Vec<&Finding> = findings.iter().filter(shown).collect();
    all.sort_by_key(|finding| std::cmp::Reverse(rank(finding.severity)));
    let width = all.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    let mut text = format!("{BOLD}{}{BOLD:#}\n", title(plan));
    for finding in all {
        text.push_str(&lines(finding, width));
    }
    output::print_text(&(text + &summary(&findings)))
}

/// The order in which they are shown: what could not be looked at after what is bad.
fn rank(severity: Severity) -> u32 {
    match severity {
        Severity::Error => 4,
        Severity::Warning => 3,
        Severity::Note => 2,
        Severity::CannotTell => 1,
        Severity::Ok => 0,
    }
}

fn title(plan: Option<&Plan>) -> String {
    let Some(plan) = plan else { return "this machine, without a plan".to_owned() };
    let workers = match plan.workers.len() {
        1 => "1 worker".to_owned(),
        count => format!("{count} workers"),
    };
    let machine = plan.machine.name.as_deref().unwrap_or("this machine");
    format!("{}, for {workers} of the {} engine", plain(machine), plan.engine.kind())
}

fn lines(finding: &Finding, width: usize) -> String {
    let (word, colour) = match finding.severity {
        Severity::Error => ("ERROR", AnsiColor::Red),
        Severity::Warning => ("warning", AnsiColor::Yellow),
        Severity::Note => ("note", AnsiColor::Cyan),
        Severity::CannotTell => ("cannot tell", AnsiColor::Magenta),
        Severity::Ok => ("ok", AnsiColor::Green),
    };
    let style = Style::new().fg_color(Some(colour.into()));
    let about = finding.about.as_deref().map(|about| format!("{about}: ")).unwrap_or_default();
    let id = &finding.id;
    let mut text = format!("{style}{word:11}{style:#}  {id:width$}  ");
    text.push_str(&plain(&format!("{about}{}\n", finding.text)));
    let mut more = |head: &str, words: &str| {
        text.push_str(&format!("{:11}  {head}: {}\n", "", plain(words)));
    };
    if finding.severity == Severity::Ok || finding.severity == Severity::CannotTell {
        return text;
    }
    for seen in &finding.evidence {
        more("seen", &format!("{}: {}", seen.from, seen.value));
    }
    if let Some(consequence) = &finding.consequence {
        more("so", consequence);
    }
    if let Some(remedy) = &finding.remedy {
        let cost = finding.cost.map(|cost| format!(" ({})", cost.text())).unwrap_or_default();
        more("do", &format!("{remedy}{cost}"));
    }
    if !finding.concerns.is_empty() {
        more("for", &finding.concerns.join(", "));
    }
    text
}

fn summary(findings: &[Finding]) -> String {
    let of = |severity| findings.iter().filter(move |it| it.severity == severity);
    let count = |severity| of(severity).count();
    let minor = of(Severity::Note).filter(|it| it.minor).count();
    let parts = [
        (count(Severity::Error), "error", "errors"),
        (count(Severity::Warning), "warning", "warnings"),
        (count(Severity::Note) - minor, "note", "notes"),
        (minor, "minor note", "minor notes"),
        (count(Severity::CannotTell), "that cannot be told", "that cannot be told"),
        (count(Severity::Ok), "ok", "ok"),
    ];
    let parts = parts.iter().filter(|(number, ..)| *number > 0);
    let parts = parts.map(|(number, one, many)| match number {
        1 => format!("1 {one}"),
        number => format!("{number} {many}"),
    });
    let all: Vec<String> = parts.collect();
    let hint = "'doctor --explain ID' says more about a check, '-v' shows all";
    let checks = if findings.len() == 1 { "check" } else { "checks" };
    format!("{} {checks}: {}; {hint}\n", findings.len(), all.join(", "))
}
