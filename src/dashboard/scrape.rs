//! What Prometheus is told of a cluster besides its supervisor's own metrics: limits of its plan,
//! what native processes count, and the bytes that an audit has counted.
//!
//! *Invariant:* a scrape waits for native processes for [`PATIENCE`] at most; what is not known by
//! then has no samples.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::feed::Subject;
use crate::cluster::{Client, Paths, recorded_audit};
use crate::supervise::metrics::{Families, Figure, label};
use crate::supervise::{ClusterState, ProcessPhase};
use crate::wire::tasks::{Counters, Level, Overview, WorkerOverview};
use cuda_cluster_why::audit::Audit;

/// Longest wait for the scheduler and the workers together.
const PATIENCE: Duration = Duration::from_secs(2);

/// What native processes count.
#[derive(Debug, Default)]
struct Counted {
    overview: Overview,
    memory: BTreeMap<String, Counters>,
}

/// The limits of a cluster's plan, and what its audit has counted.
pub(super) fn plan_and_audit(subject: &Subject, paths: &Paths, cluster: &str) -> String {
    let cluster = label("cluster", cluster);
    let mut families = Families::default();
    let workers = subject.plan().map(|plan| plan.workers.as_slice()).unwrap_or_default();
    let limits = workers.iter().filter_map(|worker| {
        let labels = format!("{cluster},{}", label("process", &worker.name));
        Some((labels, worker.memory_limit_bytes? as f64))
    });
    let help = "The limit of its memory by the plan.";
    families.family("process_memory_limit_bytes", "gauge", help, limits);
    if let Some(audit) = subject.is_audited().then(|| recorded_audit(paths)).flatten() {
        audited(&mut families, &cluster, &audit);
    }
    families.into_text()
}

fn audited(families: &mut Families, cluster: &str, audit: &Audit) {
    let bytes = audit.pairs.iter().filter_map(|pair| {
        let (from, to) = (label("from", &pair.from), label("to", &pair.to));
        Some((format!("{cluster},{from},{to}"), pair.tcp_bytes? as f64))
    });
    let help = "Bytes between two processes over TCP, where they are audited.";
    families.family("audit_tcp_bytes_total", "counter", help, bytes);
    let below = audit.findings.iter().filter(|finding| finding.downgrade).count();
    let help = "Wires that are slower than the plan has, by what libraries say.";
    families.family("audit_downgrades", "gauge", help, [(cluster.to_owned(), below as f64)]);
}

/// What the native engine's processes count; `None` of another engine, and if they don't answer.
pub(super) async fn native(
    subject: &Subject,
    paths: &Paths,
    state: &ClusterState,
) -> Option<String> {
    if !subject.is_native() {
        return None;
    }
    let ready = state.workers.iter().filter(|worker| worker.state == ProcessPhase::Ready);
    let ready: Vec<String> = ready.map(|worker| worker.name.clone()).collect();
    let paths = paths.clone();
    let asked = tokio::task::spawn_blocking(move || counted(&paths, &ready));
    let counted = tokio::time::timeout(PATIENCE, asked).await.ok()?.ok()??;
    Some(rendered(&label("cluster", state.name.as_str()), &counted))
}

/// Asks the scheduler, and then these workers while there is time. Blocks.
fn counted(paths: &Paths, workers: &[String]) -> Option<Counted> {
    let until = Instant::now() + PATIENCE / 2;
    let client = Client::connect(paths.root()).ok()?;
    let overview = client.overview().ok()?;
    let known = workers.iter().take_while(|_| Instant::now() < until);
    let memory =
        known.filter_map(|worker| Some((worker.clone(), client.counters(worker).ok()?))).collect();
    Some(Counted { overview, memory })
}

const CLUSTER: [Figure<Overview>; 2] = [
    (
        "tasks_recomputed_total",
        "counter",
        "Native tasks that were computed again because their worker had died.",
        |overview| Some(overview.recomputed as f64),
    ),
    (
        "tasks_stolen_total",
        "counter",
        "Native tasks that an idle worker took from a busy one.",
        |overview| Some(overview.stolen as f64),
    ),
];

