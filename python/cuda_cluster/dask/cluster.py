"""`LocalCUDACluster`: a Dask cluster on this machine's GPUs, supervised by `cuda-cluster`.

The scheduler and the workers are processes of their own; this class owns their supervisor.

*Invariant:* the constructor returns a READY cluster, or raises and leaves nothing; the cluster ends
with its Python, however that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import html
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import dask
from distributed import Security, Status, rpc
from tornado.ioloop import IOLoop, PeriodicCallback

from cuda_cluster import _internals, accepted, program
from cuda_cluster import cluster as core
from cuda_cluster._internals import Cluster, NoOpAwaitable, SchedulerInfo, get_versions
from cuda_cluster.dask import client, keywords, views
from cuda_cluster.dask import relay as relay_module
from cuda_cluster.dask import worker as worker_module
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState, Event, Plan

logger = logging.getLogger("distributed.deploy.cuda_cluster")

Name = views.Name

#: Seconds after which the end of a cluster takes too long.
PATIENCE = 30

#: Seconds for a scheduler to say what it has, before it is looked for again.
ANSWER = 5

#: States of a worker that nothing starts but a request.
NOT_RUNNING = ("stopped", "failed")


def _look_versions_up() -> None:
    # A client reports what can't be found.
    with contextlib.suppress(Exception):
        get_versions()


class LocalCUDACluster(Cluster):
    """A Dask cluster with one worker for each GPU of this machine.

    Takes every keyword of `dask_cuda.LocalCUDACluster`, with the same meaning, and also these:

    topology, simulate
        Another machine than this one: a file, or a built-in name like `"dgx-h100"`. With
        `simulate=True` its workers run here, without its GPUs.
    spec
        A spec file, a mapping with its content, or a list of them that are merged in their order.
        Keywords override it, apart from those that have their usual values. `${…}` in a mapping is
        only text.
    name
        The cluster's name, for `cuda-cluster ps NAME`, `logs`, `verify`.
    strict, verify
        Notes are errors; READY means that every pair of workers has moved data as it should.

    silence_logs, relay
        What tasks print, and records of Dask's loggers from this level on (False: all), are shown
        here, too, as `LocalCluster` shows them; with `relay=False` they are only in the logs.

    Every other flag of `cuda-cluster up` is a keyword, too, with `_` for `-` (`net_devices`,
    `workers_per_gpu`, `ready_within`, …), apart from those that this class decides (`engine`,
    `join`, `detach`, `output`). Other keywords of `distributed.Worker` (`plugins`,
    `lifetime_stagger`, …) are passed to the workers. What was set with `dask.config.set` before is
    the configuration of all processes.

    Raises `cuda_cluster.ClusterError` with the cause if it can't start, which is a ValueError if
    an argument is wrong.
    """

    _supports_scaling = True

    def __init__(
        self,
        CUDA_VISIBLE_DEVICES: Any = None,
        n_workers: int | None = None,
        threads_per_worker: int = 1,
        memory_limit: Any = "auto",
        device_memory_limit: Any = "default",
        enable_cudf_spill: bool = False,
        cudf_spill_stats: int = 0,
        local_directory: str | None = None,
        protocol: str | None = None,
        enable_tcp_over_ucx: bool | None = None,
        enable_infiniband: bool | None = None,
        enable_nvlink: bool | None = None,
        enable_rdmacm: bool | None = None,
        rmm_pool_size: Any = None,
        rmm_maximum_pool_size: Any = None,
        rmm_managed_memory: bool = False,
        rmm_async: bool = False,
        rmm_allocator_external_lib_list: Any = None,
        rmm_release_threshold: Any = None,
        rmm_log_directory: str | None = None,
        rmm_track_allocations: bool = False,
        log_spilling: bool = False,
        pre_import: Any = None,
        *,
        topology: str | os.PathLike[str] | None = None,
        simulate: bool | None = None,
        spec: Any = None,
        name: str | None = None,
        strict: bool | None = None,
        verify: bool | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        scheduler_sync_interval: Any = 1,
        silence_logs: Any = logging.WARNING,
        relay: bool = True,
        **kwargs: Any,
    ) -> None:
        given = locals()
        level = relay_module.level_of(silence_logs)
        interval = accepted.taken(given, keywords.ACCEPTED)["scheduler_sync_interval"]
        asked = {known: given[known] for known in (*keywords.DASK_CUDA, *_OURS)} | kwargs
        self._relayed = level if relay else None
        self._set_up(asynchronous, loop, interval, name)
        for known in keywords.DASK_CUDA:
            if not hasattr(type(self), known):
                setattr(self, known, given[known])
        self.host = kwargs.get("host")
        self._request = keywords.translate(asked)
        if self._request.flags["name"] is not None:
            self.name = self._request.flags["name"]
        self.security = self._request.security
        client.prepare()
        if enable_cudf_spill:
            client.enable_spilling(cudf_spill_stats, simulated=bool(simulate))
        self.status = Status.created
        _living.add(self)
        self._begin()

    @classmethod
    def from_name(
        cls, name: str, *, asynchronous: bool = False, loop: Any = None, **kwargs: Any
    ) -> LocalCUDACluster:
        """A running cluster, by its name, that `cuda-cluster up --engine dask` or another Python
        started. Closing this object doesn't end it.

        What its workers print is not shown here; `cuda-cluster logs NAME --follow` shows it."""
        self = cls.__new__(cls)
        interval = keywords.ACCEPTED["scheduler_sync_interval"].take(
            "scheduler_sync_interval", kwargs.pop("scheduler_sync_interval", 1)
        )
        self._set_up(asynchronous, loop, interval, name)
        if kwargs:
            raise TypeError(f"from_name got an unexpected keyword {next(iter(kwargs))!r}")
        self._attached = core.attach(name)
        if self._attached.engine != "dask":
            raise ClusterError(f"{name} is a cluster of the {self._attached.engine} engine")
        self.security = _security_of(self._attached.env())
        client.prepare()
        self.status = Status.created
        _living.add(self)
        self._begin()
        return self

    def _set_up(self, asynchronous: bool, loop: Any, interval: Any, name: str | None) -> None:
        if not (loop is None or isinstance(loop, IOLoop)):
            raise TypeError(f"loop must be a tornado IOLoop or None, not {loop!r}")
        self.status = Status.closed  # Until there is something to close.
        self._owned: core.Owned | None = None
        self._attached: core.Cluster | None = None
        self._state: ClusterState | None = None
        self._planned: Plan | None = None
        self._request = keywords.Request({})
        self._requested: dict[Name, None] = {}
        self._processes: dict[Name, str] = {}
        self._correcting = asyncio.Lock()
        self._starting: asyncio.Future[None] | None = None
        self._relay: relay_module.Relay | None = None
        self._following: asyncio.Future[None] | None = None
        self._release = contextlib.ExitStack()
        self._stuck: ClusterError | None = None
        super().__init__(
            asynchronous=asynchronous,
            loop=loop,
            quiet=True,
            name=name,
            scheduler_sync_interval=interval,
        )
        self.status = Status.closed

    def _begin(self) -> None:
        if self.asynchronous:
            return
        self._loop_runner.start()
        try:
            self.sync(self._start)
        except BaseException:
            # Ctrl-C ends the waiting, but not the start.
            self.sync(self._cancel_start)
            self._loop_runner.stop()
            raise

    # Start.

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_once())
        await self._starting

    async def _start_once(self) -> None:
        self.status = Status.starting
        try:
            if self._attached is None:
                self._state = await self._bring_up()
                self._attached = core.Cluster(self._state, self._owned)
            else:
                self._state = self._attached.state()
            self._planned = self._attached.plan()
            self._configure_client(self._planned)
            assert self._state.scheduler is not None
            self.scheduler_comm = self._ask_at(self._state.scheduler.address)
            if self._owned is not None:
                await super()._start()
            else:
                await self._follow()
            self._map_workers()
        except BaseException:
            await self._take_down()
            self.status = Status.failed
            raise

    async def _follow(self) -> None:
        """Polls the state of a cluster that another program started: the scheduler reports its workers
        to one subscriber only (`distributed.scheduler.WorkerStatusPlugin`), which is its owner."""

        async def poll() -> None:
            if await self._find_scheduler():
                # The scheduler may end meanwhile, and its port belong to a program that says nothing.
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    identity = await asyncio.wait_for(self.scheduler_comm.identity(), ANSWER)
                    self.scheduler_info = SchedulerInfo(identity)

        await poll()
        callback = PeriodicCallback(poll, 500)
        self.periodic_callbacks["identity"] = callback
        callback.start()
        self.status = Status.running

    async def _find_scheduler(self) -> bool:
        """Turns to the scheduler that there is now; returns whether there is one."""
        assert self._attached is not None
        try:
            state = await asyncio.to_thread(self._attached.state)
        except ClusterError:
            return False
        if state.scheduler is None or state.scheduler.state != "ready":
            return False
        self._state = state
        if state.scheduler.address != self.scheduler_comm.address:
            before = self.scheduler_comm
            self.scheduler_comm = self._ask_at(state.scheduler.address)
            await before.close_rpc()
            client.follow(self, state.scheduler.address)
        return True

    async def _follow_scheduler(self) -> None:
        """Subscribes again after another scheduler has taken the place of one that ended."""
        async with self._correcting:
            if self.status != Status.running or not await self._find_scheduler():
                return
            logger.warning(
                "The scheduler of %s ended, and another is at %s: results and scattered data are lost",
                self.name,
                self.scheduler_address,
            )
            self._sync_cluster_info_task.cancel()
            with contextlib.suppress(OSError):  # It ended, too; the next one is reported.
                await super()._start()

    def _ask_at(self, address: str | None) -> Any:
        return rpc(address, connection_args=self.security.get_connection_args("client"))

    async def _bring_up(self) -> ClusterState:
        """Starts the program, and waits for READY."""
        request, environment = self._request, {}
        if request.worker:
            descriptor = worker_module.keep(request.worker)
            self._release.callback(os.close, descriptor)
            environment = worker_module.variable(descriptor)
        specs = list(request.specs)
        if environment:
            specs.append({"worker": {"env": environment}})
        flags = {**self._tls(request.security), **request.flags}
        self._owned = core.Owned(flags, specs, worker_module.path())
        # A client says what it has as it connects. Part of that is remembered, and now is time for it.
        threading.Thread(target=_look_versions_up, name="versions", daemon=True).start()
        try:
            state = await self._owned.until_ready()
            self.name = state.name
        finally:
            self._cluster_manager_logs += [(None, note) for note in self._owned.notes]
        if self._relayed is not None:
            self._relay = relay_module.follow(self._owned, state, self._relayed)
            weakref.finalize(self, self._relay.expect_end)
            self._release.callback(self._relay.stop)
        self._owned.subscribe(_Subscriber(self))
        return state

    def _tls(self, security: Security) -> dict[str, str]:
        """The certificates' files. Certificates in memory are written to files until the end."""
        if self._request.protocol not in ("tls", "wss") and not security.require_encryption:
            return {}
        own = {
            "tls_ca_file": security.tls_ca_file,
            "tls_cert": security.tls_scheduler_cert,
            "tls_key": security.tls_scheduler_key,
        }
        worker = (security.tls_worker_cert, security.tls_worker_key)
        if None not in worker and worker != (own["tls_cert"], own["tls_key"]):
            raise ValueError(
                "security has different certificates for scheduler and workers; give both the same"
            )
        flags: dict[str, str] = {}
        folder = None
        for name, value in own.items():
            if value is None:
                raise ValueError(f"security lacks {name}, without which there is no TLS")
            if "\n" in value:
                if folder is None:
                    folder = tempfile.mkdtemp(prefix="cuda-cluster-tls-")
                    self._release.callback(shutil.rmtree, folder, ignore_errors=True)
                path = os.path.join(folder, f"{name}.pem")
                with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                    file.write(value)
                value = path
            flags[name] = os.path.abspath(value)
        return flags

    def _configure_client(self, plan: Plan) -> None:
        """Configures UCX in this process as in the workers."""
        assert self._state is not None and self._state.scheduler is not None
        if (self._state.scheduler.address or "").startswith("ucx"):
            assert self._attached is not None
            client.configure_ucx(self._attached.env(), context=not self._state.simulated)

    def _map_workers(self) -> None:
        """Maps Dask's names to processes, by address; without an address, by the plan."""
        assert self._state is not None and self._planned is not None
        known = self.scheduler_info["workers"]
        processes = {process.name: process for process in self._state.workers}
        for process, name in views.names(self._planned).items():
            address = processes[process].address
            name = known[address]["name"] if address in known else name
            self._processes[name] = process
            if processes[process].state not in NOT_RUNNING:
                self._requested[name] = None

    # End.

    async def _cancel_start(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            with contextlib.suppress(BaseException):
                await self._starting

    async def _close(self) -> None:
        await self._cancel_start()
        if self._relay is not None:
            self._relay.expect_end()
        if self._owned is not None:
            self._owned.release()
        await super()._close()
        await self._take_down()
        _living.discard(self)

    async def _take_down(self) -> None:
        """Waits until nothing of an own cluster is left."""
        if self.scheduler_comm is not None:
            with contextlib.suppress(Exception):
                await self.scheduler_comm.close_rpc()
        if self._owned is not None:
            failed = self._owned.failure
            self._owned.release()
            await self._until_ended(self._owned)
            if self._owned.failure is not failed:
                logger.warning("The cluster %s has ended: %s", self.name, self._owned.failure)
            self._requested.clear()
            self.scheduler_info = SchedulerInfo({**self.scheduler_info, "workers": {}})
        self._release.close()

    async def _until_ended(self, owned: core.Owned) -> None:
        ended = asyncio.ensure_future(owned.until_ended())
        began, watch, told = time.monotonic(), core.Watch(owned), False
        try:
            while not (await asyncio.wait([ended], timeout=core.LOOK))[0]:
                watch.look()
                if not told and time.monotonic() - began >= PATIENCE:
                    told = True
                    logger.warning(
                        "The cluster %s is still ending after %s s; 'cuda-cluster down --kill %s' "
                        "ends it at once",
                        self.name,
                        PATIENCE,
                        self.name,
                    )
        except ClusterError as error:
            self._stuck = error
            raise
        finally:
            ended.cancel()

    def close(self, timeout: float | None = None) -> Any:
        """Takes the cluster down, and returns when nothing of it is left. A supervisor that doesn't
        answer is killed with its cluster; a warning names it. Raises ClusterError if the cluster can't
        end because its `cuda-cluster up` is stopped."""
        closed = super().close(timeout)
        if not self.asynchronous:
            self._loop_runner.stop()
            if self._stuck is not None:
                # `distributed` takes any RuntimeError for the end of the loop.
                raise self._stuck
        return closed

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # A worker that dies while it registers leaves without having come.
        if op == "remove" and msg not in self.scheduler_info["workers"]:
            return
        super()._update_worker_status(op, msg)

    def _has_ended(self, failure: ClusterError | None) -> None:
        """The cluster has ended, and this object did not ask it to."""
        if self.status != Status.running:
            return
        if failure is not None:
            logger.error("The cluster %s has ended: %s", self.name, failure)
        self.loop.add_callback(self._close)

    def __await__(self) -> Generator[Any, None, LocalCUDACluster]:
        async def started() -> LocalCUDACluster:
            if self.status in (Status.created, Status.starting):
                await self._start()
            assert self.status == Status.running, self.status
            return self

        return started().__await__()

    # What there is.

    @property
    def workers(self) -> dict[Name, views.WorkerView]:
        """The requested workers by their names in Dask: the GPUs' indices."""
        return {name: views.WorkerView(self, name) for name in self._requested}

    @property
    def worker_spec(self) -> dict[Name, dict[str, Any]]:
        """The options of each requested worker."""
        workers = self._planned.workers if self._planned else []
        planned = {worker.name: worker for worker in workers}
        return {name: views.spec(planned[self._processes[name]]) for name in self._requested}

    @property
    def scheduler(self) -> views.SchedulerView:
        """The scheduler, which is a process of its own."""
        return views.SchedulerView(self)

    @property
    def cuda_visible_devices(self) -> list[Name]:
        """The GPUs that workers run on, or can be scaled to."""
        return list(self._processes)

    @property
    def run_directory(self) -> str | None:
        """The directory with the cluster's logs, events and sockets."""
        return None if self._state is None else self._state.run_directory

    # More and fewer.

    def scale(self, n: int = 0, memory: Any = None, cores: int | None = None) -> Any:
        """Changes the number of workers to `n`. Those that end hand their data to others first.
        Raises ValueError if there are fewer GPUs."""
        n = accepted.WHOLE.take("n", n)
        if n < 0:
            raise ValueError(f"n must not be negative: {n}")
        n = max(n, self._needed(memory, cores))
        if n > len(self._processes):
            raise ValueError("Can not scale beyond visible devices", self.cuda_visible_devices)
        kept = list(self._requested)[:n]
        new = [name for name in self._processes if name not in self._requested]
        self._requested = dict.fromkeys([*kept, *new[: n - len(kept)]])
        self.loop.add_callback(self._try_to_correct)
        return NoOpAwaitable() if self.asynchronous else None

    def _needed(self, memory: Any, cores: int | None) -> int:
        """The number of workers with that much in total."""
        needed = 0
        planned = self._planned.workers if self._planned else []
        if memory is not None and planned and planned[0].memory_limit_bytes:
            needed = -(-dask.utils.parse_bytes(memory) // planned[0].memory_limit_bytes)
        if cores is not None and planned and planned[0].threads:
            needed = max(needed, -(-cores // planned[0].threads))
        return int(needed)

    async def _try_to_correct(self) -> None:
        """The same as `_correct`, for nobody who waits."""
        try:
            await self._correct()
        except (OSError, ClusterError) as error:
            # What was asked of a cluster that is being closed is no longer wanted.
            if self.status == Status.running:
                logger.warning("%s could not be scaled: %s", self.name, error)

    async def _correct(self) -> None:
        """Ends and starts workers until those run that are requested."""
        async with self._correcting:
            gone = [name for name in await self._running() if name not in self._requested]
            if gone:
                await self.scheduler_comm.retire_workers(names=gone, remove=True, close_workers=True)
            while (running := await self._running()) & set(gone):
                await asyncio.sleep(0.05)
            assert self._attached is not None
            for name in self._requested.keys() - running:
                await asyncio.to_thread(self._attached.restart, self._processes[name])

    async def _running(self) -> set[Name]:
        """Workers that run or start; not those that the scheduler has removed, which are ending."""
        assert self._attached is not None
        state = await asyncio.to_thread(self._attached.state)
        phases = {process.name: process.state for process in state.workers}
        identity = await self.scheduler_comm.identity(n_workers=-1)
        known = {worker["name"] for worker in identity["workers"].values()}
        ended = {name for name, one in self._processes.items() if phases[one] in NOT_RUNNING}
        ending = {name for name, one in self._processes.items() if phases[one] == "ready"} - known
        return self._processes.keys() - ended - ending

    async def scale_down(self, workers: Iterable[Name]) -> None:
        """Ends workers that `adapt` doesn't need."""
        for name in workers:
            self._requested.pop(name, None)
        await self._correct()

    def adapt(self, *args: Any, minimum: int = 0, maximum: Any = None, **kwargs: Any) -> Any:
        """Adapts the number of workers to the work, between two limits."""
        most = len(self._processes)
        maximum = most if maximum is None else min(maximum, most)
        return super().adapt(*args, minimum=minimum, maximum=maximum, **kwargs)

    # For people.

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        text = super()._repr_html_(cluster_status)
        picture = self._picture()
        if not picture:
            return text
        return (
            f"{text}<details><summary><b>{html.escape(self.name)}</b>: the machine and its workers"
            f"</summary><div style='max-width: 100%; overflow: auto'>{picture}</div></details>"
        )

    def _picture(self) -> str:
        """A picture of the machine with its workers; drawn once."""
        if not hasattr(self, "_drawn") and self.run_directory is not None:
            arguments = ["topo", "-o", "svg", f"--plan={self.run_directory}/plan.json"]
            machine = self._request.flags.get("topology")
            if machine is not None:
                arguments.append(f"--topology={machine}")
            try:
                svg = program.run(arguments, timeout=30)
                self._drawn = svg[svg.index("<svg") :]
            except Exception:
                self._drawn = ""  # A notebook shows the rest without it.
        return getattr(self, "_drawn", "")


_OURS = ("topology", "simulate", "spec", "name", "strict", "verify")


class _Subscriber:
    """Has the cluster object follow its scheduler, and closes it when its cluster has ended, without
    keeping the object alive."""

    def __init__(self, cluster: LocalCUDACluster) -> None:
        self._cluster = weakref.ref(cluster)
        self._end = core.in_this_loop(self._has_ended)
        self._follow = core.in_this_loop(self._scheduler_is_back)

    def __call__(self, event: Event | None) -> None:
        if event is None:
            self._end()
        elif event.process == "scheduler" and event.event == "ready":
            self._follow()

    def _scheduler_is_back(self) -> None:
        cluster = self._cluster()
        if cluster is not None:
            cluster._following = asyncio.ensure_future(cluster._follow_scheduler())

    def _has_ended(self) -> None:
        cluster = self._cluster()
        if cluster is not None and cluster._owned is not None:
            cluster._has_ended(cluster._owned.failure)


def _security_of(env: Mapping[str, str]) -> Security:
    """What a client needs to connect to a cluster with this environment."""
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    if f"{prefix}CA_FILE" not in env:
        return Security()
    return Security(
        require_encryption=True,
        tls_ca_file=env[f"{prefix}CA_FILE"],
        tls_client_cert=env[f"{prefix}CLIENT__CERT"],
        tls_client_key=env[f"{prefix}CLIENT__KEY"],
    )


_living: weakref.WeakSet[LocalCUDACluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Waits until nothing is left of the clusters, which end with the interpreter."""
    for one in _internals.open_clients():
        if one.cluster in _living:
            # Otherwise it would report a lost connection.
            with contextlib.suppress(Exception):
                one.close(timeout=2)
    owned = [cluster._owned for cluster in list(_living) if cluster._owned is not None]
    for cluster in list(_living):
        if cluster._relay is not None:
            cluster._relay.expect_end()
    for one in owned:
        one.release()
    for one in owned:
        one.wait_ended(10)
    for cluster in list(_living):
        cluster.status = Status.closed
        cluster._release.close()
