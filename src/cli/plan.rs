//! `cuda-cluster plan`: shows what would run, where it would be bound, and why.
//!
//! Does not decide; shows the plan, in whole or in part.
//!
//! *Invariant:* shows exactly what `up` would run with the same arguments.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anstyle::Style;
use clap::{Args, ValueEnum};

use super::failure::{Exit, Failure};
use super::flags::Asked;
use super::flags::keys::Keys;
use super::output::{headed, section};
use super::{hosts, input, output, predict, source};
use crate::plan::{
    self, CallerEnvironment, DaskPlan, EnginePlan, Plan, Rejected, SchedulerPlan, Why, WorkerPlan,
};
use crate::spec::{PortRange, Request};
use crate::text::wrapped;
use crate::topology::Topology;
use crate::units::HumanBytes;
use crate::{cluster, probe};

/// Arguments of `plan`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster plan --enable-nvlink
  cuda-cluster plan --topology dgx-h100 --explain gpu3
  cuda-cluster plan --topology dgx-h100 --predict  # GB/s, and what limits them
  cuda-cluster plan -o yaml > plan.yaml            # run it with up --plan")]
pub(super) struct Arguments {
    #[command(flatten)]
    asked: Asked,
    /// Explain the decisions for all workers, or for one
    #[arg(long, value_name = "WORKER", num_args = 0..=1, default_missing_value = "")]
    explain: Option<String>,
    /// Predict what the workers' GPUs should deliver in GB/s, and what limits them
    #[arg(long, conflicts_with_all = ["explain", "process"])]
    predict: bool,
    /// Print the environment of this process only (with '-o env'): a worker, scheduler or client
    #[arg(long, value_name = "PROCESS")]
    process: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

/// Output formats of a plan.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// For people
    #[default]
    Table,
    /// The complete plan, for programs
    Json,
    /// The complete plan; run it with 'up --plan'
    Yaml,
    /// The variables of each process, for a shell
    Env,
}

/// Prints a plan.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let mut request = arguments.asked.request()?;
    hosts::settle(&mut request)?;
    let (machine, plan) = planned_for(&request)?;
    if arguments.predict {
        return predicted(&machine, &plan, arguments.output);
    }
    match (arguments.output, &arguments.explain) {
        (Form::Json, _) => output::print_json(&plan)?,
        (Form::Yaml, _) => {
            let text = serde_yaml::to_string(&plan);
            output::print(&text.map_err(|error| Failure::new(Exit::Failed, error))?)?;
        }
        (Form::Env, _) => output::print(&environment(&plan, arguments.process.as_deref())?)?,
        (Form::Table, None) => output::print_text(&summary(&plan))?,
        (Form::Table, Some(worker)) => output::print_text(&explanation(&plan, worker)?)?,
    }
    Ok(Exit::Done)
}

fn predicted(machine: &Topology, plan: &Plan, form: Form) -> Result<Exit, Failure> {
    let as_json = match form {
        Form::Table => false,
        Form::Json => true,
        Form::Yaml | Form::Env => {
            let error = anyhow::anyhow!("a prediction is neither a plan nor an environment");
            return Err(Failure::new(Exit::Usage, error).hint("'-o table' and '-o json' have one"));
        }
    };
    predict::print(machine, plan, as_json)?;
    Ok(Exit::Done)
}

/// Plans a request for its machine, given the environment of this process.
pub(super) fn planned(request: &Request) -> Result<Plan, Failure> {
    Ok(planned_for(request)?.1)
}

/// The same, with the machine.
fn planned_for(request: &Request) -> Result<(Topology, Plan), Failure> {
    let mut caller = probe::caller();
    let Some(src) = &request.spec.topology else {
        cluster::check_interface(request, &caller)
            .map_err(|error| Keys::of(request).unprepared(error))?;
        let examined = source::examined(&caller)?;
        let plan = cluster::decide(&examined, request, &caller)
            .map_err(|error| Keys::of(request).no_plan(error))?;
        cluster::check_here(&plan).map_err(|error| Keys::of(request).unprepared(error))?;
        return Ok((examined.topology, plan));
    };
    // This machine's cgroup and installed libraries say nothing about another machine.
    caller.memory_limit_bytes = None;
    let machine = source::load(src)?;
    let plan = decided(&machine, request, &caller)?;
    Ok((machine, plan))
}

fn decided(
    topology: &Topology,
    request: &Request,
    caller: &CallerEnvironment,
) -> Result<Plan, Failure> {
    plan::plan(topology, request, caller).map_err(|error| Keys::of(request).no_plan(error))
}

