"""A worker, without a nanny: restarts, memory limits and time-outs are the supervisor's."""

import asyncio
import contextlib
import gc
import os
import socket

import dask
from distributed.comm import get_address_host_port
from distributed.core import Status as Phase
from distributed.security import Security
from distributed.utils import import_term

from cuda_cluster_dask import (
    control,
    dashboard,
    gpu,
    lanes,
    measure,
    ports,
    process,
    storage,
    verify,
    wakeup,
)
from cuda_cluster_dask.failure import StartFailure
from cuda_cluster_dask.nanny import Nanny
from cuda_cluster_dask.sent_as import sent_as

# Why `distributed` closes a worker that is not wanted any more.
CLUSTER_ENDS = "scheduler-close"
UNWANTED = (CLUSTER_ENDS, "scheduler-close-worker", "worker-close")
LIFETIME = "worker-lifetime-reached"

# Why it closes that the scheduler has removed: it was told so, or its heartbeat found out first.
REMOVED = ("scheduler-remove-worker", "worker-heartbeat-missing")


async def serve(settings, status):
    """Runs a worker until it is asked to end, or closes itself; returns the exit status."""
    asked = process.stop_asked(status)
    thresholds = gc.get_threshold()  # distributed#1653
    gc.set_threshold(*(3 * threshold for threshold in thresholds))
    if settings["cuda_context"]:
        status.step("creating a CUDA context")
        gpu.create_context(settings["protocol"])
    if (exposed := wakeup.open_ucx(settings["protocol"])) is not None:
        status.note(exposed)
    status.killed_at(kill_percent())
    status.step("loading the worker")
    kind = remember_why_it_closes(import_term(settings["worker_class"]))
    data, plugins = storage.storage(settings, status), gpu.plugins(settings)
    security = process.security(settings["tls"], "worker")
    name = full_name(settings, settings["dask_name"])
    status.step(f"looking for the scheduler of {settings['scheduler'] or settings['scheduler_file']}")
    nanny = Nanny(settings, name, (security or Security()).get_connection_args("worker"))
    await nanny.introduce(settings["death_timeout"])
    worker = kind(
        nanny.scheduler_addr,
        name=name,
        nthreads=settings["threads"],
        protocol=settings["protocol"],
        security=security,
        memory_limit=settings["memory_limit"] or 0,
        data=data,
        plugins=plugins,
        resources=settings["resources"],
        local_directory=settings["local_directory"],
        dashboard=False,
        dashboard_address=ports.dashboard_address(settings),
        http_prefix=settings["dashboard_prefix"],
        preload=settings["preload"],
        death_timeout=settings["death_timeout"],
        lifetime=settings["lifetime"],
        **place(settings),
    )
    if settings["protocol"] == "native":
        from cuda_cluster import comm

        worker.metrics["native"] = comm.metrics
    nanny.adopt(worker)
    storage.heed(worker)
    status.step("registering with the scheduler")
    proof = settings["verify"]
    measure.answer(worker)
    async with worker:
        await nanny.introduced()
        if settings["dashboard"]:
            dashboard.of_worker(worker, settings["dashboard_prefix"])
        proven = {}
        if proof is not None:
            names = {full_name(settings, one["name"]): one["process"] for one in proof["peers"]}
            try:
                proven = await verify.peers(worker, proof, names, status)
            except StartFailure as failure:
                # Before the worker closes: UCX may crash then, and the reason would be lost.
                status.failed(str(failure))
                raise
        for port in lanes.ports_not_opened(settings["protocol"]):
            status.note(f"{port} is planned, but UCX has not opened it")
        obstacle = await measure.listen(worker)
        if obstacle is not None:
            status.note(obstacle)
        status.ready(worker.address, lanes.Peers(worker, proven))
        worker.tell_first_task = status.working
        ended = asyncio.create_task(worker.finished())
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await say_goodbye(worker)
            return 0
    then = worker.then()
    if then is None:
        return 1
    status.leaving(then, worker.reason)
    return 0


def kill_percent():
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


def full_name(settings, name):
    """A worker's name for a scheduler that several machines' workers may join."""
    return f"{socket.gethostname()}-{name}" if settings["joins"] else name


async def say_goodbye(worker):
    """Closes a worker that its supervisor does not want: at once when everything ends, else after
    others have its data."""
    leaving = await control.leaving_together(worker.address)
    if leaving:
        # In one call: workers that are retired one by one could hand data to each other.
        # The supervisor's patience is the limit; it kills then, and what is lost is made again.
        with contextlib.suppress(Exception):
            await worker.scheduler.retire_workers(
                workers=leaving, close_workers=False, remove=True
            )
    await worker.close(executor_wait=False, reason="asked to end")


def place(settings):
    """Where the worker listens, and how it is reached."""
    listen, contact = settings["listen_address"], settings["contact_address"]
    port = settings["port"]
    if listen is None:
        return {
            "host": settings["host"],
            "interface": settings["interface"],
            "port": port and ports.free(settings, (port, port), required=True),
        }
    host, port = get_address_host_port(listen, strict=True)
    host = f"[{host}]" if ":" in host else host
    return {"host": host, "port": port, "contact_address": contact or listen}


def remember_why_it_closes(kind):
    """A subclass of a worker's class that can tell afterwards what is to follow its end."""

    class Supervised(kind, metaclass=sent_as(kind)):
        reason = None
        was_retired = False
        is_to_return = False
        env = os.environ
        tell_first_task = None

        async def gather_dep(self, worker, to_gather, total_nbytes, *, stimulus_id):
            if hasattr(self.data, "make_room"):
                self.data.make_room(total_nbytes)
            return await super().gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)

        async def execute(self, *args, **kwargs):
            if self.tell_first_task is not None:
                tell, self.tell_first_task = self.tell_first_task, None
                tell()
            return await super().execute(*args, **kwargs)

        @property
        def nanny(self):
            # What a nanny is asked, the worker answers itself.
            return self.contact_address

        @nanny.setter
        def nanny(self, _):
            pass

        async def come_back(self, reason):
            """Has the scheduler forget this worker, which ends it; the supervisor starts the next."""
            self.is_to_return = True
            self.reason = self.reason or reason
            await self.scheduler.unregister(address=self.contact_address, stimulus_id=reason)

        async def close_gracefully(self, restart=None, reason="worker-close-gracefully"):
            self.reason = self.reason or reason
            return await super().close_gracefully(restart=restart, reason=reason)

        async def close(self, *args, reason="worker-close", **kwargs):
            # The first call tells why; later ones find it closing.
            self.was_retired |= self.status == Phase.closing_gracefully
            self.reason = self.reason or reason
            kwargs["nanny"] = False  # Else it would ask itself.
            if self.is_to_return or self.reason in (*REMOVED, CLUSTER_ENDS):
                kwargs["executor_wait"] = False  # Nobody waits for its tasks.
            return await super().close(*args, reason=reason, **kwargs)

        def then(self):
            """What is to follow: `rest` if it is not wanted any more, `return` if it is, None if
            nobody wished its end."""
            if self.reason == LIFETIME or self.is_to_return:
                return "return"
            if self.was_retired or self.reason in UNWANTED:
                return "rest"
            # `Client.restart` and the scheduler's time-out for silent workers remove a worker and
            # expect whoever deployed it to start it again.
            return "return" if self.reason in REMOVED else None

    return Supervised
