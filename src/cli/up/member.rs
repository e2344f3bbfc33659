//! `__member`: this machine's part of a cluster whose scheduler is on another one.
//!
//! That one runs it here by ssh (`cluster::hosts`), and tells it over standard input what to bring
//! up.
//!
//! *Invariant:* nothing outlives standard input.

use std::collections::BTreeMap;
use std::io::{BufRead as _, Read as _};
use std::time::Duration;

use super::audience::{in_parts, tell_elsewhere};
use super::{Audience, Owner, Purpose, Signals, attend, noted, prepare};
use crate::cli::failure::{Exit, Failure};
use crate::cli::{doctor, reach, screen};
use crate::cluster::hosts::{
    Assignment, LONGEST_ASSIGNMENT, QUESTION, SECRET_FILE, Said, TlsTexts,
};
use crate::cluster::{self, Lifetime, Paths, Prepared};
use crate::spec::{Request, TlsSpec};

/// How long after the scheduler the end of standard input may be noticed if both have one cause.
const APART: Duration = Duration::from_secs(3);

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

/// The files that hold these texts here, by name, which are those of the spec from now on.
fn carried(texts: TlsTexts, paths: &Paths, tls: &mut TlsSpec) -> BTreeMap<String, String> {
    let TlsTexts { ca_file, cert, key } = texts;
    let files = [
        (&mut tls.ca_file, "ca.pem", ca_file),
        (&mut tls.cert, "cert.pem", cert),
        (&mut tls.key, "key.pem", key),
    ];
    let named = files.into_iter().map(|(path, name, text)| {
        *path = Some(paths.carried().join(name).display().to_string());
        (name.to_owned(), text)
    });
    named.collect()
}

fn bring_up(assignment: Assignment) -> Result<Exit, Failure> {
    let Assignment { mut spec, secret, machine, tls, preflight } = assignment;
    let paths = Paths::of(&spec.name.clone().unwrap_or_default());
    let carried = tls.map(|texts| carried(texts, &paths, &mut spec.tls)).unwrap_or_default();
    if secret.is_some() {
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
    let prepared = match &machine {
        // Its description is where the scheduler is.
        Some(_) => noted(cluster::prepare(&request, machine.as_ref()), &request)?,
        None => prepare(&request)?,
    };
    if preflight {
        doctor::refuse(&prepared.launched)?;
    }
    let prepared = Prepared { secret, carried, ..prepared };
    let name = prepared.plan.name.clone();
    let runtime = reach::runtime()?;
    let signals = runtime.block_on(async { Signals::new() })?;
    let purpose = Purpose { lifetime: Lifetime::Owned, proof: false };
    // A start that is refused because others have the name leaves these alone.
    let is_theirs = Paths::of(&name).is_alive();
    let mut ready = false;
    let ended = attend(prepared, purpose, Audience::Elsewhere, signals, &mut owner, &mut ready);
    let ended = runtime.block_on(ended);
    // Workers may miss the scheduler first, or leave with it; why is then kept here.
    let is_kept = (ready || !is_theirs) && Paths::of(&name).root().exists();
    if is_kept && runtime.block_on(owner.goes_within(APART)) {
        // Nobody comes to ask: where the scheduler was, all has ended.
        cluster::forget_ended(&name);
    } else if !ready {
        cluster::forget_failed_start(&name);
    }
    ended
}
