"""A worker, without a nanny: restarts, memory limits and time-outs are the supervisor's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable
from typing import Any

import dask
import distributed
from dask.utils import parse_timedelta
from distributed import Security, Worker
from distributed import Status as Phase

from cuda_cluster_dask import (
    control,
    dashboard,
    fetching,
    gpu,
    internals,
    joined,
    lanes,
    measure,
    ports,
    process,
    storage,
    tasks,
    verify,
    wakeup,
)
from cuda_cluster_fork.failure import StartFailure
from cuda_cluster_dask.internals import (
    CLUSTER_ENDS,
    LIFETIME,
    REMOVED,
    UNWANTED,
    get_address_host,
    get_address_host_port,
    get_ip,
    get_ipv6,
    import_term,
)
from cuda_cluster_dask.nanny import Nanny
from cuda_cluster_dask.received import received
from cuda_cluster_dask.sent_as import sent_as
from cuda_cluster_dask.settings import Name, WorkerSettings
from cuda_cluster_dask.status import Status, Then

#: Seconds after which a scheduler elsewhere that had workers, and does not answer, is gone for good.
IS_GONE = 30

#: Seconds until a worker that does not find it, while others have it, looks again.
LOOK_AGAIN = 1

OTHER_PROTOCOL = (
    "the scheduler speaks direct://, and this worker listens on tcp://, where nobody is asked for the "
    "secret; hint: --protocol direct"
)

#: Seconds for which a worker that somebody has sent a signal hands over its data before it ends.
HANDING_OVER = 5


async def serve(settings: WorkerSettings, status: Status) -> int:
    """Runs a worker until it is asked to end, or closes itself; returns the exit status."""
    thresholds = gc.get_threshold()  # distributed#1653
    gc.set_threshold(*(3 * threshold for threshold in thresholds))
    if settings["cuda_context"]:
        status.step("creating a CUDA context")
        gpu.create_context(settings["plan"]["protocol"], settings["gpu_uuid"])
    if (exposed := wakeup.open_ucx(settings["plan"]["protocol"])) is not None:
        status.note(exposed)
    status.killed_at(kill_percent())
    status.step("loading the worker")
    kind = sent_as(worker_class(settings["plan"]["worker_class"]), Supervised)
    data, plugins = storage.storage(settings, status), gpu.plugins(settings)
    security = process.security(settings["plan"]["tls"], "worker")
    name = full_name(settings, settings["dask_name"])
    # What is before it does not wait, and a signal ends it at once.
    asked = process.stop_asked(status)
    status.step(f"looking for the scheduler of {settings['scheduler'] or settings['scheduler_file']}")
    nanny = Nanny(settings, name, (security or Security()).get_connection_args("worker"))
    death_timeout = parse_timedelta(settings["plan"]["death_timeout"])
    # Nobody here brings a scheduler elsewhere back, but somebody there may.
    comes_back = settings["joins"] and await control.has_been_ready()
    patience = death_timeout or (IS_GONE if comes_back else None)
    while True:
        try:
            await nanny.introduce(patience, is_first=settings["joins"] and not comes_back)
            break
        except StartFailure as failure:
            if not comes_back:
                raise
            if death_timeout is None and await control.others_are_ready():
                # The scheduler is there, and only this one does not find it (yet).
                await asyncio.sleep(LOOK_AGAIN)
                continue
            status.leaving("rest", str(failure), lost=True)
            return 0
    if settings["plan"]["protocol"] == "tcp" and str(nanny.scheduler_addr).startswith("direct://"):
        # A scheduler's file says so only now.
        status.note(OTHER_PROTOCOL)
    if settings["plan"]["preload"]:
        status.step("running " + ", ".join(settings["plan"]["preload"]))
    worker: Supervised = kind(
        nanny.scheduler_addr,
        name=name,
        nthreads=settings["threads"],
        protocol=settings["plan"]["protocol"],
        security=security,
        memory_limit=settings["memory_limit"] or 0,
        data=data,
        plugins=plugins,
        resources=settings["resources"],
        local_directory=settings["plan"]["local_directory"],
        dashboard=False,
        dashboard_address=ports.dashboard_address(settings["dashboard_address"]),
        http_prefix=settings["plan"]["dashboard_prefix"],
        preload=settings["plan"]["preload"],
        death_timeout=death_timeout,
        lifetime=parse_timedelta(settings["plan"]["lifetime"]),
        **place(settings, str(nanny.scheduler_addr)),
    )
    if settings["plan"]["protocol"] == "direct":
        from cuda_cluster import comm

        worker.metrics["direct"] = comm.metrics
    worker.metrics[tasks.SENT] = internals.sent_bytes
    if settings["joins"]:
        said = await joined.about(settings["version"])
        worker.startup_information[joined.KEY] = lambda _: said
    nanny.adopt(worker)
    storage.heed(worker)
    status.step("registering with the scheduler")
    proof = settings["verify"]
    measure.answer(worker)
    async with worker:
        await nanny.introduced()
        if settings["plan"]["dashboard"]:
            dashboard.of_worker(worker, settings["plan"]["dashboard_prefix"])
        proven: dict[str, str] = {}
        if proof is not None:
            names = {full_name(settings, one["name"]): one["process"] for one in proof["peers"]}
            try:
                proven = await verify.peers(worker, proof, names, status)
            except StartFailure as failure:
                # Before the worker closes: UCX may crash then, and the reason would be lost.
                status.failed(str(failure))
                raise
        for port in lanes.ports_not_opened(settings["plan"]["protocol"]):
            status.note(f"{port} is planned, but UCX has not opened it")
        obstacle = await measure.listen(worker)
        if obstacle is not None:
            status.note(obstacle)
        status.ready(worker.address, lanes.Peers(worker, proven), internals.work_of(worker))
        worker.tell_first_task = status.working
        ended = asyncio.create_task(worker.finished())
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            if await say_goodbye(worker):
                return 0
            process.die_of(asked.result())
    then = worker.then()
    if then is None:
        return 1
    if settings["joins"] and worker.reason == CLUSTER_ENDS:
        then = "disband"
    words = internals.IN_WORDS.get(worker.reason or "")
    # Other reasons are anybody's text.
    status.leaving(then, worker.reason if words is None else words.format(worker.scheduler.address))
    return 0


def worker_class(path: str) -> type[Worker]:
    """The class of this name; of a nanny's only its worker counts."""
    kind = import_term(path)
    if isinstance(kind, type) and issubclass(kind, distributed.Nanny):
        return Worker
    if not (isinstance(kind, type) and issubclass(kind, Worker)):
        raise StartFailure(f"--worker-class {path}: it is no class of Dask workers")
    return kind


