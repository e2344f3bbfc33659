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
use cuda_cluster_model::ids::{FORK_SERVER, GpuUuid};
use cuda_cluster_model::plan::{DaskName, DaskPlan, Plan, RmmPlan, TlsFiles, WorkerPlan};
use cuda_cluster_wire::links;

/// Dask's own switch for creating a CUDA context, honoured for every protocol.
const CREATE_CONTEXT: &str = "distributed-ucxx.create-cuda-context";

/// What scheduler and workers share.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Common<'a> {
    /// This program's version: workers that join from elsewhere may have another one.
    version: &'static str,
    /// The plan itself.
    plan: &'a DaskPlan,
    /// Dask configuration that comes from the run directory; the plan's goes before it.
    config: BTreeMap<&'static str, String>,
    /// Its fork server: the scheduler's, or that of the first worker where all join a scheduler
    /// elsewhere.
    fork_server: Option<Fork>,
}

/// Settings of the scheduler.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SchedulerSettings<'a> {
    #[serde(flatten)]
    common: Common<'a>,
    /// Ports to try in order, inclusive.
    ports: (u16, u16),
    /// File with the ports of the scheduler before this one, to be written again.
    ports_file: PathBuf,
    /// Files to write its address to; the first is the run directory's.
    scheduler_files: Vec<PathBuf>,
    /// File to write the variables that clients need to.
    client_file: PathBuf,
    /// Those variables, without the scheduler's address.
    client_env: BTreeMap<String, String>,
    /// Fewest and most workers; `None` for a fixed number.
    adapt: Option<(u32, usize)>,
    /// The plan's bandwidth between workers, by their names in Dask.
    gb_per_s: BTreeMap<String, BTreeMap<String, f64>>,
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
pub struct WorkerSettings<'a> {
    #[serde(flatten)]
    common: Common<'a>,
    /// Address of the scheduler to join.
    scheduler: Option<String>,
    /// File with that address, as an alternative.
    scheduler_file: Option<PathBuf>,
    /// The name of its process.
    name: &'a str,
    /// Its name in Dask.
    dask_name: DaskName,
    /// Whether the scheduler is elsewhere.
    joins: bool,
    /// Whether workers of other machines join the same scheduler under made-up names, so that names
    /// need the host's.
    named_by_host: bool,
    threads: u32,
    port: Option<u16>,
    memory_limit: Option<u64>,
    /// The plan's for all workers, and those for its kind.
    resources: Option<BTreeMap<String, f64>>,
    /// `None` leaves storage to `distributed`; otherwise dask-cuda's storage is used.
    device_memory_limit: Option<u64>,
    dashboard_address: String,
    /// The plan's, where there is a GPU.
    rmm: Option<&'a RmmPlan>,
    /// The plan's, where there is a GPU.
    cudf_spill: Option<u32>,
    cuda_context: bool,
    /// The GPU that CUDA must show first, where it is a whole one.
    gpu_uuid: Option<&'a GpuUuid>,
    /// What to verify before READY; `None` for nothing.
    verify: Option<Proof>,
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

/// The key of Dask's configuration for the secret of `direct://`.
const SECRET_FILE: &str = "distributed.comm.direct.secret-file";

/// Facts about the Python that the plan cannot know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Means {
    /// Whether dask-cuda is installed.
    pub(super) dask_cuda: bool,
    /// Whether processes are forked.
    pub(super) fork: bool,
}

fn common<'a>(dask: &'a DaskPlan, paths: &Paths, fork_server: Option<Fork>) -> Common<'a> {
    let secret = comm_secret(dask, paths).map(|file| (SECRET_FILE, file));
    let config = secret.into_iter().collect();
    Common { version: env!("CARGO_PKG_VERSION"), plan: dask, config, fork_server }
}

