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
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from distributed import Status, rpc
from tornado.ioloop import IOLoop, PeriodicCallback

from cuda_cluster import _internals, accepted
from cuda_cluster import cluster as core
from cuda_cluster._internals import SchedulerInfo, get_versions
from cuda_cluster.dask import certificates, client, keywords, views
from cuda_cluster.dask import relay as relay_module
from cuda_cluster.dask import worker as worker_module
from cuda_cluster.dask.scaled import Scaled
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState, Event, Plan

logger = logging.getLogger("distributed.deploy.cuda_cluster")

Name = views.Name

#: Seconds after which the end of a cluster takes too long.
PATIENCE = 30

#: So many questions, twice a second, that nobody listens to mean that a cluster has ended.
UNHEARD = 10

#: Seconds for a scheduler to say what it has, before it is looked for again.
ANSWER = 5


def _look_versions_up() -> None:
    # A client reports what can't be found.
    with contextlib.suppress(Exception):
        get_versions()


class LocalCUDACluster(Scaled):
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
    `join`, `detach`, `output`). `net_devices` also takes a function, which is called with each GPU that
    has a worker (its index, a number to calculate with, and `pci`, `uuid`, `numa`, `cpus`, `nics`) and
    returns the NICs' names, or None. Other keywords of `distributed.Worker` (`plugins`,
    `lifetime_stagger`, …) are passed to the workers. What was set with `dask.config.set` before is
    the configuration of all processes.

    Raises `cuda_cluster.ClusterError` with the cause if it can't start, which is a ValueError if
    an argument is wrong.
    """

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
        if level:
            self._release.enter_context(_internals.silence_logging_cmgr(level))
        for known in keywords.DASK_CUDA:
            if not hasattr(type(self), known):
                setattr(self, known, given[known])
        self.host = kwargs.get("host")
        self._request = self._translate(asked)
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
        self.security = certificates.of_environment(self._attached.env())
        client.prepare()
        self.status = Status.created
        _living.add(self)
        self._begin()
        return self

    def _translate(self, asked: dict[str, Any]) -> keywords.Request:
        return keywords.translate(asked)

    def _set_up(self, asynchronous: bool, loop: Any, interval: Any, name: str | None) -> None:
        if not (loop is None or isinstance(loop, IOLoop)):
            raise TypeError(f"loop must be a tornado IOLoop or None, not {loop!r}")
        self.status = Status.closed  # Until there is something to close.
        self._begin_without_workers()
        self._owned: core.Owned | None = None
        self._request = keywords.Request({})
        self._starting: asyncio.Future[None] | None = None
        self._relay: relay_module.Relay | None = None
        self._following: asyncio.Future[None] | None = None
        self._release: contextlib.ExitStack = contextlib.ExitStack()
        self._stuck: ClusterError | None = None
        self._unheard = 0
        self._states: views.States | None = None
        self._process = os.getpid()
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
        except ClusterError as error:
            # Nobody listens. A run directory that somebody removed comes back soon.
            gone = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
            self._unheard = self._unheard + 1 if gone else 0
            if self._owned is None and self._unheard > UNHEARD and self.status == Status.running:
                logger.warning("The cluster %s has ended", self.name)
                self._has_ended(None)
            return False
        self._unheard = 0
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
        flags = {**self._certificates(), **request.flags}
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

    def _certificates(self) -> dict[str, str]:
        security = self._request.security
        if self._request.protocol not in ("tls", "wss") and not security.require_encryption:
            return {}
        return certificates.flags(security, self._release)

    def _configure_client(self, plan: Plan) -> None:
        """Configures UCX in this process as in the workers."""
        assert self._state is not None and self._state.scheduler is not None
        if (self._state.scheduler.address or "").startswith("ucx"):
            assert self._attached is not None
            client.configure_ucx(self._attached.env(), context=not self._state.simulated)

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
                    text = "The cluster %s is still ending after %s s; 'cuda-cluster down --kill %s' ends it"
                    logger.warning(text, self.name, PATIENCE, self.name)
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
            if self._stuck is not None and self._owned is not None and not self._owned.has_ended:
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
    def scheduler(self) -> views.SchedulerView:
        """The scheduler, which is a process of its own."""
        return views.SchedulerView(self)

    @property
    def run_directory(self) -> str | None:
        """The directory with the cluster's logs, events and sockets."""
        return None if self._state is None else self._state.run_directory

    # For people.

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        text = super()._repr_html_(cluster_status)
        picture = self._picture()
        if not picture:
            return text
        if self._states is None and self.run_directory is not None:
            self._states = views.States(self.run_directory)
        states = self._states.now() if self._states is not None else {}
        if self.status in (Status.closing, Status.closed, Status.failed):
            # Who has died with its supervisor is still READY in what that wrote last.
            states = dict.fromkeys(states, "stopped")
        # The widget asks for this again and again; it shows it when it has changed.
        return (
            f"{text}<details open><summary><b>{html.escape(self.name)}</b>: {html.escape(views.summary(states))}"
            f"</summary><div style='max-width: 100%; overflow: auto'>{views.alive(picture, states)}</div></details>"
        )

    def _picture(self) -> str:
        """A picture of the machine with its workers; drawn once."""
        if not hasattr(self, "_drawn") and self.run_directory is not None:
            self._drawn = views.picture(self.run_directory, self._request.flags.get("topology"))
        return getattr(self, "_drawn", "")


_OURS = ("topology", "simulate", "spec", "name", "strict", "verify")


class _Subscriber:
    """Has a cluster follow its scheduler and close when it has ended, without keeping it alive."""

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


_living: weakref.WeakSet[LocalCUDACluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Waits until nothing is left of this process's clusters, which end with it; a fork has copies."""
    living = [cluster for cluster in _living if cluster._process == os.getpid()]
    for one in _internals.open_clients():
        if one.cluster in living:
            # Otherwise it would report a lost connection.
            with contextlib.suppress(Exception):
                one.close(timeout=2)
    owned = [(cluster.name, cluster._owned) for cluster in living if cluster._owned is not None]
    for cluster in living:
        if cluster._relay is not None:
            cluster._relay.expect_end()
    for _, one in owned:
        one.release()
    for name, one in owned:
        if not one.wait_ended(10):
            logger.warning("%s has not ended within 10 s: 'cuda-cluster down --kill %s' ends it", name, name)
    for cluster in living:
        cluster.status = Status.closed
        cluster._release.close()
