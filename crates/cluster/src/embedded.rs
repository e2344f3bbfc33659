//! A cluster inside a program: ask for it, plan it, launch it, own it.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Map, Value};

use super::failure::not_ready;
use super::measure::{Subject, Wanted};
use super::{
    Control, ControlError, Detached, Events, Handle, LaunchFailure, Lifetime, Pair, Prepared,
    Report, Start, Verification,
};
use cuda_cluster_machine::os::process;
use cuda_cluster_machine::os::run_directory::{Paths, forget_failed_start};
use cuda_cluster_model::ids::ClusterName;
use cuda_cluster_model::plan::{EngineKind, Plan};
use cuda_cluster_model::spec::{self, ClusterSpec, Origin, Request, SpecError};
use cuda_cluster_model::text::in_full;
use cuda_cluster_model::topology::{self, Topology};
use cuda_cluster_supervise::{ClusterPhase, ClusterState, Outcome};

/// What errors call a value that [`Builder::set`] set.
const BUILDER: &str = "builder";

/// How often to check a cluster of the same name that is ending.
const LOOK: Duration = Duration::from_millis(5);

/// Time for the processes of a dropped cluster to be gone, after their grace period.
const LAST_MOMENTS: Duration = Duration::from_secs(10);

/// The names of clusters that this process has dropped, and that may still be ending.
static DROPPED: Mutex<Vec<ClusterName>> = Mutex::new(Vec::new());

/// A part of what was asked for. Later ones win, key by key.
#[derive(Clone, Debug)]
enum Layer {
    Spec(Box<ClusterSpec>),
    /// Values of single keys, as an object.
    Keys(Value),
}

/// A cluster to be launched.
///
/// Everything that a spec file can say can be set: a whole spec with [`Builder::spec`], any key
/// with [`Builder::set`], the most usual ones by methods of their own. Later calls win, key by key.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    layers: Vec<Layer>,
    machine: Option<Topology>,
    plan: Option<Plan>,
    program: Option<PathBuf>,
}

impl Builder {
    /// Applies a spec, over what was asked for before. Its `topology` is read at the launch.
    pub fn spec(mut self, spec: ClusterSpec) -> Self {
        self.layers.push(Layer::Spec(Box::new(spec)));
        self
    }

    /// Sets a key of the spec: `set("supervision.grace", "5s")`. The keys are those of
    /// `cuda-cluster spec schema`, and the value is written as in a spec file; `()` and `None` set
    /// nothing. A wrong key or value is an error of the launch.
    pub fn set(mut self, key: &str, value: impl Serialize) -> Self {
        let value = written(&value);
        if value.is_null() {
            return self;
        }
        // A section is laid over what is there, as that of a spec would be.
        let pointer = format!("/{}", key.replace('.', "/"));
        let is_over = |keys: &Value| value.is_object() && keys.pointer(&pointer).is_some();
        if !matches!(self.layers.last(), Some(Layer::Keys(keys)) if !is_over(keys)) {
            self.layers.push(Layer::Keys(Value::Object(Map::new())));
        }
        if let Some(Layer::Keys(keys)) = self.layers.last_mut() {
            put(keys, key, value);
        }
        self
    }

    /// The cluster's name. Default: `embedded-`, this process's id and a count.
    pub fn name(self, name: ClusterName) -> Self {
        self.set("name", name)
    }

    /// Plans for another machine than this one, with simulated GPUs.
    pub fn simulate(mut self, machine: Topology) -> Self {
        self.machine = Some(machine);
        self.set("simulate", true)
    }

    /// The number of workers; the best-connected GPUs are used.
    pub fn workers(self, workers: u32) -> Self {
        self.set("workers", workers)
    }

    /// Uses NVLink; a note of the plan tells if there is none.
    pub fn enable_nvlink(self) -> Self {
        self.set("ucx.nvlink", true)
    }

    /// Uses InfiniBand or RoCE; a note of the plan tells if there is none.
    pub fn enable_infiniband(self) -> Self {
        self.set("ucx.infiniband", true)
    }

    /// Launches this plan instead of making one, such as one that was stored and reviewed
    /// ([`Plan::parse`]). Besides, only `name` and `verify` can be set.
    pub fn stored_plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// The program that supervisor, scheduler and workers run: a `cuda-cluster` binary, or one
    /// whose `main` begins with [`dispatch`](super::dispatch). Default: this program.
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// All that was asked for.
    ///
    /// # Errors
    /// If a key or a value is wrong, or values contradict each other.
    pub fn request(&self) -> Result<Request, LaunchFailure> {
        let specs = self.layers.iter().map(|layer| match layer {
            Layer::Spec(spec) => Ok((**spec).clone()),
            Layer::Keys(keys) => spec::from_keys(keys, BUILDER),
        });
        let specs = specs.collect::<Result<Vec<ClusterSpec>, SpecError>>()?;
        Ok(Request::merge_as(&specs, BUILDER)?)
    }