pub(super) fn scheduler<'a>(
    plan: &Plan,
    dask: &'a DaskPlan,
    means: Means,
    paths: &Paths,
) -> SchedulerSettings<'a> {
    let mut files = vec![file(paths)];
    files.extend(dask.scheduler_file.clone());
    SchedulerSettings {
        ports: (dask.scheduler_ports.low, dask.scheduler_ports.high),
        ports_file: paths.root().join("scheduler-ports.json"),
        scheduler_files: files,
        client_file: paths.root().join("client.env"),
        client_env: client_env(plan, dask, paths),
        adapt: dask.adapt_minimum.map(|least| (least, plan.workers.len())),
        gb_per_s: gb_per_s(plan, dask),
        common: common(dask, paths, means.fork.then(|| fork(plan, dask, means, paths))),
    }
}

/// The plan's bandwidth between workers, as the scheduler knows these.
fn gb_per_s(plan: &Plan, dask: &DaskPlan) -> BTreeMap<String, BTreeMap<String, f64>> {
    let named = |worker: &WorkerPlan| {
        let name = match dask_name(plan, dask, worker) {
            DaskName::Text(name) => name,
            DaskName::Index(index) => index.to_string(),
        };
        (worker.name.clone(), name)
    };
    let names: BTreeMap<_, _> = plan.workers.iter().map(named).collect();
    let name = |process: &String| names.get(process).unwrap_or(process).clone();
    let to = |rates: &BTreeMap<_, _>| rates.iter().map(|(to, rate)| (name(to), *rate)).collect();
    dask.gb_per_s.iter().map(|(from, rates)| (name(from), to(rates))).collect()
}

fn fork(plan: &Plan, dask: &DaskPlan, means: Means, paths: &Paths) -> Fork {
    Fork { socket: fork_socket(paths), imports: imports(plan, dask, means) }
}

/// The file with the variables that clients need, without the scheduler's address: JSON, by name.
pub fn client_file(paths: &Paths) -> PathBuf {
    paths.root().join("client.json")
}

/// The file with the secret that whoever connects over a network by `direct://` must know. Workers
/// that join another cluster have its secret by their own configuration, if it has one.
fn comm_secret(dask: &DaskPlan, paths: &Paths) -> Option<String> {
    let own = dask.protocol == "direct" && dask.join.is_none();
    own.then(|| paths.secret().display().to_string())
}

/// What a client needs to speak as the cluster does, but for the scheduler's address: UCX's
/// variables, and the files of TLS or `direct://` by the names of Dask's configuration.
pub(super) fn client_env(plan: &Plan, dask: &DaskPlan, paths: &Paths) -> BTreeMap<String, String> {
    let mut env = plan.client_env.clone();
    if let Some(secret) = comm_secret(dask, paths) {
        env.insert("DASK_DISTRIBUTED__COMM__DIRECT__SECRET_FILE".to_owned(), secret);
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
        (dask.protocol == "direct", "cuda_cluster.comm"),
        (means.dask_cuda && limited, "dask_cuda.device_host_file"),
        (plugins, "dask_cuda.plugins"),
    ];
    let needed = needed.into_iter().filter(|(needed, _)| *needed);
    needed.map(|(_, name)| name.to_owned()).chain(dask.pre_import.clone()).collect()
}

pub(super) fn worker<'a>(
    plan: &Plan,
    dask: &'a DaskPlan,
    worker: &'a WorkerPlan,
    means: Means,
    paths: &Paths,
) -> WorkerSettings<'a> {
    let real_gpu = worker.gpu.is_some() && !plan.machine.simulated;
    let (scheduler, scheduler_file) = match &dask.join {
        Some(address) if address.contains("://") => (Some(address.clone()), None),
        Some(path) => (None, Some(PathBuf::from(path))),
        None => (None, Some(file(paths))),
    };
    let offset = u16::try_from(worker.rank).unwrap_or(u16::MAX);
    let forks = means.fork && dask.join.is_some() && worker.rank == 0;
    let wants_context = dask.config.get(CREATE_CONTEXT).is_none_or(|value| !is_false(value));
    WorkerSettings {
        scheduler,
        scheduler_file,
        name: &worker.name,
        dask_name: dask_name(plan, dask, worker),
        joins: dask.join.is_some(),
        named_by_host: dask.join.is_some() && dask.worker_name.is_none(),
        threads: worker.threads,
        port: dask.worker_ports.map(|ports| ports.low.saturating_add(offset)),
        memory_limit: worker.memory_limit_bytes,
        resources: resources(dask, worker),
        device_memory_limit: worker.device_memory_limit_bytes.filter(|_| means.dask_cuda),
        // Dashboards listen on the same address as everything else.
        dashboard_address: format!("{}:0", dask.host.as_deref().unwrap_or_default()),
        rmm: worker.rmm.as_ref().filter(|_| real_gpu),
        cudf_spill: dask.cudf_spill.filter(|_| real_gpu),
        cuda_context: real_gpu && wants_context,
        gpu_uuid: worker
            .gpu
            .as_ref()
            .filter(|gpu| real_gpu && gpu.mig.is_none())
            .and_then(|gpu| gpu.uuid.as_ref()),
        verify: plan.requirements.verify.then(|| proof(plan, dask, worker)),
        common: common(dask, paths, forks.then(|| fork(plan, dask, means, paths))),
    }
}