def kill_percent() -> float | None:
    """At how many percent of its memory limit the worker is to be killed; None for never. A nanny
    reads this, too; some of Dask's configuration is only known here."""
    share = dask.config.get("distributed.worker.memory.terminate")
    if share is False:
        return None
    if not isinstance(share, (int, float)):
        raise StartFailure(
            "distributed.worker.memory.terminate is neither a fraction of the memory limit nor "
            f"false: {share!r}; hint: Dask's configuration sets it"
        )
    return round(share * 100, 2)


def full_name(settings: WorkerSettings, name: Name) -> Name:
    """A worker's name for a scheduler that several machines' workers may join."""
    return f"{socket.gethostname()}-{name}" if settings["named_by_host"] else name


async def say_goodbye(worker: Worker) -> bool:
    """Closes a worker that its supervisor does not want: at once when everything ends, else after
    others have its data. Returns whether it is so: if it was somebody else who sent the signal,
    others only get its data."""
    leaving = await control.leaving_together(worker.address)
    if leaving is None:
        # Its end must look like what it is: the scheduler suspects the tasks that it was running,
        # and does not have them end one worker after the other.
        with contextlib.suppress(Exception):
            retired = worker.scheduler.retire_workers(
                workers=[worker.address], close_workers=False, remove=False
            )
            await asyncio.wait_for(retired, HANDING_OVER)
        return False
    if leaving:
        # In one call: workers that are retired one by one could hand data to each other.
        # The supervisor's patience is the limit; it kills then, and what is lost is made again.
        with contextlib.suppress(Exception):
            await worker.scheduler.retire_workers(workers=leaving, close_workers=False, remove=True)
    await worker.close(executor_wait=False, reason="asked to end")
    return True