    /// The plan that [`Builder::launch`] would run now, from probing this machine.
    ///
    /// # Errors
    /// If the spec is invalid, or this machine can't be probed or lacks something required.
    pub fn plan(&self) -> Result<Plan, LaunchFailure> {
        Ok(self.prepared()?.0.plan)
    }

    /// What to run, the program that supervises it, and whether its name was chosen here.
    pub(super) fn prepared_run(mut self) -> Result<(Prepared, PathBuf, bool), LaunchFailure> {
        let program = self.program.take().unwrap_or_else(process::own_program);
        let (prepared, is_nameless) = self.prepared()?;
        Ok((prepared, program, is_nameless))
    }

    /// What to launch, and whether its name was chosen here.
    fn prepared(&self) -> Result<(Prepared, bool), LaunchFailure> {
        let mut request = self.request()?;
        if let Some(plan) = &self.plan {
            let mut plan = plan.clone();
            let decided = |key: &&String| !matches!(key.as_str(), "name" | "verify");
            if let Some(key) = request.origins.keys().find(decided) {
                return Err(LaunchFailure::Planned { key: key.clone() });
            }
            if let Some(name) = request.spec.name {
                plan.name = name;
            }
            plan.requirements.verify = request.spec.verify.unwrap_or(plan.requirements.verify);
            let keys = request.origins.into_keys().map(|key| (key, Origin::Spec));
            plan.origins.extend(keys);
            return Ok((super::prepare_plan(plan)?, false));
        }
        let is_nameless = request.spec.name.is_none();
        request.spec.name.get_or_insert_with(own_name);
        request.spec.resolve_paths(&std::env::current_dir().unwrap_or_default());
        let named = match (&self.machine, &request.spec.topology) {
            (None, Some(name)) => Some(machine(name)?),
            _ => None,
        };
        let machine = self.machine.as_ref().or(named.as_ref());
        Ok((super::prepare(&request, machine)?, is_nameless))
    }

    /// Launches the cluster under a supervisor process that ends it when this process ends.
    ///
    /// # Errors
    /// If the spec is invalid or asks for what an embedded cluster does not have, there is no plan,
    /// or not every process became READY; then nothing of it is left.
    pub async fn launch(self) -> Result<Cluster, LaunchFailure> {
        let (supervisor, plan, proof) = self.bring_up(Lifetime::Owned).await?;
        let handle = Handle::new(plan.name.clone());
        let supervisor = tokio::sync::Mutex::new(Some(supervisor));
        Ok(Cluster { supervisor, handle, plan, proof })
    }

    /// Launches the cluster under a supervisor process of its own: it runs until it is stopped, and
    /// outlives this process.
    ///
    /// # Errors
    /// As [`Builder::launch`].
    pub async fn launch_detached(self) -> Result<Handle, LaunchFailure> {
        let (_, plan, _) = self.bring_up(Lifetime::Free).await?;
        Ok(Handle::new(plan.name))
    }

    async fn bring_up(
        mut self,
        lifetime: Lifetime,
    ) -> Result<(Detached, Plan, Option<Verification>), LaunchFailure> {
        let program = self.program.take().unwrap_or_else(process::own_program);
        let (mut prepared, is_nameless) = self.prepared()?;
        let plan = prepared.plan.clone();
        // Dask's workers verify their own connections.
        prepared.to_be_verified =
            plan.requirements.verify && plan.engine.kind() == EngineKind::Native;
        let machine = prepared.machine.clone().filter(|_| !plan.machine.simulated);
        let mut proof = None;
        outlast_dropped(&plan).await;
        let start =
            Start { program: &program, lifetime, attended: false, output: None, input: None };
        let (mut supervisor, _) = Detached::spawn(prepared, start).await?;
        let failure = loop {
            match supervisor.next().await {
                Ok(Some(Report::Ready(_))) => return Ok((supervisor, plan, proof)),
                Ok(Some(Report::State(state)))
                    if state.state == ClusterPhase::Verifying && proof.is_none() =>
                {
                    match proven(&plan, machine.as_ref()).await {
                        Ok(verification) => {
                            supervisor.verified().await;
                            proof = Some(verification);
                        }
                        Err(failure) => {
                            supervisor.end().await;
                            break failure;
                        }
                    }
                }
                Ok(Some(Report::Ended { outcome, .. })) => {
                    supervisor.end().await;
                    break not_ready(outcome);
                }
                Ok(Some(_)) => {}
                Ok(None) => break supervisor.unsaid().await.map_or_else(Into::into, not_ready),
                Err(error) => break error.into(),
            }
        };
        if is_nameless {
            // The failure tells the cause, and nobody knows the name.
            let forget = move || forget_failed_start(&plan.name);
            let _ = tokio::task::spawn_blocking(forget).await;
        }
        Err(failure)
    }
}

