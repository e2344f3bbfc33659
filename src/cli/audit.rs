//! Says at a job's end which wires the bytes between its processes took, and what differs from the
//! plan.

use super::output;
use super::sanitize::plain;
use crate::plan::Plan;
use cuda_cluster_why::audit::Audit;

/// What a supervisor says of the bytes at the end.
pub(super) type Concluded = Option<Box<Result<Audit, String>>>;

/// The key that asks for it.
const KEY: &str = "supervision.audit";

/// Says it; `false` if the job did not use the wires that its plan has, or that was not seen.
///
/// One that was not asked for by name only says what differs.
pub(super) fn conclude(command: &str, plan: &Plan, concluded: &Concluded) -> bool {
    let audit = match concluded.as_deref() {
        Some(Ok(audit)) => audit,
        Some(Err(why)) => {
            output::status(&format!(
                "{command}: the bytes between the processes were not counted: {why}"
            ));
            return false;
        }
        // Nobody has asked, or the supervisor was killed, which is said elsewhere.
        None => return !plan.supervision.audit,
    };
    let asked = plan.origins.contains_key(KEY);
    if asked {
        let seconds = audit.ms.div_ceil(1000);
        output::status(&format!("{command}: which wires the bytes took, in {seconds} s"));
    }
    for line in lines(audit, asked) {
        output::status(&format!("{command}: {line}"));
    }
    !audit.is_below_plan()
}

/// An audit in lines; without what is as planned if that was not asked for.
pub(super) fn lines(audit: &Audit, whole: bool) -> Vec<String> {
    let mut lines = Vec::new();
    if whole {
        lines.extend(audit.lines().iter().map(|line| format!("  {}", plain(line))));
        lines.extend(audit.unseen.iter().map(|what| format!("  not seen: {what}")));
    }
    for finding in &audit.findings {
        lines.push(format!("* {}", plain(&finding.text)));
    }
    if whole || !audit.findings.is_empty() {
        for cause in &audit.causes {
            lines.push(format!("* {}", cause.text));
            // As it was written, so that it can be searched for.
            lines.push(format!("    {}", plain(&cause.line)));
        }
    }
    lines
}