/// Reads a plan from a file or standard input (`-`).
pub(super) fn load(path: &Path) -> Result<Plan, Failure> {
    let text = input::read(path, plan::TEXT_LIMIT).map_err(|error| error.failure("plan", path))?;
    Plan::parse(&text).map_err(|error| {
        let hint = error.hint();
        let error = anyhow::Error::new(error);
        let error = error.context(format!("cannot use plan {}", input::shown(path)));
        Failure::new(Exit::Usage, error).hint(hint)
    })
}

/// Prints the summary of a plan, like `plan` without further arguments.
pub(super) fn show(plan: &Plan) -> Result<Exit, Failure> {
    output::print_text(&summary(plan))?;
    Ok(Exit::Done)
}

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();

/// The summary: a table of workers, shared settings, deciding keys, and notes.
fn summary(plan: &Plan) -> String {
    let mut text = title(plan);
    text.push('\n');
    text.push_str(&workers_table(plan));
    section(&mut text, "Environment of every worker", &shared_lines(plan));
    section(&mut text, "Environment of each worker", &own_lines(plan));
    section(
        &mut text,
        "Scheduler",
        &plan.scheduler.iter().flat_map(|it| scheduler_lines(plan, it)).collect::<Vec<_>>(),
    );
    section(&mut text, "Settings", &setting_lines(plan, false));
    section(&mut text, "Set by", &origin_lines(plan));
    section(&mut text, "Notes", &note_lines(plan));
    text
}

fn title(plan: &Plan) -> String {
    let machine = plan.machine.name.as_deref().unwrap_or("this machine");
    let workers = match plan.workers.len() {
        1 => "1 worker".to_owned(),
        count => format!("{count} workers"),
    };
    let simulated = if plan.machine.simulated { ", simulated" } else { "" };
    format!(
        "{BOLD}{}{BOLD:#}: {workers} of the {} engine on {machine}{simulated}\n",
        plan.name,
        plan.engine.kind()
    )
}

fn workers_table(plan: &Plan) -> String {
    let mig = plan.workers.iter().any(|w| w.gpu.as_ref().is_some_and(|g| g.mig.is_some()));
    let nics = plan.workers.iter().any(|worker| !worker.nics.is_empty());
    let programs = plan.workers.iter().any(|worker| worker.program.is_some());
    let mut headings = vec!["worker"];
    headings.extend(programs.then_some("program"));
    headings.push("gpu");
    headings.extend(mig.then_some("mig"));
    headings.extend(["pci", "cpus", "numa"]);
    headings.extend(nics.then_some("nic"));
    headings.extend(["device limit", "host limit"]);
    let dash = || "-".to_owned();
    let rows = plan.workers.iter().map(|worker| {
        let gpu = worker.gpu.as_ref();
        let mut row = vec![worker.name.clone()];
        if programs {
            row.push(worker.program.clone().unwrap_or_else(dash));
        }
        row.push(gpu.map_or_else(dash, |g| g.index.to_string()));
        if mig {
            row.push(gpu.and_then(|g| g.mig.clone()).unwrap_or_else(dash));
        }
        row.push(gpu.and_then(|g| g.pci).map_or_else(dash, |pci| pci.to_string()));
        row.push(
            worker.binding.cpus.as_ref().map_or_else(dash, |cpus| ellipsis(&cpus.to_string())),
        );
        row.push(worker.binding.mems.as_ref().map_or_else(dash, ToString::to_string));
        if nics {
            let names: Vec<String> = worker.nics.iter().map(ToString::to_string).collect();
            row.push(if names.is_empty() { dash() } else { names.join(",") });
        }
        row.push(worker.device_memory_limit_bytes.map_or_else(dash, human));
        row.push(worker.memory_limit_bytes.map_or_else(dash, human));
        row
    });
    let rows: Vec<Vec<String>> = rows.collect();
    output::fitted(&headings, &rows, &["numa", "pci", "host limit", "nic"], "-o yaml has all")
}

