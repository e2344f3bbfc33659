//! `doctor`: checks whether this machine can run a plan, and says what to do.
//!
//! Judges nothing (`preflight` does) and tries nothing (`cluster::doctor` does).
//!
//! *Invariant:* exits with 4 if anything is an error for the plan at hand, and only then.

mod bandwidth;
mod explain;
mod show;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::flags::keys::{Keys, findings_in_flags, in_flags};
use super::flags::{self, Asked};
use super::output::{self, Form};
use super::{input, plan, reach};
use crate::cluster::doctor::bandwidth::Measured;
use crate::cluster::{self, doctor};
use crate::plan::Plan;
use crate::preflight::{self, Advice, Audience, Finding, Record, Severity};
use crate::probe::{self, Examined, ProbeError};

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster doctor                              # for one worker per GPU
  cuda-cluster doctor -f cluster.yaml              # for this cluster
  cuda-cluster doctor --enable-infiniband --explain acs
  cuda-cluster doctor --bandwidth                  # how fast data moves, without UCX
  cuda-cluster doctor --for nccl                   # settings for other launchers
  cuda-cluster doctor -o json")]
// It looks at this machine, or at a record of one.
#[command(mut_arg("topology", |arg| arg.hide(true)), mut_arg("simulate", |arg| arg.hide(true)))]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Judge the machine for a plan printed by 'plan -o yaml' or '-o json' ('-': standard input)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "file",
        conflicts_with_all = flags::deciding(),
    )]
    plan: Option<PathBuf>,
    /// Explain a check: what it looks at, what follows, what to do; without ID, list all checks;
    /// 'all' explains all, in Markdown
    #[arg(long, value_name = "ID", num_args = 0..=1, default_missing_value = "")]
    explain: Option<String>,
    /// Print the settings that this machine's faults ask for
    #[arg(long = "for", value_name = "PROGRAM", value_enum)]
    audience: Option<Listener>,
    /// Also copy between the host and each GPU and between GPUs, with CUDA alone: how fast, and
    /// whether the right bytes arrive; takes some ten seconds
    #[arg(long, conflicts_with_all = ["evidence", "record", "audience"])]
    bandwidth: bool,
    /// Write what was seen to a file ('-': standard output), and judge nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["evidence", "plan", "audience"])]
    record: Option<PathBuf>,
    /// Judge what '--record' has written, of any machine; nothing is tried
    #[arg(long, value_name = "FILE")]
    evidence: Option<PathBuf>,
    /// Show what is well, too, and minor notes
    #[arg(short, long)]
    verbose: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

/// Who is told of settings.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Listener {
    /// Programs with NCCL
    Nccl,
    /// Programs with UCX
    Ucx,
    /// vLLM
    Vllm,
}

/// The document of `-o json`.
#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    plan: Option<Planned>,
    findings: &'a [Finding],
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth: Option<&'a [Measured]>,
}

/// What the findings are for.
#[derive(Serialize)]
struct Planned {
    engine: String,
    workers: Vec<String>,
}

/// Checks this machine, or a recorded one.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    if let Some(id) = &arguments.explain {
        return explain::explain(id, arguments.output);
    }
    let seen = Seen::of(arguments)?;
    if let Some(file) = &arguments.record {
        return seen.record(file);
    }
    let (plan, unplanned) = seen.plan(arguments)?;
    let mut findings = match &seen {
        Seen::Here(examined) => reach::runtime()?.block_on(doctor::doctor(examined, plan.as_ref())),
        Seen::Recorded(record) => {
            preflight::judge(&record.evidence, &record.topology, plan.as_ref())
        }
    };
    // After the driver, whose fault it may be.
    findings.splice(1.min(findings.len())..1.min(findings.len()), unplanned);
    let findings = findings_in_flags(findings);
    if let Some(listener) = arguments.audience {
        return settings(&findings, listener, arguments.output);
    }
    let bandwidth = match &seen {
        Seen::Here(Ok(examined)) if arguments.bandwidth => {
            Some(bandwidth::measured(&examined.topology))
        }
        _ => None,
    };
    let rows = bandwidth.as_deref();
    match arguments.output {
        Form::Json => {
            let plan = plan.as_ref().map(|plan| Planned {
                engine: plan.engine.kind().to_string(),
                workers: plan.workers.iter().map(|worker| worker.name.clone()).collect(),
            });
            let findings = &findings;
            output::print_json(&Document { version: 2, plan, findings, bandwidth: rows })?;
        }
        Form::Table => {
            show::findings(&findings, plan.as_ref(), arguments.verbose)?;
            bandwidth::print(rows.unwrap_or_default())?;
        }
    }
    let failed = findings.iter().any(|finding| finding.severity == Severity::Error)
        || bandwidth::has_failed(rows.unwrap_or_default());
    Ok(if failed { Exit::Unverified } else { Exit::Done })
}

/// Refuses a plan for which anything is an error.
///
/// # Errors
/// With all that is.
pub(super) fn refuse(plan: &Plan) -> Result<(), Failure> {
    let examined = cluster::examine(&probe::caller());
    let findings = reach::runtime()?.block_on(doctor::doctor(&examined, Some(plan)));
    let findings = preflight::grouped(&findings);
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
    let errors: Vec<String> = errors.map(|error| in_flags(error.one_line())).collect();
    if errors.is_empty() {
        return Ok(());
    }
    let error = anyhow::anyhow!("preflight refuses the plan:\n  {}", errors.join("\n  "));
    Err(Failure::new(Exit::Unverified, error).hint("cuda-cluster doctor says more of each"))
}

