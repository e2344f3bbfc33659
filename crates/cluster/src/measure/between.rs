//! Measures connections between the workers of a cluster and those of other machines that have
//! joined its scheduler, and among these.
//!
//! Workers here are asked over their sockets, all others by the scheduler, over the connections
//! that Dask has. Does not judge; `wire::links::between` does.
//!
//! *Invariant:* a pair that was to be measured has a row, also if nothing came.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::{MeasureError, Subject, Wanted, sample};
use crate::dask::{Client, Elsewhere, Fetched, Receiver};
use cuda_cluster_model::plan::EnginePlan;
use cuda_cluster_supervise::ProcessPhase;
use cuda_cluster_supervise::state::{ClusterState, Joined, JoinedPhase};
use cuda_cluster_wire::links::between::{self, Came, End, Rail, Row};
use cuda_cluster_wire::links::{self, bandwidth};
use cuda_cluster_wire::native::Measurement;
use cuda_cluster_wire::peer::MemoryKind;

/// Bytes of a message, as within a machine: Dask's Python would be most of a smaller one.
const SIZE_BYTES: u64 = 16 << 20;

/// How long a pair may take beside its budget: that for which Dask tries to connect, and what a
/// network of 1 MB/s takes for the first messages.
const SILENCE: Duration = Duration::from_secs(90);

/// How long the scheduler may take to say where it is.
const ASKED: Duration = Duration::from_secs(10);

/// What was found between machines.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Between {
    /// The names of the machines, that of the scheduler first.
    pub hosts: Vec<String>,
    /// Ordered pairs of workers of different machines.
    pub pairs: usize,
    /// How many of them were to be measured.
    pub chosen: usize,
    /// Whether they are a sample of all.
    pub is_sample: bool,
    /// Those that were.
    pub measured: Vec<Row>,
    /// Workers with the same GPU, and whether their NICs are of one rail.
    pub rails: Vec<Rail>,
    /// What else there is to know.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Between {
    /// Whether all that was to be measured is as planned; if `strict`, also whether that was all.
    pub fn is_good(&self, strict: bool) -> bool {
        let rails = !strict || self.rails.iter().all(|rail| rail.is_one);
        let whole = !strict || !self.is_sample && self.measured.len() == self.chosen;
        let rows = self.measured.iter().all(|row| row.verdict == between::Verdict::Ok);
        // What was chosen and not measured is no success where nothing was.
        rows && rails && whole && (self.chosen == 0 || !self.measured.is_empty())
    }
}

/// A worker, and how it is asked and reached.
struct Worker {
    address: String,
    is_here: bool,
}

impl Worker {
    fn receiver<'a>(&'a self, end: &'a End) -> Receiver<'a> {
        match self.is_here {
            true => Receiver::Here(&end.name),
            false => Receiver::Elsewhere(Elsewhere { address: &self.address, name: &end.name }),
        }
    }
}

impl Wanted {
    /// Whether a worker that is asked for by name has joined from elsewhere.
    fn names(&self, name: &str) -> bool {
        [&self.from, &self.to].into_iter().flatten().any(|asked| asked == name)
    }

    /// Measures some of the pairs of workers of different machines, or `every` one; `None` if no
    /// worker has joined from elsewhere. Tells the pairs that are measured.
    ///
    /// # Errors
    /// If the supervisor can't be asked.
    pub async fn between(
        &self,
        subject: &Subject,
        every: bool,
        tell: &mut (dyn FnMut(usize, usize) + Send),
    ) -> Result<Option<Between>, MeasureError> {
        let EnginePlan::Dask(dask) = &subject.plan.engine else { return Ok(None) };
        let state: ClusterState = subject.control().read("/v1/state?fresh=true").await?;
        if state.joined.is_empty() {
            return Ok(None);
        }
        let client = Client::new(&subject.root);
        let mut found = Between::default();
        let (ends, workers) = participants(subject, &state, &client, &mut found).await;
        found.rails = between::rails(&ends);
        let all = sample::all(&ends);
        found.pairs = all.len();
        let is_wanted = |&(from, to): &sample::Pair| {
            let is = |asked: &Option<String>, at: usize| {
                asked.as_ref().is_none_or(|asked| *asked == ends[at].name)
            };
            is(&self.from, from) && is(&self.to, to)
        };
        let named = self.from.is_some() || self.to.is_some();
        found.is_sample = !every && !named;
        let chosen = if found.is_sample { sample::some(&ends) } else { all };
        let chosen: Vec<sample::Pair> = chosen.into_iter().filter(is_wanted).collect();
        found.chosen = chosen.len();
        let begun = Instant::now();
        for (done, (from, to)) in chosen.into_iter().enumerate() {
            let is_over = self.within.is_some_and(|within| begun.elapsed() >= within);
            if is_over && !every && !found.measured.is_empty() {
                break;
            }
            tell(done, found.chosen);
            let peer = (ends[from].name.as_str(), workers[from].address.as_str());
            let receiver = workers[to].receiver(&ends[to]);
            let came = came(&client, self.budget, receiver, peer, &ends[to].nics).await;
            found.measured.push(between::row(&dask.protocol, &ends[from], &ends[to], came));
        }
        Ok(Some(found))
    }