def place(settings: WorkerSettings, scheduler: str) -> dict[str, Any]:
    """Where the worker listens, and how it is reached."""
    listen, contact = settings["plan"]["listen_address"], settings["plan"]["contact_address"]
    port = settings["port"]
    if listen is None:
        host, interface = settings["plan"]["host"], settings["plan"]["interface"]
        if host is None and interface is None and settings["plan"]["protocol"] not in ("tcp", "tls"):
            # Dask's workers look from where the scheduler is reached for these two alone.
            theirs = get_address_host(scheduler)
            host = bracketed(get_ipv6(theirs) if ":" in theirs else get_ip(theirs))
        return {
            "host": host,
            "interface": interface,
            "port": port and ports.free(settings, (port, port), required=True),
        }
    host, port = get_address_host_port(listen, strict=True)
    return {"host": bracketed(host), "port": port, "contact_address": contact or listen}


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Supervised(Worker):
    """A worker that can tell afterwards what is to follow its end."""

    reason: str | None = None
    was_retired = False
    is_to_return = False
    env = os.environ
    tell_first_task: Callable[[], None] | None = None

    async def gather_dep(self, worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str) -> Any:
        if hasattr(self.data, "make_room"):
            self.data.make_room(total_nbytes)
        try:
            with fetching.lasts(worker, to_gather, total_nbytes):
                return await super().gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
        finally:
            received.count(self.transfer_incoming_log)

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.tell_first_task is not None:
            tell, self.tell_first_task = self.tell_first_task, None
            tell()
        return await super().execute(*args, **kwargs)

    @property
    def nanny(self) -> str | None:
        # What a nanny is asked, the worker answers itself.
        return self.contact_address

    @nanny.setter
    def nanny(self, _: object) -> None:
        pass

    async def come_back(self, reason: str) -> None:
        """Has the scheduler forget this worker, which ends it; the supervisor starts the next."""
        self.is_to_return = True
        self.reason = self.reason or reason
        await self.scheduler.unregister(address=self.contact_address, stimulus_id=reason)

    async def close_gracefully(
        self, restart: bool | None = None, reason: str = "worker-close-gracefully"
    ) -> Any:
        self.reason = self.reason or reason
        return await super().close_gracefully(restart=restart, reason=reason)

    async def close(self, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        # The first call tells why; later ones find it closing.
        self.was_retired |= self.status == Phase.closing_gracefully
        self.reason = self.reason or reason
        kwargs["nanny"] = False  # Else it would ask itself.
        if self.is_to_return or self.reason in (*REMOVED, CLUSTER_ENDS):
            kwargs["executor_wait"] = False  # Nobody waits for its tasks.
        return await super().close(*args, reason=reason, **kwargs)

    def then(self) -> Then | None:
        """What is to follow: `rest` if it is not wanted any more, `return` if it is, None if
        nobody wished its end."""
        if self.reason == LIFETIME or self.is_to_return:
            return "return"
        if self.was_retired or self.reason in UNWANTED:
            return "rest"
        # `Client.restart` and the scheduler's time-out for silent workers remove a worker and
        # expect whoever deployed it to start it again.
        return "return" if self.reason in REMOVED else None
