//! `events`: shows the events of a cluster, past and, with `--follow`, new ones.

use std::collections::VecDeque;
use std::io::BufRead;

use clap::Args;

use super::failure::{Exit, Failure};
use super::workers;
use super::{output, reach};
use crate::ids::ClusterName;
use crate::supervise::Record;

/// Arguments of `events`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    name: Option<ClusterName>,
    /// Keep showing new events until Ctrl-C or the end of the cluster
    #[arg(short, long)]
    follow: bool,
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
    for line in std::io::BufReader::new(file).lines().map_while(Result::ok) {
        show(&line, arguments.json)?;
        shown.push_back(line);
        if shown.len() > OVERLAP {
            shown.pop_front();
        }
    }
    while let Some(stream) = &mut stream {
        let next = runtime.block_on(stream.next_event()).map_err(lost)?;
        let Some(line) = next else { break };
        if !shown.contains(&line) {
            show(&line, arguments.json)?;
        }
    }
    Ok(Exit::Done)
}

fn show(line: &str, json: bool) -> Result<(), Failure> {
    if json {
        return output::print(&format!("{line}\n"));
    }
    match serde_json::from_str::<Record>(line) {
        Ok(record) => output::print(&format!("{}  {}\n", record.at, workers::sentence(&record))),
        // The last line may be incomplete, because the file is still being written.
        Err(_) => Ok(()),
    }
}