    /// Whether a worker of another machine is asked for by name, so that no pair here is.
    pub async fn is_about_others(&self, subject: &Subject) -> bool {
        let state = subject.control().read::<ClusterState>("/v1/state").await;
        state.is_ok_and(|state| state.joined.iter().any(|one| self.names(&one.worker.name)))
    }
}

/// The workers here and elsewhere that can be measured; what is known of the others is noted.
async fn participants(
    subject: &Subject,
    state: &ClusterState,
    client: &Client,
    found: &mut Between,
) -> (Vec<End>, Vec<Worker>) {
    let silent =
        |_| Err(format!("the scheduler does not say where it is within {} s", ASKED.as_secs()));
    let known = tokio::time::timeout(ASKED, client.machine()).await.unwrap_or_else(silent);
    let (machine, host) = match known {
        Ok(known) => known,
        Err(why) => {
            found.notes.push(why);
            ("here".to_owned(), "here".to_owned())
        }
    };
    let (mut ends, mut workers) = (Vec::new(), Vec::new());
    for process in &state.workers {
        let runs = matches!(process.state, ProcessPhase::Ready | ProcessPhase::Unresponsive);
        let Some(address) = process.address.clone().filter(|_| runs) else { continue };
        let plan = subject.plan.workers.iter().find(|worker| worker.name == process.name);
        let nics = plan.map_or(&[][..], |worker| &worker.nics);
        ends.push(End {
            name: process.name.clone(),
            host: host.clone(),
            machine: machine.clone(),
            place: process.name.clone(),
            nics: nics.iter().map(ToString::to_string).collect(),
        });
        workers.push(Worker { address, is_here: true });
    }
    let mut sorted: Vec<&Joined> = state.joined.iter().collect();
    sorted.sort_by(|a, b| a.worker.name.cmp(&b.worker.name));
    for joined in sorted.iter().filter(|joined| joined.state == JoinedPhase::Ready) {
        let worker = &joined.worker;
        ends.push(End {
            name: worker.name.clone(),
            host: worker.host.clone(),
            machine: worker.machine.clone().unwrap_or_else(|| worker.host.clone()),
            place: worker.process.clone().unwrap_or_else(|| worker.name.clone()),
            nics: worker.nics.clone(),
        });
        workers.push(Worker { address: worker.address.clone(), is_here: false });
    }
    let lost = sorted.iter().filter(|joined| joined.state == JoinedPhase::Lost);
    let lost: Vec<&str> = lost.map(|joined| joined.worker.name.as_str()).collect();
    if !lost.is_empty() {
        found.notes.push(format!("not measured, because they are lost: {}", lost.join(", ")));
    }
    name_apart(&mut ends, &workers);
    for end in &ends {
        if !found.hosts.contains(&end.host) {
            found.hosts.push(end.host.clone());
        }
    }
    let others = sorted.iter().filter(|joined| joined.worker.machine.as_ref() == Some(&machine));
    if others.filter(|joined| joined.state == JoinedPhase::Ready).count() > 0 {
        let text =
            "workers of other clusters on this machine are not measured with those of this one";
        found.notes.push(text.to_owned());
    }
    (ends, workers)
}