/// Measures a cluster that waits for that.
async fn proven(plan: &Plan, machine: Option<&Topology>) -> Result<Verification, LaunchFailure> {
    let subject = Subject::starting(plan, machine);
    // Nobody waits for latencies before READY.
    let wanted = Wanted { latencies: false, ..Wanted::verification(&subject) };
    let mut verification = Verification::default();
    if let Err(error) = wanted.measure(&subject, &mut |_| (), &mut verification).await {
        return Err(LaunchFailure::Unverified { objections: vec![in_full(&error)] });
    }
    let told = |pair: &Pair| format!("{} to {}: {}", pair.from, pair.to, pair.verdict);
    let objections: Vec<String> = verification.objections().map(told).collect();
    match objections.is_empty() {
        true => Ok(verification),
        false => Err(LaunchFailure::Unverified { objections }),
    }
}

/// Waits until a cluster of this plan's name that this process has dropped is gone.
async fn outlast_dropped(plan: &Plan) {
    let dropped = || DROPPED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !dropped().contains(&plan.name) {
        return;
    }
    let deadline = Instant::now() + plan.supervision.grace.0 + LAST_MOMENTS;
    let paths = Paths::of(&plan.name);
    while paths.is_alive() && Instant::now() < deadline {
        tokio::time::sleep(LOOK).await;
    }
    dropped().retain(|name| *name != plan.name);
}

/// A value as it stands in a spec. What can't be written as JSON becomes a text, which is refused
/// as a value of the wrong type; JSON itself would say `null` for an infinite number.
fn written(value: &impl Serialize) -> Value {
    match serde_yaml::to_value(value) {
        Ok(serde_yaml::Value::Number(number))
            if number.as_f64().is_some_and(|number| !number.is_finite()) =>
        {
            number.to_string().into()
        }
        _ => serde_json::to_value(value).unwrap_or_else(|error| error.to_string().into()),
    }
}

/// Sets a value at a path of keys.
fn put(object: &mut Value, path: &str, value: Value) {
    let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let slot = &mut object[key];
    match rest {
        Some(rest) => put(slot, rest, value),
        None => *slot = value,
    }
}

/// A built-in machine, or the one in a file.
fn machine(name: &str) -> Result<Topology, LaunchFailure> {
    let text = match topology::builtin(name) {
        Some(text) => text.to_owned(),
        None => std::fs::read_to_string(name)
            .map_err(|source| LaunchFailure::Topology { name: name.to_owned(), source })?,
    };
    topology::parse(&text)
        .map_err(|source| LaunchFailure::Machine { name: name.to_owned(), source })
}

/// A name that no other cluster of this user has; a process may own several clusters.
fn own_name() -> ClusterName {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // Digits and dashes only, and far shorter than the limit.
    format!("embedded-{}-{count}", std::process::id()).parse().unwrap_or_default()
}

/// A running cluster, owned by this program.
///
/// Dropping it ends the cluster, as does any end of this process, but does not wait for that; a
/// later launch of the same name by this process does. [`Cluster::stop`] waits.
#[derive(Debug)]
pub struct Cluster {
    supervisor: tokio::sync::Mutex<Option<Detached>>,
    handle: Handle,
    plan: Plan,
    proof: Option<Verification>,
}

impl Cluster {
    /// Starts a cluster with default settings: one native worker per GPU of this machine.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A handle for other tasks and threads, like that of a cluster which another program owns.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The cluster's name, which is also that of its run directory.
    pub fn name(&self) -> &ClusterName {
        &self.handle.name
    }

    /// The plan with its reasons.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What was measured before READY, if a native cluster was to be verified (`verify: true`).
    pub fn verification(&self) -> Option<&Verification> {
        self.proof.as_ref()
    }

    /// Paths of its files: logs, events, sockets.
    pub fn paths(&self) -> &Paths {
        &self.handle.paths
    }

    /// A client of its control API.
    pub fn control(&self) -> Control {
        self.handle.control()
    }

    /// [`Handle::state`].
    ///
    /// # Errors
    /// As there.
    pub async fn state(&self) -> Result<ClusterState, ControlError> {
        self.handle.state().await
    }

    /// [`Handle::events`].
    ///
    /// # Errors
    /// As there.
    pub async fn events(&self) -> Result<Events, ControlError> {
        self.handle.events().await
    }

    /// [`Handle::restart`].
    ///
    /// # Errors
    /// As there.
    pub async fn restart(&self, process: &str) -> Result<(), ControlError> {
        self.handle.restart(process).await
    }

    /// [`Handle::scale`].
    ///
    /// # Errors
    /// As there.
    pub async fn scale(&self, workers: usize) -> Result<(), ControlError> {
        self.handle.scale(workers).await
    }

    /// Waits until the cluster has ended, by whatever cause, and tells how. May be dropped at any
    /// time.
    pub async fn wait(&self) -> Outcome {
        let outcome = self.handle.wait().await;
        if let Some(supervisor) = &mut *self.supervisor.lock().await {
            supervisor.reap().await;
        }
        outcome
    }

    /// Stops the cluster, and returns when nothing of it is left but, after a failure or a worker's
    /// death, the files that tell of it. A cluster whose supervisor does not answer is killed.
    pub async fn stop(mut self) {
        if let Some(supervisor) = self.supervisor.get_mut().take() {
            supervisor.end().await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let dropped = DROPPED.lock();
        dropped.unwrap_or_else(std::sync::PoisonError::into_inner).push(self.handle.name.clone());
    }
}
