//! `logs`: shows the output of a cluster's processes; also of an ended cluster while its directory
//! is kept.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anstyle::{AnsiColor, Style};
use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::whole;
use super::{output, reach};
use crate::cluster;
use crate::ids::ClusterName;
use crate::os::log_file::{Line, LogReader, Selection};
use crate::os::run_directory::Paths;
use crate::units::Span;

/// How often a followed log is checked for new lines.
const LOOK: Duration = Duration::from_millis(100);

/// Arguments of `logs`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster logs demo gpu3 -f
  cuda-cluster logs demo --since 5m --timestamps")]
pub(super) struct Arguments {
    /// The cluster (optional if only one is running), then its processes [default: all]
    #[arg(value_name = "[NAME] PROCESS")]
    words: Vec<String>,
    /// Keep showing new lines until Ctrl-C or the end of the cluster
    #[arg(short, long)]
    follow: bool,
    /// Show only the last lines of each log
    #[arg(long, value_name = "LINES", value_parser = whole::<usize>)]
    tail: Option<usize>,
    /// Show only lines from this period, such as 5m
    #[arg(long, value_name = "SPAN")]
    since: Option<Span>,
    /// Prefix each line with its time
    #[arg(short, long)]
    timestamps: bool,
}

/// One process's log.
struct Log {
    process: String,
    reader: LogReader,
}

/// Shows logs.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let (paths, processes) = meant(&arguments.words)?;
    let wanted = Selection {
        tail: arguments.tail,
        since: arguments.since.and_then(|span| SystemTime::now().checked_sub(span.0)),
    };
    let several = processes.len() > 1;
    let programs = programs(&paths);
    let label = |process: &str| match programs.get(process) {
        Some(program) => format!("{program}:{process}"),
        None => process.to_owned(),
    };
    let width = processes.iter().map(|process| label(process).len()).max().unwrap_or(0);
    let show = |process: &str, line: &Line| {
        let time =
            arguments.timestamps.then(|| humantime::format_rfc3339_millis(line.at).to_string());
        let mut heading = String::new();
        if let Some(time) = time {
            heading.push_str(&time);
            heading.push(' ');
        }
        if several {
            let colour = colour_of(process);
            let label = label(process);
            heading.push_str(&format!("{colour}{label:width$}{colour:#} "));
        }
        output::relay(&heading, &[&line.text[..], b"\n"].concat())
    };

    let mut logs = Vec::new();
    let mut old = Vec::new();
    for process in processes {
        let path = paths.log(&process);
        let (reader, lines) =
            LogReader::open(&path, wanted).map_err(|error| unreadable(&path, error))?;
        // When following, an incomplete last line is shown once it is complete.
        let unfinished = reader.unfinished().filter(|_| !arguments.follow);
        old.extend(lines.into_iter().chain(unfinished).map(|line| (process.clone(), line)));
        logs.push(Log { process, reader });
    }
    // Each log is already in order; a stable sort keeps it so.
    old.sort_by_key(|(_, line)| line.at);
    for (process, line) in &old {
        show(process, line)?;
    }
    if old.is_empty() && !arguments.follow && std::io::stdout().is_terminal() {
        output::note(&"nothing was logged");
    }
    if arguments.follow {
        follow(&paths, &mut logs, show)?;
    }
    Ok(Exit::Done)
}

/// Shows new lines until the cluster has ended.
fn follow(
    paths: &Paths,
    logs: &mut [Log],
    show: impl Fn(&str, &Line) -> Result<(), Failure>,
) -> Result<(), Failure> {
    loop {
        // Checked before the logs are read, so that no line written before the end is missed.
        let alive = paths.is_alive();
        for log in &mut *logs {
            let path = paths.log(&log.process);
            for line in log.reader.appended().map_err(|error| unreadable(&path, error))? {
                show(&log.process, &line)?;
            }
        }
        if !alive {
            return Ok(());
        }
        output::expect_reader()?;
        std::thread::sleep(LOOK);
    }
}

/// Resolves the arguments to a cluster and its processes.
fn meant(words: &[String]) -> Result<(Paths, Vec<String>), Failure> {
    let named = words.first().and_then(|word| word.parse::<ClusterName>().ok());
    let named = named.filter(|name| Paths::of(name).logs().is_dir());
    let (paths, rest) = match named {
        Some(name) => (reach::find_also_ended(Some(&name))?.0, &words[1..]),
        None => match cluster::find(None) {
            Ok(found) => (found.paths, words),
            Err(error) => {
                let about = words.first().map_or_else(
                    || "there are no logs".to_owned(),
                    |word| {
                        format!(
                            "there is no cluster {word}, and no one cluster with such a process"
                        )
                    },
                );
                let failure = reach::not_found(error);
                return Err(Failure { error: failure.error.context(about), ..failure });
            }
        },
    };
    let known = cluster::logged(&paths).map_err(|error| unreadable(&paths.logs(), error))?;
    if rest.is_empty() {
        return Ok((paths, known));
    }
    for word in rest {
        if !known.contains(word) {
            let error =
                anyhow::anyhow!("no process {word:?} has a log in {}", paths.logs().display());
            let hint = (!known.is_empty()).then(|| format!("there are: {}", known.join(", ")));
            return Err(Failure::new(Exit::Usage, error).maybe_hint(hint));
        }
    }
    Ok((paths, rest.to_vec()))
}

/// Which of several programs each process runs, as planned.
fn programs(paths: &Paths) -> BTreeMap<String, String> {
    let workers = cluster::recorded_plan(paths).into_iter().flat_map(|plan| plan.workers);
    workers.filter_map(|worker| Some((worker.name, worker.program?))).collect()
}

fn unreadable(path: &Path, error: std::io::Error) -> Failure {
    let error = anyhow::Error::new(error).context(format!("cannot read {}", path.display()));
    Failure::new(Exit::Failed, error)
}

/// A process always has the same colour.
pub(super) fn colour_of(process: &str) -> Style {
    const COLOURS: [AnsiColor; 6] = [
        AnsiColor::Cyan,
        AnsiColor::Green,
        AnsiColor::Magenta,
        AnsiColor::Yellow,
        AnsiColor::Blue,
        AnsiColor::BrightCyan,
    ];
    let sum: usize = process.bytes().map(usize::from).sum();
    Style::new().fg_color(Some(COLOURS[sum % COLOURS.len()].into()))
}
