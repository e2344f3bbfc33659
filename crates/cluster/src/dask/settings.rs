//! Turns a plan into the settings of each Python process, passed as one JSON argument.
//!
//! Pure, and decides nothing that the plan could: what is added depends on the run directory and on
//! the Python that was found.
//!
//! *Invariant:* the field names are those that the Python package reads.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::FORK_SERVER;
use cuda_cluster_model::plan::{DaskPlan, Plan, RmmPlan, TlsFiles, WorkerPlan};
use cuda_cluster_model::spec::WorkerNames;
use cuda_cluster_wire::links;

/// Dask's own switch for creating a CUDA context, honoured for every protocol.
const CREATE_CONTEXT: &str = "distributed-ucxx.create-cuda-context";

/// What scheduler and workers share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Common {
    /// `tcp`, `tls`, `native`, `ucx` or `ucxx`.
    pub protocol: String,
    /// Address to listen on and to be reached at; `None` for the address that faces the scheduler.
    pub host: Option<String>,
    /// The interface that has the address, as an alternative to `host`.
    pub interface: Option<String>,
    /// Certificates, for `tls`.
    pub tls: Option<TlsFiles>,
    /// Prefix of the dashboards' URLs.
    pub dashboard_prefix: String,
    /// Whether there are dashboards; `/health` and `/metrics` always exist.
    pub dashboard: bool,
    /// Dask configuration values, by key.
    pub config: BTreeMap<String, String>,
    /// Modules to import before anything else.
    pub pre_import: Vec<String>,
}

/// Settings of the scheduler.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SchedulerSettings {
    #[serde(flatten)]
    common: Common,
    /// Ports to try in order, inclusive.
    ports: (u16, u16),
    /// Whether the port must be one of these; otherwise any free port will do.
    ports_required: bool,
    dashboard_address: String,
    /// File with the ports of the scheduler before this one, to be written again.
    ports_file: PathBuf,
    /// Files to write its address to; the first is the run directory's.
    scheduler_files: Vec<PathBuf>,
    /// File to write the variables that clients need to.
    client_file: PathBuf,
    /// Those variables, without the scheduler's address.
    client_env: BTreeMap<String, String>,
    /// Its fork server; `None` for none.
    fork: Option<Fork>,
    /// Fewest and most workers; `None` for a fixed number.
    adapt: Option<(u32, usize)>,
}

/// Settings of a fork server.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Fork {
    /// The socket it listens on.
    socket: PathBuf,
    /// Modules that the workers will import; the server imports them once for all.
    imports: Vec<String>,
}

/// Settings of a worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerSettings {
    #[serde(flatten)]
    common: Common,
    /// Address of the scheduler to join.
    scheduler: Option<String>,
    /// File with that address, as an alternative.
    scheduler_file: Option<PathBuf>,
    /// Unique among the workers of one machine's clusters.
    name: String,
    /// Its name in Dask.
    dask_name: DaskName,
    /// Whether workers of other machines join the same scheduler under made-up names, so that names
    /// need the host's.
    joins: bool,
    threads: u32,
    port: Option<u16>,
    listen_address: Option<String>,
    contact_address: Option<String>,
    memory_limit: Option<u64>,
    /// `None` leaves storage to `distributed`; otherwise dask-cuda's storage is used.
    device_memory_limit: Option<u64>,
    local_directory: Option<PathBuf>,
    dashboard_address: String,
    resources: Option<BTreeMap<String, f64>>,
    preload: Vec<String>,
    /// In seconds.
    death_timeout: Option<f64>,
    /// In seconds.
    lifetime: Option<f64>,
    worker_class: String,
    rmm: Option<RmmPlan>,
    /// Level of cuDF's spilling statistics; `None` without cuDF spilling.
    cudf_spill: Option<u32>,
    cuda_context: bool,
    /// Its fork server, for the first of the workers that join a scheduler elsewhere.
    fork: Option<Fork>,
    /// What to verify before READY; `None` for nothing.
    verify: Option<Proof>,
}

/// A worker's name for Dask: the user's code may compare it with a GPU's index.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum DaskName {
    Index(u32),
    Text(String),
}

/// What a worker verifies before it is READY.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Proof {
    /// The workers from which it must have received data.
    peers: Vec<Peer>,
    /// What must have carried the data, each.
    expected: Vec<Way>,
}

