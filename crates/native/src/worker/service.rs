//! A worker's connection to the scheduler, and the loop that serves it.
//!
//! Does not decide what to do when the scheduler is gone; it ends, and the supervisor decides.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc};

use super::bulk;
use super::context::{SimulatedLink, WorkerContext};
use super::objects::{self, Store};
use super::ports::Ports;
use super::registry::Registry;
use super::runner::{Runner, WorkerEvent, running_here};
use super::tally::Tally;
use super::views::Views;
use crate::connection;
use crate::error::{ConversationError, Error};
use crate::plane::{self, Opening, Plane, Report};
use crate::process::{LaunchEnvironment, StatusPipe, log_to_standard_error, random, resources};
use cuda_cluster_data::cuda::{Device, PoolUse, Sizes};
use cuda_cluster_data::memory::spare;
use cuda_cluster_data::ucx::{LIBRARY_VARIABLE, environment};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_machine::os::{event_loop, memory};
use cuda_cluster_machine::probe::check_port;
use cuda_cluster_model::ids::SCHEDULER;
use cuda_cluster_model::plan::{NativePlan, Plan, WorkerPlan};
use cuda_cluster_model::text::in_full;
use cuda_cluster_wire::frame::FRAME_LIMIT;
use cuda_cluster_wire::greeting::Role;
use cuda_cluster_wire::native::{FromWorker, Registration, ToWorker};
use cuda_cluster_wire::peer::Member;
use cuda_cluster_wire::status::{Condition, DevicePool, MissingPort, PeerLanes};
use cuda_cluster_wire::tasks::{Order, Report as TaskReport};

/// Longest time between the scheduler's end and the signal to this process.
const SIGNAL_DELAY: Duration = Duration::from_millis(100);

/// A worker's memory limit divided by this is the freed heap that it may keep; twice as much counts
/// as bloated (`objects::budget`).
const HEAP_SHARE: u64 = 32;

/// A worker's memory limit divided by this is the spare memory that it may keep. Less is kept while
/// data needs the room (`objects::store`).
const SPARE_SHARE: u64 = 2;

/// The limit to assume for spare memory if there is none.
const UNLIMITED: u64 = 8 << 30;

/// Time that a running task has to return when the worker ends, so that it can free what it has of
/// the device; its result is discarded.
const TASKS_END_WITHIN: Duration = Duration::from_millis(100);

/// Objects that are fetched at the same time.
const FETCHES: usize = 8;

/// Peers may keep at least this fraction of a GPU's memory mapped.
const LEAST_MAPPED: u64 = 64;

/// Most reports in one frame.
const REPORTS: usize = 1024;

/// Runs a worker until it is told to end.
///
/// Must be called while the process has one thread.
///
/// # Errors
/// If it cannot start or continue; the supervisor has been told why.
pub fn main(registry: Registry) -> Result<(), Error> {
    log_to_standard_error();
    let mut status = StatusPipe::open()?;
    let result = start(registry, &mut status);
    if let Err(error) = &result {
        // Standard error is the process's log.
        tracing::error!("{}", error.in_full());
        status.failed(error.in_full());
    }
    result
}

fn start(registry: Registry, status: &mut StatusPipe) -> Result<(), Error> {
    let launch = LaunchEnvironment::read(Paths::workers_plan)?;
    environment::set_defaults(&environment::defaults(mapped_by_each(&launch.plan)))?;
    let worker = launch.plan.workers.iter().find(|worker| worker.name == launch.name);
    let limit = worker.and_then(|worker| worker.memory_limit_bytes).unwrap_or(UNLIMITED);
    memory::keep_freed_up_to(limit / HEAP_SHARE);
    let runtime = event_loop::start(&mut tokio::runtime::Builder::new_current_thread())
        .map_err(|source| Error::System { action: "start the event loop", source })?;
    let mut device = None;
    let result = runtime.block_on(run(launch, registry, status, &mut device));
    // Fetches and others that were under way have memory of the device until here.
    drop(runtime);
    device.as_ref().inspect(|device| device.close_pool());
    result
}