/// Gives hosts that share a name also an address.
fn name_apart(ends: &mut [End], workers: &[Worker]) {
    let shares_its_name = |one: &End, ends: &[End]| {
        ends.iter().any(|other| other.host == one.host && other.machine != one.machine)
    };
    let shared: Vec<bool> = ends.iter().map(|end| shares_its_name(end, ends)).collect();
    // One address for a machine: that of its first worker.
    let first = |machine: &str, ends: &[End]| ends.iter().position(|end| end.machine == machine);
    let names: Vec<Option<String>> = (0..ends.len())
        .map(|at| {
            let first = first(&ends[at].machine, ends).filter(|_| shared[at])?;
            let (_, place) = workers[first].address.split_once("://")?;
            let (host, _) = place.rsplit_once(':')?;
            Some(format!("{} ({host})", ends[at].host))
        })
        .collect();
    for (end, name) in ends.iter_mut().zip(names) {
        end.host = name.unwrap_or_else(|| end.host.clone());
    }
}

/// What comes to a receiver: first a little, which is compared and shows how long more would take.
async fn came(
    client: &Client,
    budget: Duration,
    receiver: Receiver<'_>,
    peer: (&str, &str),
    ports: &[String],
) -> Result<Came, String> {
    let first = links::glimpse("", "", MemoryKind::Host, SIZE_BYTES);
    let begun = Instant::now();
    let seen = fetched(client, budget, receiver, peer, &first, ports).await?;
    let round = begun.elapsed().max(Duration::from_millis(1)).as_secs_f64();
    let left = budget.saturating_sub(begun.elapsed()).as_secs_f64();
    // The first took two messages and a connection.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is clamped")]
    let rounds = (2.0 * left / round).clamp(0.0, f64::from(super::ROUNDS)) as u32;
    let (what, fetched) = match rounds {
        0 => (first, seen),
        _ => {
            let more = Measurement { rounds, ..first };
            let fetched = fetched(client, budget, receiver, peer, &more, ports).await?;
            (more, fetched)
        }
    };
    let Fetched { rounds_ns, lanes, cause, ports } = fetched;
    let samples = cuda_cluster_wire::native::Samples {
        rounds_ns,
        lanes: Vec::new(),
        protocol: None,
        mapped: Default::default(),
    };
    let messages = u64::from(what.messages) * u64::from(what.rounds + what.warmup) + 1;
    Ok(Came {
        bytes: what.size * messages,
        compared_bytes: what.size,
        gb_per_s: bandwidth(&samples, &what).map(|figure| figure.median),
        lanes,
        ports,
        cause,
    })
}

async fn fetched(
    client: &Client,
    budget: Duration,
    receiver: Receiver<'_>,
    peer: (&str, &str),
    what: &Measurement,
    ports: &[String],
) -> Result<Fetched, String> {
    let within = SILENCE + budget;
    let asked = tokio::time::timeout(within, client.fetch(receiver, peer, what, ports));
    asked.await.unwrap_or_else(|_| Err(format!("no answer within {} s", within.as_secs())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_share_a_name_are_told_apart_by_an_address() {
        let end = |host: &str, machine: &str| End {
            host: host.to_owned(),
            machine: machine.to_owned(),
            ..End::default()
        };
        let mut ends = [end("node", "a"), end("node", "b"), end("node", "b"), end("other", "c")];
        let worker =
            |last: u32| Worker { address: format!("tcp://10.0.0.{last}:4"), is_here: false };
        name_apart(&mut ends, &[worker(1), worker(2), worker(3), worker(4)]);
        let hosts: Vec<&str> = ends.iter().map(|end| end.host.as_str()).collect();
        assert_eq!(hosts, ["node (10.0.0.1)", "node (10.0.0.2)", "node (10.0.0.2)", "other"]);
    }

    #[test]
    fn what_was_not_measured_is_no_success() {
        let end = |name: &str| End { name: name.to_owned(), ..End::default() };
        let row = |came| between::row("tcp", &end("gpu0"), &end("gpu1"), came);
        let good = row(Ok(Came {
            bytes: 2,
            compared_bytes: 1,
            lanes: vec!["tcp".to_owned()],
            ..Came::default()
        }));
        let of = |measured: Vec<Row>, pairs, chosen| Between {
            measured,
            pairs,
            chosen,
            is_sample: chosen < pairs,
            ..Between::default()
        };
        assert!(of(vec![good.clone()], 2, 1).is_good(false));
        assert!(!of(vec![good.clone()], 2, 1).is_good(true), "strict is about all");
        assert!(!of(vec![good, row(Err("gone".to_owned()))], 2, 2).is_good(false));
        assert!(!of(Vec::new(), 2, 1).is_good(false));
    }
}