/// A worker from which another must have received data.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Peer {
    name: DaskName,
    /// The name of its process.
    process: String,
}

/// What must have carried data.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Way {
    /// In words.
    way: String,
    /// Transports, or whole lanes, of which one must be there.
    lanes: Vec<&'static str>,
}

/// The key of Dask's configuration for the secret of `native://`.
const SECRET_FILE: &str = "distributed.comm.native.secret-file";

/// Facts about the Python that the plan cannot know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Means {
    /// Whether dask-cuda is installed.
    pub(super) dask_cuda: bool,
    /// Whether processes are forked.
    pub(super) fork: bool,
}

fn common(dask: &DaskPlan, paths: &Paths) -> Common {
    let mut config = dask.config.clone();
    if let Some(secret) = comm_secret(dask, paths) {
        config.entry(SECRET_FILE.to_owned()).or_insert(secret);
    }
    Common {
        protocol: dask.protocol.clone(),
        host: dask.host.clone(),
        interface: dask.interface.clone(),
        tls: dask.tls.clone(),
        dashboard_prefix: dask.dashboard_prefix.clone(),
        dashboard: dask.dashboard,
        config,
        pre_import: dask.pre_import.clone(),
    }
}

pub(super) fn scheduler(
    plan: &Plan,
    dask: &DaskPlan,
    means: Means,
    paths: &Paths,
) -> SchedulerSettings {
    let mut files = vec![file(paths)];
    files.extend(dask.scheduler_file.clone());
    SchedulerSettings {
        ports: (dask.scheduler_ports.low, dask.scheduler_ports.high),
        ports_required: dask.scheduler_ports_required,
        dashboard_address: dask.dashboard_address.clone(),
        ports_file: paths.root().join("scheduler-ports.json"),
        scheduler_files: files,
        client_file: paths.root().join("client.env"),
        client_env: client_env(plan, dask, paths),
        adapt: dask.adapt_minimum.map(|least| (least, plan.workers.len())),
        fork: means.fork.then(|| fork(plan, dask, means, paths)),
        common: common(dask, paths),
    }
}

fn fork(plan: &Plan, dask: &DaskPlan, means: Means, paths: &Paths) -> Fork {
    Fork { socket: fork_socket(paths), imports: imports(plan, dask, means) }
}

/// The file with the variables that clients need, without the scheduler's address: JSON, by name.
pub fn client_file(paths: &Paths) -> PathBuf {
    paths.root().join("client.json")
}

/// The file with the secret that whoever connects over a network by `native://` must know. Workers
/// that join another cluster have its secret by their own configuration, if it has one.
fn comm_secret(dask: &DaskPlan, paths: &Paths) -> Option<String> {
    let own = dask.protocol == "native" && dask.join.is_none();
    own.then(|| paths.secret().display().to_string())
}

/// What a client needs to speak as the cluster does, but for the scheduler's address: UCX's
/// variables, and the files of TLS or `native://` by the names of Dask's configuration.
pub(super) fn client_env(plan: &Plan, dask: &DaskPlan, paths: &Paths) -> BTreeMap<String, String> {
    let mut env = plan.client_env.clone();
    if let Some(secret) = comm_secret(dask, paths) {
        env.insert("DASK_DISTRIBUTED__COMM__NATIVE__SECRET_FILE".to_owned(), secret);
    }
    if let Some(TlsFiles { ca_file, cert, key, .. }) = &dask.tls {
        let files = [("CA_FILE", ca_file), ("CLIENT__CERT", cert), ("CLIENT__KEY", key)];
        env.extend(
            files
                .map(|(name, file)| (format!("DASK_DISTRIBUTED__COMM__TLS__{name}"), file.clone())),
        );
    }
    env
}

fn imports(plan: &Plan, dask: &DaskPlan, means: Means) -> Vec<String> {
    let limited = plan.workers.iter().any(|worker| worker.device_memory_limit_bytes.is_some());
    let plugins = !plan.machine.simulated
        && (dask.cudf_spill.is_some() || plan.workers.iter().any(|worker| worker.rmm.is_some()));
    let needed = [
        (true, "cuda_cluster_dask.worker"),
        (dask.protocol.starts_with("ucx"), "ucxx"),
        (dask.protocol.starts_with("ucx"), "distributed_ucxx.ucxx"),
        (dask.protocol == "native", "cuda_cluster.comm"),
        (means.dask_cuda && limited, "dask_cuda.device_host_file"),
        (plugins, "dask_cuda.plugins"),
    ];
    let needed = needed.into_iter().filter(|(needed, _)| *needed);
    needed.map(|(_, name)| name.to_owned()).chain(dask.pre_import.clone()).collect()
}