async fn run(
    launch: LaunchEnvironment,
    registry: Registry,
    status: &mut StatusPipe,
    opened_device: &mut Option<Device>,
) -> Result<(), Error> {
    let system = |action| move |source| Error::System { action, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system("watch for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("watch for SIGINT"))?;

    let me = Member { name: launch.name.clone(), incarnation: u64::from_le_bytes(random()?) };
    let worker = launch.plan.workers.iter().find(|worker| worker.name == me.name);
    let device = open_device(worker, &launch.plan)?;
    opened_device.clone_from(&device);
    status.step("opening UCX");
    let opening = Opening {
        library: std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from),
        // The environment has them all: UCX chooses what the plan leaves out.
        settings: Vec::new(),
        device: device.clone(),
        bytes_in_flight: plane::BYTES_IN_FLIGHT,
    };
    let (plane, mut reports) = Plane::spawn(me.clone(), launch.secret.clone(), opening)?;
    let _join = JoinOnDrop(plane.clone());
    // UCX tests its memory hooks by moving the end of the heap up and back (ucm/mmap/install.c,
    // `ucm_fire_mmap_events_internal`), which removes what another thread has just allocated there.
    // So no other thread works until UCX is open.
    let opened = tokio::select! {
        biased;
        _ = terminate.recv() => return plane.stop(),
        _ = interrupt.recv() => return plane.stop(),
        report = reports.recv() => report,
    };
    let Some(Report::Open { address, library, path, resources }) = opened else {
        // The thread's own error says more.
        return plane.stop().and(Err(Error::PlaneGone));
    };
    tracing::info!(ucx = library, "UCX is open");
    let path = path.display().to_string();
    let ports = Ports::of(worker, launch.plan.machine.simulated, resources, path);
    let missing = ports.missing(check_port);
    ports.judge(&missing, launch.plan.requirements.strict, launch.plan.workers.len() > 1)?;
    for MissingPort { port, why } in missing {
        tracing::warn!(port, why, "a planned port is not in use");
        status.note(format!("{port} is planned, but not in use: {why}"));
    }
    // It lives as long as this function, so the channel stays open.
    let (faulted, mut faults) = mpsc::unbounded_channel();
    if let Some(device) = &device {
        let faulted = faulted.clone();
        device.on_fault(move |fault| {
            let _ = faulted.send(Error::Fault { fault: fault.clone(), task: running_here() });
        });
    }
    let mut known_lanes = Vec::new();
    let mut condition = |lanes: Option<Vec<PeerLanes>>, tally: &Tally, store: &Store| Condition {
        device_pool: opened_device.as_ref().and_then(Device::pool).map(reported),
        missing_ports: ports.missing(check_port),
        peers: lanes
            .filter(|lanes| *lanes != known_lanes)
            .inspect(|lanes| known_lanes.clone_from(lanes)),
        work: Some(tally.work(store)),
        received_from: tally.received_from().clone(),
    };
    let mut tally = Tally::new();
    let mut broken: HashMap<String, u64> = HashMap::new();
    let resources =
        WorkerResources { launch: &launch, planned: worker, device, plane: plane.clone() };
    let (mut runner, mut events, offer) = resources.open(registry, me.clone())?;

    status.step("connecting to the other workers");
    let registration = Registration { member: me, address };
    let mut scheduler = Scheduler::connect(&launch, &registration).await?;
    let mut ucx = Some(library);
    // Whatever the end, what follows must come: running tasks get time to free what they have.
    let ended = async {
        loop {
            tokio::select! {
                biased;
                _ = terminate.recv() => break Ok(()),
                _ = interrupt.recv() => break Ok(()),
                Some(error) = faults.recv() => break Err(error),
                // Answer only after the UCX thread has had its turn too.
                () = status.asked() => plane.pulse(),
                report = reports.recv() => match report {
                    // It opens only once.
                    Some(Report::Open { .. }) => {}
                    Some(Report::Ready(peers)) => {
                        tracing::info!(peers = peers.len(), "ready");
                        scheduler.send(&FromWorker::Connected { peers: peers.clone() }).await?;
                        scheduler.send(&FromWorker::Work(vec![offer.clone()])).await?;
                        let condition = condition(Some(peers.clone()), &tally, runner.store());
                        status.ready(None, peers, ucx.take(), condition);
                    }
                    Some(Report::Grown(peers)) => {
                        scheduler.send(&FromWorker::Connected { peers: peers.clone() }).await?;
                        status.answer(condition(Some(peers), &tally, runner.store()));
                    }
                    Some(Report::Pulse { lanes }) => {
                        status.answer(condition(Some(lanes), &tally, runner.store()));
                        shrink_idle_pool(opened_device.as_ref());
                    }
                    Some(Report::PeerFailed { member, cause }) => {
                        let times = broken.entry(member.name.clone()).or_default();
                        *times += 1;
                        // Logged at each power of two, because it is tried twice a second.
                        if times.is_power_of_two() {
                            tracing::warn!(peer = member.name, cause, times, "a connection broke");
                        }
                        scheduler.send(&FromWorker::PeerFailed { member, cause }).await?;
                    }
                    Some(Report::Measured { id, result }) => {
                        scheduler.send(&FromWorker::Measured { id, result }).await?;
                    }
                    None => break Err(Error::PlaneGone),
                },
                Some(first) = events.recv() => {
                    let reports = gather(first, &mut events, &mut runner);
                    tally.count(&reports);
                    if !reports.is_empty() {
                        scheduler.send(&FromWorker::Work(reports)).await?;
                    }
                }
                message = scheduler.incoming.recv() => match message {
                    Some(ToWorker::Work(orders)) => {
                        if orders.iter().any(|order| matches!(order, Order::Run { .. })) {
                            status.works();
                        }
                        runner.execute(orders);
                    }
                    Some(message) => plane.notify(message),
                    None => break Err(Error::SchedulerGone),
                },
            }
        }
    };
    let ended = ended.await;
    // When everything is told to end, the scheduler's end may be seen before the signal.
    let terminated = tokio::time::timeout(SIGNAL_DELAY, terminate.recv());
    let ended = match ended {
        Err(Error::SchedulerGone) if terminated.await.is_ok() => Ok(()),
        ended => ended,
    };
    // Nobody asks any more; the history is to have what was received until now.
    status.answer(condition(None, &tally, runner.store()));
    if ended.is_ok() {
        tracing::info!("worker ends as requested");
        // If the scheduler is gone already, it need not be told.
        let _ = scheduler.send(&FromWorker::Leaving).await;
    }
    runner.stop(TASKS_END_WITHIN);
    let stopped = plane.stop();
    match (stopped, ended) {
        // The thread's own error says more.
        (Err(error), Err(Error::PlaneGone)) => Err(error),
        (_, Err(error)) | (Err(error), Ok(())) => Err(error),
        (Ok(()), Ok(())) => Ok(()),
    }
}

/// Gives back what an idle pool of device memory need not keep. Not on this thread: the driver may
/// wait for the device.
fn shrink_idle_pool(device: Option<&Device>) {
    if let Some(device) = device.filter(|device| device.pool_is_to_shrink()).cloned() {
        drop(tokio::task::spawn_blocking(move || device.trim_pool()));
    }
}

/// Waits for the UCX thread on every return: if the process ends while the thread uses UCX, UCX is
/// taken down under it and aborts (seen in 1.13, `vfs_obj.c`).
struct JoinOnDrop(Plane);

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        // The error that led here says more.
        let _ = self.0.stop();
    }
}