const WORKER: [Figure<WorkerOverview>; 4] = [
    ("tasks_finished_total", "counter", "Native tasks that it has finished.", |worker| {
        Some(worker.finished as f64)
    }),
    ("tasks_in_flight", "gauge", "Native tasks that were sent to it.", |worker| {
        Some(worker.in_flight as f64)
    }),
    ("tasks_queued", "gauge", "Native tasks that wait for it in the scheduler.", |worker| {
        Some(worker.queued as f64)
    }),
    ("objects", "gauge", "Objects that it holds.", |worker| Some(worker.objects as f64)),
];

const TIER: [Figure<Level>; 3] = [
    ("memory_bytes", "gauge", "Bytes of its objects, by where they are.", |level| {
        Some(level.bytes as f64)
    }),
    ("spilled_bytes_total", "counter", "Bytes that came from the tier above.", |level| {
        Some(level.demoted_bytes as f64)
    }),
    ("restored_bytes_total", "counter", "Bytes that went back to a tier above.", |level| {
        Some(level.promoted_bytes as f64)
    }),
];

fn rendered(cluster: &str, Counted { overview, memory }: &Counted) -> String {
    let mut families = Families::default();
    families.figures(&CLUSTER, &[(cluster.to_owned(), overview)]);
    let of = |process: &str| format!("{cluster},{}", label("process", process));
    let workers: Vec<_> = overview.workers.iter().map(|one| (of(&one.name), one)).collect();
    families.figures(&WORKER, &workers);
    transfers(&mut families, overview, of);
    let tiers: Vec<(String, &Level)> = memory
        .iter()
        .flat_map(|(worker, Counters { device, host, disk })| {
            [("device", device), ("host", host), ("disk", disk)]
                .map(|(tier, level)| (format!("{},{}", of(worker), label("tier", tier)), level))
        })
        .collect();
    families.figures(&TIER, &tiers);
    families.into_text()
}

/// What each worker has sent and received: a series for every pair would be too many.
fn transfers(families: &mut Families, overview: &Overview, of: impl Fn(&str) -> String) {
    let mut sums: BTreeMap<&str, [u64; 3]> =
        overview.workers.iter().map(|worker| (worker.name.as_str(), [0; 3])).collect();
    for link in &overview.links {
        let sender = sums.entry(&link.from).or_default();
        sender[0] += link.transfers;
        sender[1] += link.bytes;
        sums.entry(&link.to).or_default()[2] += link.bytes;
    }
    for (at, name, help) in [
        (0, "transfers_sent_total", "Objects that it has sent to other workers."),
        (1, "transfers_sent_bytes_total", "Their bytes."),
        (2, "transfers_received_bytes_total", "Bytes of objects that other workers sent to it."),
    ] {
        let samples = sums.iter().map(|(worker, sums)| (of(worker), sums[at] as f64));
        families.family(name, "counter", help, samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tasks::LinkOverview;

    #[test]
    fn transfers_are_summed_for_each_worker_and_spills_told_by_tier() {
        let worker = |name: &str| WorkerOverview { name: name.to_owned(), ..Default::default() };
        let link = |from: &str, to: &str, bytes| LinkOverview {
            from: from.to_owned(),
            to: to.to_owned(),
            transfers: 1,
            bytes,
            ..Default::default()
        };
        let overview = Overview {
            workers: vec![worker("gpu0"), worker("gpu1")],
            links: vec![link("gpu0", "gpu1", 5), link("gpu0", "gpu2", 7)],
            ..Default::default()
        };
        let disk = Level { demoted_bytes: 9, ..Default::default() };
        let memory = [("gpu1".to_owned(), Counters { disk, ..Default::default() })].into();
        let text = rendered("cluster=\"a\"", &Counted { overview, memory });
        for sample in [
            "cuda_cluster_transfers_sent_bytes_total{cluster=\"a\",process=\"gpu0\"} 12\n",
            "cuda_cluster_transfers_sent_total{cluster=\"a\",process=\"gpu1\"} 0\n",
            "cuda_cluster_transfers_received_bytes_total{cluster=\"a\",process=\"gpu2\"} 7\n",
            "cuda_cluster_spilled_bytes_total{cluster=\"a\",process=\"gpu1\",tier=\"disk\"} 9\n",
        ] {
            assert!(text.contains(sample), "{sample} in {text}");
        }
    }
}