pub(super) fn worker(
    plan: &Plan,
    dask: &DaskPlan,
    worker: &WorkerPlan,
    means: Means,
    paths: &Paths,
) -> WorkerSettings {
    let real_gpu = worker.gpu.is_some() && !plan.machine.simulated;
    let (scheduler, scheduler_file) = match &dask.join {
        Some(address) if address.contains("://") => (Some(address.clone()), None),
        Some(path) => (None, Some(PathBuf::from(path))),
        None => (None, Some(file(paths))),
    };
    let offset = u16::try_from(worker.rank).unwrap_or(u16::MAX);
    let wants_context = dask.config.get(CREATE_CONTEXT).is_none_or(|value| !is_false(value));
    WorkerSettings {
        scheduler,
        scheduler_file,
        name: name(plan, dask, worker),
        dask_name: dask_name(plan, dask, worker),
        joins: dask.join.is_some() && dask.worker_name.is_none(),
        threads: worker.threads,
        port: dask.worker_ports.map(|ports| ports.low.saturating_add(offset)),
        listen_address: dask.listen_address.clone(),
        contact_address: dask.contact_address.clone(),
        memory_limit: worker.memory_limit_bytes,
        device_memory_limit: worker.device_memory_limit_bytes.filter(|_| means.dask_cuda),
        local_directory: dask.local_directory.clone(),
        // Dashboards listen on the same address as everything else.
        dashboard_address: format!("{}:0", dask.host.as_deref().unwrap_or_default()),
        resources: dask.resources.clone(),
        preload: dask.preload.clone(),
        death_timeout: dask.death_timeout.map(|span| span.0.as_secs_f64()),
        lifetime: dask.lifetime.map(|span| span.0.as_secs_f64()),
        worker_class: dask.worker_class.clone(),
        rmm: worker.rmm.clone().filter(|_| real_gpu),
        cudf_spill: dask.cudf_spill.filter(|_| real_gpu),
        cuda_context: real_gpu && wants_context,
        fork: (means.fork && dask.join.is_some() && worker.rank == 0)
            .then(|| fork(plan, dask, means, paths)),
        verify: plan.requirements.verify.then(|| proof(plan, dask, worker)),
        common: common(dask, paths),
    }
}

/// A worker's name. It must be unique at the scheduler, which several clusters may join.
fn name(plan: &Plan, dask: &DaskPlan, worker: &WorkerPlan) -> String {
    match (&dask.worker_name, &dask.join) {
        (Some(name), _) if plan.workers.len() == 1 => name.clone(),
        (Some(name), _) => format!("{name}-{}", worker.rank),
        (None, Some(_)) => format!("{}-{}", plan.name, worker.name),
        (None, None) => worker.name.clone(),
    }
}

/// What Dask calls a worker: as its process, or by the GPU that it sees first.
fn dask_name(plan: &Plan, dask: &DaskPlan, worker: &WorkerPlan) -> DaskName {
    let own = |one: &WorkerPlan| {
        let visible = one.env.get("CUDA_VISIBLE_DEVICES")?;
        visible.split(',').next().filter(|gpu| !gpu.is_empty()).map(str::to_owned)
    };
    let asked = dask.worker_names == WorkerNames::Gpu
        && dask.join.is_none()
        && dask.adapt_minimum.is_none();
    let gpu = own(worker).filter(|_| asked);
    let shared =
        |gpu: &String| plan.workers.iter().filter(|one| own(one).as_ref() == Some(gpu)).count() > 1;
    let given = || dask.worker_name.as_ref().map(|_| name(plan, dask, worker));
    // Deployments that number their workers compare the names with numbers.
    match gpu.filter(|gpu| !shared(gpu)).or_else(given) {
        Some(name) => name.parse().map_or(DaskName::Text(name), DaskName::Index),
        None => DaskName::Text(name(plan, dask, worker)),
    }
}