/// The resources that a worker says to have.
fn resources(dask: &DaskPlan, worker: &WorkerPlan) -> Option<BTreeMap<String, f64>> {
    let of_kind = dask.resources_by_kind.get(&worker.name).into_iter().flatten();
    let of_kind = of_kind.map(|(name, amount)| (name.clone(), f64::from(*amount)));
    let mut all = dask.resources.clone().unwrap_or_default();
    all.extend(of_kind);
    (!all.is_empty()).then_some(all)
}

/// A worker's name in Dask: its own, or its process's, which must be unique at a scheduler that
/// several clusters may join.
fn dask_name(plan: &Plan, dask: &DaskPlan, worker: &WorkerPlan) -> DaskName {
    let process = || match dask.join {
        Some(_) => format!("{}-{}", plan.name, worker.name),
        None => worker.name.clone(),
    };
    dask.names.get(&worker.name).cloned().unwrap_or_else(|| DaskName::Text(process()))
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
pub(crate) fn file(paths: &Paths) -> PathBuf {
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
    use super::super::package;
    use super::*;
    use cuda_cluster_model::ids::ClusterName;
    use cuda_cluster_model::plan::EnginePlan;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::path::Path;

    const MEANS: Means = Means { dask_cuda: true, fork: true };

    const UUIDS: [&str; 2] =
        ["GPU-00000000-0000-4000-8000-00000000000a", "GPU-00000000-0000-4000-8000-00000000000b"];

    fn plan(spec: Value) -> (Plan, DaskPlan) {
        let topology = cuda_cluster_model::topology::Topology {
            gpus: serde_json::from_value(json!([
                { "index": 0, "uuid": UUIDS[0], "name": "T", "pci": null, "memory_bytes": 1000 },
                { "index": 1, "uuid": UUIDS[1], "name": "T", "pci": null, "memory_bytes": 1000 },
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

    /// The keys of a class of `settings.py`.
    fn read(class: &str) -> BTreeSet<String> {
        let text = include_str!("../python/cuda_cluster_dask/settings.py");
        let (_, body) = text.split_once(&format!("\nclass {class}(")).expect("the class");
        let lines = body.lines().skip(1).take_while(|line| !line.starts_with("class "));
        let keys = lines.filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
        keys.map(|(key, _)| key.to_owned()).filter(|key| !key.contains(' ')).collect()
    }

    fn passed(value: &Value) -> BTreeSet<String> {
        value.as_object().expect("an object").keys().cloned().collect()
    }

    /// A setting that is read but not passed would be a `KeyError` when the process starts. That
    /// only what stands in `settings.py` is read, mypy checks.
    #[test]
    fn everything_that_the_python_package_reads_is_passed() {
        let tls = json!({ "ca_file": "a", "cert": "b", "key": "c" });
        let spec = json!({ "rmm": { "pool_size": 0.5 }, "verify": true, "tls": tls });
        let (plan, dask) = plan(spec);
        let worker = json!(worker(&plan, &dask, &plan.workers[0], MEANS, &paths()));
        let scheduler = json!(scheduler(&plan, &dask, MEANS, &paths()));
        let both = read("Settings");
        assert_eq!(passed(&worker), &both | &read("WorkerSettings"));
        assert_eq!(passed(&scheduler), &both | &read("SchedulerSettings"));
        assert!(read("Plan").is_subset(&passed(&scheduler["plan"])));
        for (class, value) in [
            ("ForkServer", &scheduler["fork_server"]),
            ("Tls", &scheduler["plan"]["tls"]),
            ("Rmm", &worker["rmm"]),
            ("Proof", &worker["verify"]),
            ("Peer", &worker["verify"]["peers"][0]),
            ("Way", &worker["verify"]["expected"][0]),
        ] {
            assert_eq!(read(class), passed(value), "{class}");
        }
    }

    #[test]
    fn everything_that_is_passed_is_read() {
        let classes = ["Settings", "SchedulerSettings", "WorkerSettings", "Plan"];
        for key in classes.iter().flat_map(|class| read(class)) {
            let read = |(_, text): &(&str, &str)| text.contains(&format!("[\"{key}\"]"));
            assert!(package::DASK.files.iter().any(read), "{key} is passed and not read");
        }
    }

    #[test]
    fn without_wishes_everything_listens_on_loopback_where_dasks_users_look() {
        let (plan, dask) = plan(json!({}));
        let settings = json!(scheduler(&plan, &dask, MEANS, &paths()));
        assert_eq!(settings["plan"]["protocol"], "tcp");
        assert_eq!(settings["plan"]["host"], "127.0.0.1");
        assert_eq!(settings["ports"], json!([8786, 8786]));
        assert_eq!(settings["plan"]["scheduler_ports_required"], false);
        assert_eq!(settings["plan"]["dashboard_address"], "127.0.0.1:8787");
        assert_eq!(settings["scheduler_files"], json!(["/run/default/scheduler.json"]));
    }

    #[test]
    fn who_joins_a_scheduler_is_reached_at_the_address_that_faces_it() {
        let [first, _] = &workers(json!({ "dask": { "join": "tcp://10.0.0.1:8786" } }))[..] else {
            panic!("two workers")
        };
        assert_eq!(
            (&first["scheduler"], &first["plan"]["host"]),
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
    fn workers_have_what_all_have_and_what_their_kind_has() {
        let resources = |spec| -> Vec<Value> {
            workers(spec).iter().map(|settings| settings["resources"].clone()).collect()
        };
        assert_eq!(resources(json!({})), [Value::Null, Value::Null]);
        let both = json!({ "gpus": "1", "cpu_workers": 1, "threads": 2 });
        assert_eq!(resources(both), [json!({ "GPU": 2.0 }), json!({ "CPU": 2.0 })]);
        let (all, by_kind) =
            (json!({ "resources": { "MEM": 8 } }), json!({ "place_by_kind": true }));
        let besides = resources(json!({ "gpus": "1", "worker": all, "dask": by_kind }));
        assert_eq!(besides, [json!({ "MEM": 8.0, "GPU": 1.0 })]);
    }

    #[test]
    fn what_needs_a_gpu_is_left_out_where_gpus_are_simulated() {
        let spec = json!({ "rmm": { "pool_size": 0.5 }, "dask": { "enable_cudf_spill": true } });
        let real = &workers(spec.clone())[0];
        assert_eq!(real["rmm"]["pool_bytes"], 500);
        assert_eq!((&real["cuda_context"], &real["cudf_spill"]), (&json!(true), &json!(0)));
        assert_eq!(real["gpu_uuid"], UUIDS[0]);
        let mut simulated = spec;
        simulated["simulate"] = json!(true);
        let settings = &workers(simulated)[0];
        assert_eq!((&settings["rmm"], &settings["cudf_spill"]), (&Value::Null, &Value::Null));
        assert_eq!(
            (&settings["cuda_context"], &settings["gpu_uuid"]),
            (&json!(false), &Value::Null)
        );
        let switch = json!({ "dask": { "config": { CREATE_CONTEXT: "False" } } });
        assert_eq!(workers(switch)[0]["cuda_context"], false);
    }
}
