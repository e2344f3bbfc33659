//! `events`: shows the events of a cluster, past and, with `--follow`, new ones.

use std::collections::VecDeque;
use std::io::BufRead;
use std::time::SystemTime;

use anstyle::Style;
use clap::Args;

use super::failure::{Exit, Failure};
use super::flags::whole;
use super::logs::colour_of;
use super::sanitize::plain;
use super::workers;
use super::{output, reach};
use crate::ids::ClusterName;
use crate::supervise::Record;
use crate::units::Span;

/// Arguments of `events`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster events demo --tail 20
  cuda-cluster events demo -f --since 5m")]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    name: Option<ClusterName>,
    /// Keep showing new events until Ctrl-C or the end of the cluster
    #[arg(short, long)]
    follow: bool,
    /// Show only the last events
    #[arg(long, value_name = "EVENTS", value_parser = whole::<usize>)]
    tail: Option<usize>,
    /// Show only events from this period, such as 5m
    #[arg(long, value_name = "SPAN")]
    since: Option<Span>,
    /// Print the records as JSON lines, as stored in events.jsonl
    #[arg(long)]
    json: bool,
}

/// More records than can be written between opening the stream and reaching the end of the file.
const OVERLAP: usize = 1024;

/// Shows events.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let (paths, found) = reach::find_also_ended(arguments.name.as_ref())?;
    let lost = |error| match found.as_ref().and_then(reach::ended_meanwhile) {
        Some(ended) => Failure { exit: Exit::Failed, ..reach::not_found(ended) },
        None => reach::lost(error),
    };
    let runtime = reach::runtime()?;
    // Open the stream before reading the file, so that no event between the two is lost.
    let mut stream = match found.as_ref().filter(|_| arguments.follow) {
        Some(found) => Some(runtime.block_on(found.control().stream("/v1/events")).map_err(lost)?),
        None => None,
    };
    let path = paths.events();
    let file = std::fs::File::open(&path).map_err(|error| {
        let error = anyhow::Error::new(error).context(format!("cannot read {}", path.display()));
        Failure::new(Exit::Failed, error)
    })?;
    // An event written while the file is read appears in both the file and the stream.
    let mut shown = VecDeque::new();
    let mut wanted = VecDeque::new();
    let since = arguments.since.and_then(|span| SystemTime::now().checked_sub(span.0));
    for line in std::io::BufReader::new(file).lines().map_while(Result::ok) {
        if since.is_none_or(|since| is_since(&line, since)) {
            wanted.push_back(line.clone());
        }
        if arguments.tail.is_some_and(|tail| wanted.len() > tail) {
            wanted.pop_front();
        }
        shown.push_back(line);
        if shown.len() > OVERLAP {
            shown.pop_front();
        }
    }
    wanted.iter().try_for_each(|line| show(line, arguments.json))?;
    if let (true, Some(span), None) = (wanted.is_empty(), arguments.since, &stream) {
        output::note(&format!("nothing happened in the last {span}"));
    }
    while let Some(stream) = &mut stream {
        let next = runtime.block_on(async {
            tokio::select! {
                next = stream.next_event() => next.map_err(lost),
                failure = output::reader_gone() => Err(failure),
            }
        });
        let Some(line) = next? else { break };
        if !shown.contains(&line) {
            show(&line, arguments.json)?;
        }
    }
    Ok(Exit::Done)
}

/// Whether a record is of this time or later; one without a time is.
fn is_since(line: &str, since: SystemTime) -> bool {
    let record = serde_json::from_str::<Record>(line).ok();
    let at = record.and_then(|record| humantime::parse_rfc3339(&record.at).ok());
    at.is_none_or(|at| at >= since)
}

fn show(line: &str, json: bool) -> Result<(), Failure> {
    if json {
        return output::print(&format!("{line}\n"));
    }
    match serde_json::from_str::<Record>(line) {
        Ok(record) => {
            let (time, sentence) = (Style::new().dimmed(), workers::sentence(&record));
            let sentence = plain(&sentence);
            let who = record.process.as_deref().map(colour_of).unwrap_or_default();
            // The sentence begins with the name and a colon.
            let (name, what) = sentence.split_once(':').unwrap_or((&sentence, ""));
            output::print_text(&format!("{time}{}{time:#}  {who}{name}{who:#}:{what}\n", record.at))
        }
        // The last line may be incomplete, because the file is still being written. A complete one
        // is an event that another version of this program knows.
        Err(_) if serde_json::from_str::<serde_json::Value>(line).is_err() => Ok(()),
        Err(_) => output::print_text(&format!("{line}\n")),
    }
}
