//! `__member`: this machine's part of a cluster whose scheduler is on another one.
//!
//! That one runs it here by ssh (`cluster::hosts`), and tells it over standard input what to bring
//! up.
//!
//! *Invariant:* nothing outlives standard input.

use std::io::{BufRead as _, Read as _};

use super::audience::{in_parts, tell_elsewhere};
use super::{Audience, Owner, Purpose, Signals, attend, prepare};
use crate::cli::failure::{Exit, Failure};
use crate::cli::{reach, screen};
use crate::cluster::hosts::{Assignment, LONGEST_ASSIGNMENT, QUESTION, SECRET_FILE, Said};
use crate::cluster::{self, Lifetime, Paths};
use crate::spec::Request;

/// Brings up the workers of this machine, until standard input is closed.
pub(in crate::cli) fn run() -> Result<Exit, Failure> {
    tell_elsewhere(&Said::Hello { version: env!("CARGO_PKG_VERSION").to_owned() })?;
    let done = match assignment()? {
        Some(assignment) => bring_up(assignment),
        None => return Ok(Exit::Done),
    };
    if let Err(failure) = &done {
        let (message, causes) = in_parts(&failure.error);
        // Whoever has gone need not be told.
        let _ = tell_elsewhere(&Said::Failed { message, causes, hint: failure.hint.clone() });
    }
    done
}

/// What to bring up; `None` if the other end has gone before it said so.
fn assignment() -> Result<Option<Assignment>, Failure> {
    let mut line = String::new();
    let read = std::io::stdin().lock().take(LONGEST_ASSIGNMENT).read_line(&mut line);
    read.map_err(|error| Failure::new(Exit::Usage, error))?;
    if line.is_empty() {
        return Ok(None);
    }
    let read = serde_json::from_str(&line);
    read.map(Some).map_err(|error| {
        // Not what was read, which may have secrets in it.
        let error = anyhow::anyhow!("standard input has no assignment (column {})", error.column());
        let hint = "'cuda-cluster up' runs this on other machines; run 'cuda-cluster up' itself";
        Failure::new(Exit::Usage, error).hint(hint)
    })
}

fn bring_up(assignment: Assignment) -> Result<Exit, Failure> {
    let Assignment { mut spec, secret } = assignment;
    if secret.is_some() {
        let paths = Paths::of(&spec.name.clone().unwrap_or_default());
        let config = spec.dask.config.get_or_insert_default();
        let file = || paths.secret().display().to_string();
        config.entry(SECRET_FILE.to_owned()).or_insert_with(file);
    }
    let request = Request::of(spec).map_err(|error| Failure::new(Exit::Usage, error))?;
    screen::open();
    let mut owner = Owner::elsewhere(|line| {
        if line.trim_ascii() == QUESTION.as_bytes() {
            // If the other end has gone, standard input says so.
            let _ = tell_elsewhere(&Said::Alive);
        }
    })?;
    let mut prepared = prepare(&request)?;
    prepared.secret = secret;
    let name = prepared.plan.name.clone();
    let runtime = reach::runtime()?;
    let signals = runtime.block_on(async { Signals::new() })?;
    let purpose = Purpose { lifetime: Lifetime::Owned, proof: false };
    let mut ready = false;
    let ended = attend(prepared, purpose, Audience::Elsewhere, signals, &mut owner, &mut ready);
    let ended = runtime.block_on(ended);
    if !ready {
        cluster::forget_failed_start(&name);
    }
    ended
}