fn proof(plan: &Plan, dask: &DaskPlan, worker: &WorkerPlan) -> Proof {
    let way = |way: links::Expected| Some(Way { way: way.to_string(), lanes: way.transports()? });
    let peer =
        |one: &WorkerPlan| Peer { name: dask_name(plan, dask, one), process: one.name.clone() };
    // Those that start with the cluster wait for each other, and for nobody else.
    let first = dask.start_workers.map_or(plan.workers.len(), |count| count as usize);
    let all = if (worker.rank as usize) < first { first } else { plan.workers.len() };
    Proof {
        peers: plan.workers.iter().take(all).map(peer).collect(),
        expected: links::proven(plan, worker).into_iter().filter_map(way).collect(),
    }
}

/// The file with the scheduler's address, for workers and `Client(scheduler_file=…)`.
pub(super) fn file(paths: &Paths) -> PathBuf {
    paths.root().join("scheduler.json")
}

/// Where the fork server listens.
pub(super) fn fork_socket(paths: &Paths) -> PathBuf {
    paths.socket(FORK_SERVER)
}

fn is_false(value: &str) -> bool {
    matches!(value.to_lowercase().as_str(), "false" | "no" | "off" | "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::ids::ClusterName;
    use cuda_cluster_model::plan::EnginePlan;
    use serde_json::{Value, json};
    use std::path::Path;

    const MEANS: Means = Means { dask_cuda: true, fork: true };

    fn plan(spec: Value) -> (Plan, DaskPlan) {
        let topology = cuda_cluster_model::topology::Topology {
            gpus: serde_json::from_value(json!([
                { "index": 0, "uuid": null, "name": "T", "pci": null, "memory_bytes": 1000 },
                { "index": 1, "uuid": null, "name": "T", "pci": null, "memory_bytes": 1000 },
            ]))
            .expect("GPUs"),
            ..Default::default()
        };
        let mut spec = spec;
        spec["engine"] = json!("dask");
        let spec = serde_json::from_value(spec).expect("a spec");
        let request = cuda_cluster_model::spec::Request::of(spec).expect("no contradictions");
        let plan = cuda_cluster_model::plan::plan(&topology, &request, &Default::default())
            .expect("a plan");
        let EnginePlan::Dask(dask) = plan.engine.clone() else { panic!("Dask's") };
        (plan, *dask)
    }

    fn paths() -> Paths {
        Paths::below(Path::new("/run"), &ClusterName::default())
    }

    fn workers(spec: Value) -> Vec<Value> {
        let (plan, dask) = plan(spec);
        let settings = |one| json!(worker(&plan, &dask, one, MEANS, &paths()));
        plan.workers.iter().map(settings).collect()
    }

    /// A setting that is read but not passed would be a `KeyError` when the process starts.
    #[test]
    fn everything_that_the_python_package_reads_is_passed() {
        let (plan, dask) = plan(json!({}));
        let worker = json!(worker(&plan, &dask, &plan.workers[0], MEANS, &paths()));
        let scheduler = json!(scheduler(&plan, &dask, MEANS, &paths()));
        let reads = |text: &str| -> Vec<String> {
            let parts = text.split("settings[\"").skip(1);
            parts.filter_map(|part| part.split('"').next()).map(str::to_owned).collect()
        };
        let files = [
            (include_str!("python/worker.py"), vec![&worker]),
            (include_str!("python/gpu.py"), vec![&worker]),
            (include_str!("python/nanny.py"), vec![&worker]),
            (include_str!("python/scheduler.py"), vec![&scheduler]),
            (include_str!("python/kept_ports.py"), vec![&scheduler]),
            (include_str!("python/ports.py"), vec![&scheduler, &worker]),
            (include_str!("python/storage.py"), vec![&worker]),
        ];
        for (text, settings) in files {
            for key in reads(text) {
                let known = settings.iter().all(|settings| settings.get(&key).is_some());
                assert!(known, "{key} is read and not passed");
            }
        }
        let mut unread: Vec<&String> = worker.as_object().expect("an object").keys().collect();
        let all = files_read(&reads);
        unread.retain(|key| !all.contains(key));
        assert!(unread.is_empty(), "passed and not read: {unread:?}");
    }

    fn files_read(reads: &dyn Fn(&str) -> Vec<String>) -> Vec<String> {
        let texts = [
            include_str!("python/worker.py"),
            include_str!("python/gpu.py"),
            include_str!("python/nanny.py"),
            include_str!("python/ports.py"),
            include_str!("python/storage.py"),
            include_str!("python/process.py"),
            include_str!("python/fork_server.py"),
        ];
        texts.iter().flat_map(|text| reads(text)).collect()
    }

    #[test]
    fn without_wishes_everything_listens_on_loopback_where_dasks_users_look() {
        let (plan, dask) = plan(json!({}));
        let settings = json!(scheduler(&plan, &dask, MEANS, &paths()));
        assert_eq!(settings["protocol"], "tcp");
        assert_eq!(settings["host"], "127.0.0.1");
        assert_eq!(settings["ports"], json!([8786, 8786]));
        assert_eq!(settings["ports_required"], false);
        assert_eq!(settings["dashboard_address"], "127.0.0.1:8787");
        assert_eq!(settings["scheduler_files"], json!(["/run/default/scheduler.json"]));
    }

    #[test]
    fn who_joins_a_scheduler_is_reached_at_the_address_that_faces_it() {
        let [first, _] = &workers(json!({ "dask": { "join": "tcp://10.0.0.1:8786" } }))[..] else {
            panic!("two workers")
        };
        assert_eq!(
            (&first["scheduler"], &first["host"]),
            (&json!("tcp://10.0.0.1:8786"), &Value::Null)
        );
        let by_file = &workers(json!({ "dask": { "join": "/shared/scheduler.json" } }))[0];
        assert_eq!(by_file["scheduler_file"], "/shared/scheduler.json");
    }

    #[test]
    fn each_worker_has_a_port_of_the_range() {
        let settings = workers(json!({ "worker": { "ports": "9000:9003" } }));
        assert_eq!((&settings[0]["port"], &settings[1]["port"]), (&json!(9000), &json!(9001)));
        let any = workers(json!({ "worker": { "ports": 0 } }));
        assert_eq!(any[1]["port"], Value::Null);
    }

    #[test]
    fn workers_prove_their_ways_where_the_plan_is_to_be_verified() {
        assert_eq!(workers(json!({}))[0]["verify"], Value::Null);
        let settings = &workers(json!({ "verify": true }))[0]["verify"];
        let peer = |name| json!({ "name": name, "process": name });
        let tcp = json!({ "way": "tcp", "lanes": ["tcp"] });
        assert_eq!(*settings, json!({ "peers": [peer("gpu0"), peer("gpu1")], "expected": [tcp] }));
    }

    #[test]
    fn workers_are_called_by_their_gpus_where_that_is_asked_for_and_unique() {
        let names = |spec| -> Vec<Value> {
            workers(spec).iter().map(|settings| settings["dask_name"].clone()).collect()
        };
        assert_eq!(names(json!({})), [json!("gpu0"), json!("gpu1")]);
        let by_gpu = json!({ "worker_names": "gpu" });
        assert_eq!(names(json!({ "dask": by_gpu })), [json!(0), json!(1)]);
        let shared = names(json!({ "dask": by_gpu, "workers_per_gpu": 2 }));
        assert!(shared.iter().all(Value::is_string), "{shared:?}");
        let mut joined = json!({ "worker_names": "gpu", "join": "tcp://10.0.0.1:8786" });
        assert_eq!(names(json!({ "dask": joined }))[0], "default-gpu0");
        joined["worker_name"] = json!("batch-7");
        assert_eq!(names(json!({ "dask": joined })), ["batch-7-0", "batch-7-1"]);
        assert_eq!(names(json!({ "dask": joined, "gpus": "0" })), ["batch-7"]);
        joined["worker_name"] = json!("7");
        assert_eq!(names(json!({ "dask": joined, "gpus": "0" })), [7]);
    }

    #[test]
    fn what_needs_a_gpu_is_left_out_where_gpus_are_simulated() {
        let spec = json!({ "rmm": { "pool_size": 0.5 }, "dask": { "enable_cudf_spill": true } });
        let real = &workers(spec.clone())[0];
        assert_eq!(real["rmm"]["pool_bytes"], 500);
        assert_eq!((&real["cuda_context"], &real["cudf_spill"]), (&json!(true), &json!(0)));
        let mut simulated = spec;
        simulated["simulate"] = json!(true);
        let settings = &workers(simulated)[0];
        assert_eq!((&settings["rmm"], &settings["cudf_spill"]), (&Value::Null, &Value::Null));
        assert_eq!(settings["cuda_context"], false);
        let switch = json!({ "dask": { "config": { CREATE_CONTEXT: "False" } } });
        assert_eq!(workers(switch)[0]["cuda_context"], false);
    }
}