/// Collects the events so far into reports for the scheduler.
fn gather(
    first: WorkerEvent,
    more: &mut mpsc::UnboundedReceiver<WorkerEvent>,
    runner: &mut Runner,
) -> Vec<TaskReport> {
    let mut reports = Vec::new();
    let mut next = Some(first);
    while let Some(event) = next {
        match event {
            WorkerEvent::Report(report) => reports.push(report),
            WorkerEvent::Fetched(fetched) => reports.extend(runner.fetched(fetched)),
            // Who has asked may have gone.
            WorkerEvent::Asked(answer) => drop(answer.send(runner.at_work())),
        }
        if reports.len() >= REPORTS {
            break;
        }
        next = more.try_recv().ok();
    }
    reports
}

/// The resources of a worker, from which its tasks get their context.
struct WorkerResources<'a> {
    launch: &'a LaunchEnvironment,
    planned: Option<&'a WorkerPlan>,
    device: Option<Device>,
    plane: Plane,
}

impl WorkerResources<'_> {
    fn open(
        self,
        registry: Registry,
        me: Member,
    ) -> Result<(Runner, mpsc::UnboundedReceiver<WorkerEvent>, TaskReport), Error> {
        let native = &self.launch.native;
        let settings = objects::Settings {
            device_limit: self.planned.and_then(|planned| planned.device_memory_limit_bytes),
            host_limit: native.host_limit_bytes,
            memory_limit: self.planned.and_then(|planned| planned.memory_limit_bytes),
            disk_limit: native.disk_limit_bytes,
            directory: native.local_directory.clone().unwrap_or_else(std::env::temp_dir),
        };
        let spare = settings.memory_limit.unwrap_or(UNLIMITED) / SPARE_SHARE;
        spare::keep_up_to(usize::try_from(spare).unwrap_or(usize::MAX))
            .map_err(|source| Error::System { action: "start a thread", source })?;
        let store = Arc::new(Store::new(&settings, self.device, Some(self.plane.clone())));
        if settings.memory_limit.is_some() {
            let watched = Arc::clone(&store);
            // The thread ends with the process.
            std::thread::Builder::new()
                .name("memory".to_owned())
                .spawn(move || watched.watch())
                .map_err(|source| Error::System { action: "start a thread", source })?;
        }
        let threads = self.planned.map_or(1, |planned| planned.threads);
        let paths = self.launch.paths.clone();
        let secret = self.launch.secret.clone();
        let socket = paths.socket(&me.name);
        let links = simulated_links(native, &me.name);
        let shared = WorkerContext {
            me,
            registry,
            store: Arc::clone(&store),
            plane: self.plane,
            links,
            views: Views::new(paths.clone(), secret.clone()),
            paths,
            secret: secret.clone(),
            fetches: Semaphore::new(FETCHES),
        };
        let (runner, sender, events) = Runner::start(shared, threads)?;
        bulk::serve(&socket, secret, store, sender)?;
        let resources = resources(native, self.planned);
        Ok((runner, events, TaskReport::Offer { threads, resources }))
    }
}