/// A machine to judge.
enum Seen {
    Here(Result<Examined, ProbeError>),
    Recorded(Record),
}

impl Seen {
    fn of(arguments: &Arguments) -> Result<Self, Failure> {
        let Some(path) = &arguments.evidence else {
            return Ok(Seen::Here(cluster::examine(&probe::caller())));
        };
        let text = input::read(path, crate::topology::SIZE_LIMIT)
            .map_err(|error| error.failure("record", path))?;
        let read: Result<Record, _> = serde_json::from_str(&text);
        let record = read.map_err(|error| {
            let error = anyhow::Error::new(error);
            let error = error.context(format!("cannot use record {}", input::shown(path)));
            Failure::new(Exit::Usage, error).hint("cuda-cluster doctor --record FILE writes one")
        })?;
        if record.version != preflight::VERSION {
            let error = anyhow::anyhow!(
                "{} is of version {}, and this program reads {}",
                input::shown(path),
                record.version,
                preflight::VERSION
            );
            return Err(Failure::new(Exit::Usage, error));
        }
        Ok(Seen::Recorded(record))
    }

    /// The plan at hand, and a finding if there is none.
    fn plan(&self, arguments: &Arguments) -> Result<(Option<Plan>, Option<Finding>), Failure> {
        if let Some(path) = &arguments.plan {
            let plan = plan::load(path)?;
            let topology = match self {
                Seen::Here(examined) => examined.as_ref().ok().map(|examined| &examined.topology),
                Seen::Recorded(record) => Some(&record.topology),
            };
            let topology = topology.filter(|_| !plan.machine.simulated);
            let elsewhere = topology.and_then(|it| cluster::check_gpus(&plan, it).err());
            let finding = elsewhere.map(|error| {
                let finding = Finding::tried("plan", Severity::Error, error.to_string());
                finding.remedy(error.hint().unwrap_or_default())
            });
            return Ok((Some(plan), finding));
        }
        let request = arguments.asked.request()?;
        if request.spec.topology.is_some() {
            let error = anyhow::anyhow!("doctor looks at this machine, not at a topology");
            return Err(Failure::new(Exit::Usage, error)
                .hint("a machine that was recorded with --record is judged with --evidence"));
        }
        let (topology, mut caller) = match self {
            Seen::Here(Ok(examined)) => (&examined.topology, probe::caller()),
            Seen::Here(Err(_)) => return Ok((None, None)),
            Seen::Recorded(record) => (&record.topology, probe::caller()),
        };
        if let Seen::Recorded(_) = self {
            caller.memory_limit_bytes = None;
        }
        let planned = match self {
            Seen::Here(Ok(examined)) => cluster::decide(examined, &request, &caller),
            _ => crate::plan::plan(topology, &request, &caller),
        };
        match planned {
            Ok(plan) => Ok((Some(plan), None)),
            // Who has asked for nothing may be on a machine without GPUs.
            Err(error) => {
                let asked = !arguments.asked.file.is_empty() || !request.origins.is_empty();
                let severity = if asked { Severity::Error } else { Severity::Note };
                let failure = Keys::of(&request).no_plan(error);
                let finding = Finding::tried("plan", severity, failure.one_line());
                Ok((None, Some(finding)))
            }
        }
    }

    fn record(&self, file: &Path) -> Result<Exit, Failure> {
        let examined = match self {
            Seen::Here(Ok(examined)) => examined,
            Seen::Here(Err(error)) => {
                return Err(
                    Failure::new(Exit::Failed, anyhow::anyhow!("{error}")).maybe_hint(error.hint())
                );
            }
            Seen::Recorded(_) => return Ok(Exit::Done),
        };
        let record = doctor::record(examined);
        if file == Path::new("-") {
            output::print_json(&record)?;
            return Ok(Exit::Done);
        }
        let text = serde_json::to_string_pretty(&record);
        let text = text.map_err(|error| Failure::new(Exit::Failed, error))?;
        std::fs::write(file, text + "\n").map_err(|error| {
            let what = format!("cannot write {}", file.display());
            Failure::new(Exit::Failed, anyhow::Error::new(error).context(what))
        })?;
        Ok(Exit::Done)
    }
}

/// Prints settings, with what each is for.
fn settings(findings: &[Finding], listener: Listener, form: Form) -> Result<Exit, Failure> {
    let audience = match listener {
        Listener::Nccl => Audience::Nccl,
        Listener::Ucx => Audience::Ucx,
        Listener::Vllm => Audience::Vllm,
    };
    let settings = preflight::advice(findings, audience);
    match form {
        Form::Json => {
            output::print_json(&serde_json::json!({ "version": 2, "settings": settings }))?;
        }
        Form::Table => {
            let line = |Advice { name, value, id, reason }: &Advice| {
                let assignment = plan::assignments([(name, value)].into_iter());
                format!("# {id}: {reason}\n{assignment}")
            };
            let text: String = settings.iter().map(line).collect();
            output::print(if text.is_empty() { "# nothing is to be set\n" } else { &text })?;
        }
    }
    Ok(Exit::Done)
}