fn human(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// Truncates long CPU sets; every other format has them in full.
fn ellipsis(text: &str) -> String {
    const WIDEST: usize = 36;
    if text.len() <= WIDEST {
        return text.to_owned();
    }
    let kept = text[..WIDEST - 1].rfind(',').map_or("", |comma| &text[..comma]);
    format!("{kept},…")
}

/// The variables that have the same value in all workers.
fn shared(plan: &Plan) -> BTreeMap<&str, &str> {
    let Some((first, others)) = plan.workers.split_first() else { return BTreeMap::new() };
    let same = |name: &String, value: &String| {
        others.iter().all(|worker| worker.env.get(name) == Some(value))
    };
    let known = first.env.iter().filter(|(name, value)| same(name, value));
    known.map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

fn shared_lines(plan: &Plan) -> Vec<String> {
    let shared = shared(plan);
    let widest = shared.keys().map(|name| name.len()).max().unwrap_or(0);
    shared.iter().map(|(name, value)| format!("{name:widest$}  {value}")).collect()
}

fn own_lines(plan: &Plan) -> Vec<String> {
    let shared = shared(plan);
    let widest = plan.workers.iter().map(|worker| worker.name.len()).max().unwrap_or(0);
    let line = |worker: &WorkerPlan| {
        let own = worker.env.iter().filter(|(name, _)| !shared.contains_key(name.as_str()));
        let own: Vec<String> = own.map(|(name, value)| format!("{name}={value}")).collect();
        (!own.is_empty()).then(|| format!("{:widest$}  {}", worker.name, own.join("  ")))
    };
    plan.workers.iter().filter_map(line).collect()
}

fn scheduler_lines(plan: &Plan, scheduler: &SchedulerPlan) -> Vec<String> {
    let cpus =
        scheduler.binding.cpus.as_ref().map_or("any CPU".to_owned(), |c| format!("CPUs {c}"));
    let mut lines = vec![format!("{cpus}; {}", scheduler_address(plan).0)];
    let others = scheduler.why.iter().filter(|why| why.choice != "cpus");
    lines.extend(others.map(|why| format!("{} {}", why.choice, why.chosen)));
    lines
}

/// Where the scheduler listens, and why there.
fn scheduler_address(plan: &Plan) -> (String, &'static str) {
    let EnginePlan::Dask(dask) = &plan.engine else {
        // A command has none.
        return ("a socket in the run directory".to_owned(), "all its peers are on this machine");
    };
    let asked = ["scheduler.host", "scheduler.interface"];
    let reason = if asked.iter().any(|key| plan.origins.contains_key(*key)) {
        "asked for"
    } else {
        "loopback, because a scheduler runs the code of whoever reaches it"
    };
    (dask_address(dask), reason)
}

/// Where Dask's scheduler listens.
fn dask_address(dask: &DaskPlan) -> String {
    let host = match (&dask.host, &dask.interface) {
        (Some(host), _) => host.clone(),
        (None, Some(interface)) => format!("interface {interface}"),
        (None, None) => "the address of this machine".to_owned(),
    };
    let PortRange { low, high } = dask.scheduler_ports;
    let or_other = if dask.scheduler_ports_required { "" } else { ", or any free one" };
    let ports = match (low, high) {
        (0, _) => "any free port".to_owned(),
        (low, high) if low == high => format!("port {low}{or_other}"),
        (low, high) => format!("the first free port of {low} to {high}"),
    };
    format!("{host}; {ports}")
}

fn setting_lines(plan: &Plan, all: bool) -> Vec<String> {
    headed(plan::settings(plan, all), page() - 2)
}

fn origin_lines(plan: &Plan) -> Vec<String> {
    let mut by_origin: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (key, origin) in &plan.origins {
        by_origin.entry(origin.to_string()).or_default().push(key);
    }
    let rows = by_origin.into_iter().map(|(origin, keys)| (origin, keys.join(", ")));
    headed(rows.collect(), page() - 2)
}

fn note_lines(plan: &Plan) -> Vec<String> {
    let lines = plan.notes.iter().flat_map(|note| {
        let hang = |(at, words): (usize, String)| {
            if at == 0 { words } else { format!("    {words}") }
        };
        wrapped(&note.to_string(), page() - 6).into_iter().enumerate().map(hang)
    });
    lines.collect()
}

/// The decisions for all workers, or for one; shared decisions are printed once.
fn explanation(plan: &Plan, worker: &str) -> Result<String, Failure> {
    let chosen: Vec<&WorkerPlan> =
        plan.workers.iter().filter(|w| worker.is_empty() || w.name == worker).collect();
    let scheduler = plan.scheduler.as_ref().filter(|_| ["", "scheduler"].contains(&worker));
    let Some(first) = chosen.first() else {
        let scheduler = scheduler.ok_or_else(|| no_such_process(plan, worker))?;
        return Ok(title(plan) + &scheduler_reasons(plan, scheduler));
    };
    let shared = shared(plan);
    let is_shared = |why: &&Why| {
        let name = why.choice.strip_prefix("env.");
        name.is_some_and(|name| shared.contains_key(name) || !first.env.contains_key(name))
    };
    let common: Vec<&Why> = first.why.iter().filter(is_shared).collect();
    let mut text = title(plan);
    for worker in chosen {
        let _ = writeln!(text, "\n{BOLD}{}{BOLD:#}, rank {}", worker.name, worker.rank);
        let own: Vec<&Why> = worker
            .why
            .iter()
            .filter(|why| !common.iter().any(|c| c.choice == why.choice))
            .collect();
        reasons(&mut text, &own);
    }
    if !common.is_empty() {
        let _ = writeln!(text, "\n{BOLD}every worker{BOLD:#}");
        reasons(&mut text, &common);
    }
    if let Some(scheduler) = scheduler {
        text.push_str(&scheduler_reasons(plan, scheduler));
    }
    section(&mut text, "Settings", &setting_lines(plan, true));
    section(&mut text, "Set by", &origin_lines(plan));
    section(&mut text, "Notes", &note_lines(plan));
    Ok(text)
}

fn reasons(text: &mut String, whys: &[&Why]) {
    let widest = whys.iter().map(|why| label(why).len()).max().unwrap_or(0);
    for why in whys {
        because(text, why, widest);
    }
}

/// The name of a choice in a sentence.
fn label(why: &Why) -> &str {
    match why.choice.as_str() {
        "gpu" => "GPU",
        "cpus" => "CPUs",
        "mems" => "memory on",
        "nic" => "NIC",
        "memory_limit" => "host limit",
        "device_memory_limit" => "device limit",
        other => other.strip_prefix("env.").unwrap_or(other),
    }
}

/// The width of an explanation: a narrow terminal's, within reason.
fn page() -> usize {
    output::columns().unwrap_or(100).clamp(60, 100)
}

fn because(text: &mut String, why: &Why, widest: usize) {
    let (indent, page) = (widest + 4, page());
    let (label, chosen, reason) = (label(why), &why.chosen, &why.reason);
    let _ = write!(text, "  {label:widest$}  {BOLD}{chosen}{BOLD:#}");
    if indent + chosen.len() + 2 + reason.len() <= page {
        let _ = writeln!(text, "  {reason}");
    } else {
        text.push('\n');
        for line in wrapped(reason, page.saturating_sub(indent)) {
            let _ = writeln!(text, "{:indent$}{line}", "");
        }
    }
    for (names, reason) in alike(&why.rejected) {
        let words = format!("not {}: {reason}", names.join(", "));
        for (at, line) in wrapped(&words, page.saturating_sub(indent + 4)).iter().enumerate() {
            let hang = if at == 0 { "" } else { "    " };
            let _ = writeln!(text, "{:indent$}{DIM}{hang}{line}{DIM:#}", "");
        }
    }
}

/// Rejected candidates with reasons; adjacent candidates with the same reason share a line.
fn alike(rejected: &[Rejected]) -> Vec<(Vec<&str>, &str)> {
    let mut groups: Vec<(Vec<&str>, &str)> = Vec::new();
    for Rejected { what, why, .. } in rejected {
        match groups.last_mut().filter(|(_, reason)| reason == why) {
            Some((names, _)) => names.push(what),
            None => groups.push((vec![what], why)),
        }
    }
    groups
}

fn scheduler_reasons(plan: &Plan, scheduler: &SchedulerPlan) -> String {
    let mut text = format!("\n{BOLD}scheduler{BOLD:#}\n");
    let (address, reason) = scheduler_address(plan);
    let address = Why::new("address", address, reason);
    reasons(&mut text, &scheduler.why.iter().chain([&address]).collect::<Vec<_>>());
    text
}

fn no_such_process(plan: &Plan, name: &str) -> Failure {
    let names: Vec<&str> = plan.workers.iter().map(|worker| worker.name.as_str()).collect();
    let error = anyhow::anyhow!("the plan has no process {name:?}");
    Failure::new(Exit::Usage, error).hint(format!("the workers are {}", names.join(", ")))
}

/// The variables of every process, or of one, as shell assignments.
fn environment(plan: &Plan, only: Option<&str>) -> Result<String, Failure> {
    let scheduler = plan.scheduler.iter().map(|scheduler| ("scheduler", &scheduler.env));
    let workers = plan.workers.iter().map(|worker| (worker.name.as_str(), &worker.env));
    let processes: Vec<_> = scheduler
        .chain(workers)
        .chain([("client", &plan.client_env)])
        .filter(|(name, _)| only.is_none_or(|only| only == *name))
        .collect();
    if let (true, Some(name)) = (processes.is_empty(), only) {
        return Err(no_such_process(plan, name));
    }
    let mut text = String::new();
    for (at, (name, variables)) in processes.iter().enumerate() {
        let _ = writeln!(text, "{}# {name}", if at == 0 { "" } else { "\n" });
        text.push_str(&assignments(variables.iter()));
    }
    Ok(text)
}

/// The variables as POSIX shell assignments, one per line.
pub(super) fn assignments(
    variables: impl Iterator<Item = (impl std::fmt::Display, impl AsRef<str>)>,
) -> String {
    let line = |(name, value): (_, _)| assignment(&name, &value);
    variables.map(line).collect()
}

fn assignment(name: &impl std::fmt::Display, value: &impl AsRef<str>) -> String {
    format!("export {name}={}\n", quoted(value.as_ref()))
}

/// A value quoted for a POSIX shell.
fn quoted(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || ",./:_-^".contains(c);
    if !value.is_empty() && value.chars().all(plain) {
        return value.to_owned();
    }
    format!("'{}'", value.replace('\'', "'\\''"))
}
