//! `doctor`: checks whether this machine can run clusters, and suggests fixes.

use anstyle::{AnsiColor, Style};
use clap::Args;

use super::failure::{Exit, Failure};
use super::output::{self, Form};
use super::reach;
use super::sanitize::plain;
use crate::cluster::doctor::{self, Verdict};

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster doctor
  cuda-cluster doctor -o json")]
pub(super) struct Arguments {
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

/// Checks this machine. Fails if no cluster can run here.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let findings = reach::runtime()?.block_on(doctor::doctor());
    match arguments.output {
        Form::Json => {
            output::print_json(&serde_json::json!({ "version": 1, "findings": findings }))?;
        }
        Form::Table => {
            let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
            for finding in &findings {
                let (word, colour) = match finding.verdict {
                    Verdict::Ok => ("ok", AnsiColor::Green),
                    Verdict::Warning => ("warning", AnsiColor::Yellow),
                    Verdict::Failed => ("FAILED", AnsiColor::Red),
                };
                let style = Style::new().fg_color(Some(colour.into()));
                let (check, text) = (&finding.check, plain(&finding.text));
                output::print_text(&format!("{style}{word:7}{style:#}  {check:width$}  {text}\n"))?;
                if let Some(hint) = finding.hint.as_deref().map(plain) {
                    output::print_text(&format!("{:7}  {:width$}  hint: {hint}\n", "", ""))?;
                }
            }
        }
    }
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Failed);
    Ok(if failed { Exit::Failed } else { Exit::Done })
}
