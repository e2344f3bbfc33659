//! Measures every connection of a native cluster before it counts as READY.
//!
//! Does not judge the figures; `wire::links` does.
//!
//! *Invariant:* one connection is measured at a time, so that none slows another one down.

use std::collections::BTreeMap;
use std::time::Duration;

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::plan::Plan;
use cuda_cluster_model::topology::Topology;
use cuda_cluster_native as native;
use cuda_cluster_native::client::Client;
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_wire::links::trials::{self, Measures as _};
use cuda_cluster_wire::links::{self, Background, Pair};
use cuda_cluster_wire::native::Measurement;
use cuda_cluster_wire::peer::MemoryKind;

/// Message sizes, in bytes, that are large enough to show a link's bandwidth: host memory, device
/// memory.
const SIZES_BYTES: (u64, u64) = (1 << 20, 64 << 20);

const ROUNDS: u32 = 7;

/// Time limit for each connection.
const BUDGET: Duration = Duration::from_secs(1);

/// The figures of a verified cluster, for each ordered pair of workers and kind of memory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Verification {
    /// The pairs.
    pub pairs: Vec<Pair>,
}

impl Verification {
    /// The pairs that don't use the lanes that they should, or could not be measured.
    pub fn objections(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.verdict.is_good(false))
    }
}

/// A stream from every worker with such memory to every other one.
fn streams(plan: &Plan, memory: MemoryKind, size: u64) -> Vec<Measurement> {
    let workers = plan.workers.iter();
    let has = workers.filter(|worker| memory == MemoryKind::Host || worker.gpu.is_some());
    let names: Vec<&str> = has.map(|worker| worker.name.as_str()).collect();
    let from = |from: &&str| {
        let others = names.iter().filter(|to| *to != from);
        let stream = |to: &&str| links::stream(from, to, memory, size, ROUNDS);
        others.map(stream).collect::<Vec<_>>()
    };
    names.iter().flat_map(from).collect()
}

/// Measures a cluster whose workers are all connected. `machine` has its GPUs, unless they are
/// simulated.
pub(super) async fn verify(
    plan: &Plan,
    machine: Option<&Topology>,
    state: &ClusterState,
) -> Result<Verification, native::Error> {
    let mut client = Client::connect(Paths::of(&plan.name).root()).await?;
    let ports = state.workers.iter();
    let missing_ports =
        ports.map(|worker| (worker.name.clone(), worker.missing_ports.clone())).collect();
    let latencies = BTreeMap::new();
    let (missing_ports, latencies, alone) = (&missing_ports, &latencies, true);
    let background = Background { plan, machine, missing_ports, latencies, alone };
    let mut kinds = vec![(MemoryKind::Host, SIZES_BYTES.0)];
    if machine.is_some() {
        kinds.push((MemoryKind::Device, SIZES_BYTES.1));
    }
    let mut pairs = Vec::new();
    for (memory, size) in kinds {
        for stream in streams(plan, memory, size) {
            let stream = trials::fitted(&mut client, vec![stream], BUDGET).await?;
            let measured = client.measure(&stream, trials::patience(&stream, BUDGET)).await?;
            let rows = stream.iter().zip(&measured);
            pairs.extend(rows.map(|(stream, measured)| links::row(background, stream, measured)));
        }
    }
    Ok(Verification { pairs })
}