/// Simulated bandwidths of the links from peers, in bytes per second, if the plan slows them down
/// to those of a simulated machine.
fn simulated_links(native: &NativePlan, me: &str) -> BTreeMap<String, SimulatedLink> {
    let links = native.simulated_links.get(me).into_iter().flatten();
    links.map(|(peer, bandwidth)| (peer.clone(), SimulatedLink::new(*bandwidth))).collect()
}

fn reported(pool: PoolUse) -> DevicePool {
    DevicePool {
        slabs: pool.slabs as u64,
        held_bytes: pool.held_bytes,
        used_bytes: pool.used_bytes,
        largest_free_bytes: pool.largest_free_bytes,
        mapped_by_peers_bytes: pool.mapped_by_peers_bytes,
        freed_but_mapped_bytes: pool.freed_but_mapped_bytes,
        maximum_bytes: pool.maximum_bytes,
    }
}

/// Most that each peer keeps mapped. What is freed while peers have it mapped stays on the GPU, so
/// this is what the GPU has beside the worker's data, shared by the peers; but at least what a slab
/// of common length takes, without which a peer would map everything anew.
fn mapped_by_each(plan: &Plan) -> Option<u64> {
    let peers = plan.workers.len().saturating_sub(1).max(1) as u64;
    let spare = |worker: &WorkerPlan| {
        let gpu = worker.gpu.as_ref()?;
        let beside = plan.workers.iter().filter_map(|other| other.gpu.as_ref());
        let sharers =
            beside.filter(|other| other.index == gpu.index && other.mig == gpu.mig).count();
        let memory = gpu.memory_bytes? / sharers.max(1) as u64;
        let data = worker.device_memory_limit_bytes.unwrap_or(memory);
        Some((memory.saturating_sub(data) / peers).max(memory / LEAST_MAPPED))
    };
    plan.workers.iter().filter_map(spare).min()
}

/// Opens the worker's device memory, if its plan gives it a GPU.
fn open_device(worker: Option<&WorkerPlan>, plan: &Plan) -> Result<Option<Device>, Error> {
    let Some(gpu) = worker.and_then(|worker| worker.gpu.as_ref()) else { return Ok(None) };
    if plan.machine.simulated {
        let limit = worker.and_then(|worker| worker.device_memory_limit_bytes);
        let Some(capacity) = limit.or(gpu.memory_bytes) else { return Ok(None) };
        tracing::info!(gpu = gpu.index.0, capacity, "device memory is simulated in host memory");
        return Ok(Some(Device::simulated(format!("simulated GPU {}", gpu.index), capacity)));
    }
    let Some(place) = gpu.pci else { return Ok(None) };
    let device = Device::open(place)?;
    if let (Some(planned), Some(found), None) = (&gpu.uuid, device.uuid()?, &gpu.mig)
        && *planned != found
    {
        return Err(Error::OtherGpu { place, found, planned: planned.clone() });
    }
    let rmm = worker.and_then(|worker| worker.rmm.as_ref());
    device.size_pool(Sizes {
        initial_bytes: rmm.and_then(|rmm| rmm.pool_bytes),
        maximum_bytes: rmm.and_then(|rmm| rmm.maximum_pool_bytes),
        usual_bytes: worker.and_then(|worker| worker.device_memory_limit_bytes),
        mapped_by_each_bytes: environment::limit_of_mappings(),
    })?;
    tracing::info!(gpu = gpu.index.0, name = device.name(), "device is open");
    Ok(Some(device))
}

/// The connection to the scheduler.
struct Scheduler {
    writer: OwnedWriteHalf,
    /// Closes when the scheduler is gone.
    incoming: mpsc::UnboundedReceiver<ToWorker>,
}

impl Scheduler {
    async fn connect(
        launch: &LaunchEnvironment,
        registration: &Registration,
    ) -> Result<Self, Error> {
        let LaunchEnvironment { paths, secret, .. } = launch;
        let mut stream = connection::connect(paths, SCHEDULER, secret, Role::Worker).await?;
        connection::send(&mut stream, registration).await?;
        let (reader, writer) = stream.into_split();
        let (messages, incoming) = mpsc::unbounded_channel();
        tokio::spawn(listen(reader, messages));
        Ok(Self { writer, incoming })
    }

    async fn send(&mut self, message: &FromWorker) -> Result<(), Error> {
        match connection::send(&mut self.writer, message).await {
            Err(ConversationError::Broken(_)) => Err(Error::SchedulerGone),
            result => Ok(result?),
        }
    }
}

/// Passes on the scheduler's messages until it is gone.
async fn listen(mut reader: OwnedReadHalf, messages: mpsc::UnboundedSender<ToWorker>) {
    loop {
        match connection::receive(&mut reader, FRAME_LIMIT).await {
            Ok(message) => {
                if messages.send(message).is_err() {
                    return;
                }
            }
            Err(ConversationError::Broken(_)) => return,
            Err(error) => {
                tracing::error!("the scheduler sent an invalid message: {}", in_full(&error));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::{CallerEnvironment, plan};
    use cuda_cluster_model::spec::{self, Request};
    use cuda_cluster_model::topology;

    #[test]
    fn peers_keep_no_more_mapped_than_a_gpu_has_beside_its_data() {
        let planned = |text: &str| {
            let machine = topology::parse(topology::builtin("dgx-h100").expect("built in"));
            let request = Request::of(spec::parse(text, "test").expect("right")).expect("right");
            plan(&machine.expect("a machine"), &request, &CallerEnvironment::default())
        };
        let usual = planned("version: 1\n").expect("a plan");
        let memory = usual.workers[0].gpu.as_ref().and_then(|gpu| gpu.memory_bytes).expect("known");
        let data = usual.workers[0].device_memory_limit_bytes.expect("limited");
        assert_eq!(mapped_by_each(&usual), Some((memory - data) / 7));
        let all = planned("version: 1\ndevice: {memory_limit: none}\n").expect("a plan");
        assert_eq!(mapped_by_each(&all), Some(memory / 64), "never nothing");
        let two = planned("version: 1\ngpus: [0]\nworkers_per_gpu: 2\n").expect("a plan");
        let data = two.workers[0].device_memory_limit_bytes.expect("limited");
        assert_eq!(mapped_by_each(&two), Some(memory / 2 - data), "the GPU is shared");
        let set = environment::defaults(Some(2 << 30));
        let limit = set.iter().find(|setting| setting.name == "CUDA_IPC_CACHE_MAX_SIZE");
        assert_eq!(limit.map(|limit| limit.value.as_str()), Some("2147483648"));
    }
}
