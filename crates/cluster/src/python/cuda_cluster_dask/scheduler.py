"""The scheduler."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import resource
import shlex
import shutil
import time
from collections.abc import Collection
from typing import Any, cast

from distributed import Scheduler

from cuda_cluster_dask import (
    between,
    by_kind,
    by_wires,
    control,
    dashboard,
    internals,
    joined,
    kept_ports,
    meanwhile,
    ports,
    process,
    retirement,
    silence,
    wakeup,
)
from cuda_cluster_fork.failure import StartFailure
from cuda_cluster_dask.internals import Comm, format_dashboard_link, get_address_host
from cuda_cluster_dask.nanny import RESTARTS
from cuda_cluster_dask.settings import Name, SchedulerSettings
from cuda_cluster_dask.status import Status

logger = logging.getLogger("distributed.scheduler")

PATIENCE = 5  # Seconds for a worker to end that was told so: those of `distributed.Nanny.kill`.
RETURN = 60  # Seconds for workers to come back.
LOOK_AGAIN = 0.02


async def serve(settings: SchedulerSettings, status: Status) -> int:
    """Runs a scheduler until it is asked to end, or closes itself; returns the exit status."""
    asked = process.stop_asked(status)
    _make_room()
    first, *copies = settings["scheduler_files"]
    async with await start(settings, status, first) as scheduler:
        for copy in copies:
            shutil.copyfile(first, copy)
            atexit.register(_remove, copy)
        scheduler.add_plugin(joined.Watch(status, settings["version"]))
        learning = by_wires.add(scheduler, settings["gb_per_s"], settings["plan"]["place_by_wires"])
        by_kind.add(scheduler, settings["plan"]["place_by_kind"])
        scheduler.add_plugin(meanwhile.Meanwhile())
        _write_client_environment(settings, scheduler.address)
        if settings["plan"]["dashboard"]:
            dashboard.of_scheduler(scheduler, settings["plan"]["dashboard_prefix"])
            status.dashboard(dashboard_link(scheduler, settings["plan"]["dashboard_prefix"]))
        kept_ports.tell_others(settings, scheduler, status)
        kept_ports.keep(settings, scheduler)
        if (obstacle := await between.listen(scheduler)) is not None:
            status.note(obstacle)
        status.ready(scheduler.address)
        ended = asyncio.create_task(scheduler.finished())
        adapting = adapt(settings["adapt"], scheduler)
        watching = [asyncio.create_task(one.watch(scheduler)) for one in (retirement, silence)]
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        adapting.cancel()
        for one in watching:
            one.cancel()
        if learning is not None:
            learning.cancel()
        if asked.done():
            await scheduler.close(reason="asked to end")
        else:
            status.leaving("end_cluster", "a client shut the cluster down, or nobody used it")
    return 0


async def start(settings: SchedulerSettings, status: Status, file: str) -> Scheduler:
    """Starts a scheduler that writes its address to `file`."""
    if (exposed := wakeup.open_ucx(settings["plan"]["protocol"])) is not None:
        status.note(exposed)
    for _ in range(5):
        port = kept_ports.choose(settings)
        status.step(f"listening on port {port}" if port else "listening on any free port")
        try:
            return await Supervised(
                protocol=settings["plan"]["protocol"],
                host=settings["plan"]["host"],
                interface=settings["plan"]["interface"],
                port=port,
                security=process.security(settings["plan"]["tls"], "scheduler"),
                dashboard=False,
                dashboard_address=kept_ports.dashboard_address(settings),
                http_prefix=settings["plan"]["dashboard_prefix"],
                scheduler_file=file,
            )
        except RuntimeError:
            if port == 0 or ports.free(settings, (port, port), required=False) == port:
                raise
            # Somebody took the port between the look and the listening.
    raise StartFailure("other programs take every port a moment before this one")


class Supervised(Scheduler):
    """A scheduler whose workers are started again by the supervisor.

    It waits for them as `distributed` waits for those of nannies, and has the supervisor end those
    that do not end themselves. Such a worker is its own nanny (`nanny.py`); others may be, too.
    """

    async def restart_workers(
        self,
        workers: Collection[str] | None = None,
        *,
        client: str | None = None,
        timeout: float = 30,
        wait_for_workers: bool = True,
        on_error: str = "raise",
        stimulus_id: str,
    ) -> dict[str, str]:
        chosen = self.workers if workers is None else set(workers).intersection(self.workers)
        own = {address: self.workers[address] for address in chosen if self._is_own(address)}
        others = [address for address in chosen if address not in own]
        gone = {(ws.name, ws.server_id) for ws in own.values()}
        # One that has joined has another supervisor, and here its number may be another process's.
        pids = {ws.pid for ws in own.values() if joined.KEY not in ws.extra}
        deadline = time.monotonic() + timeout
        await asyncio.gather(*(self.remove_worker(address, stimulus_id=stimulus_id) for address in own))
        internals.call_later(self, PATIENCE, end_the_stuck, pids)
        outcome = dict.fromkeys(own, "OK")
        if others:
            outcome |= await super().restart_workers(
                others,
                client=client,
                timeout=timeout,
                wait_for_workers=wait_for_workers,
                on_error=on_error,
                stimulus_id=stimulus_id,
            )
        known = {"action": "restart-workers", "workers": list(own), "client": client}
        self.log_event("all" if client is None else [client, "all"], known)
        missing = await self._wait_for(gone, deadline) if wait_for_workers else set()
        if missing and on_error == "raise":
            raise TimeoutError(
                f"{', '.join(sorted(map(str, missing)))} did not come back within {timeout} s; "
                "'cuda-cluster ps' says how far they are"
            )
        outcome |= {address: "timed out" for address, ws in own.items() if ws.name in missing}
        return outcome

    async def register_nanny_plugin(self, comm: Comm, **plugin: Any) -> dict[str, Any]:
        before = {address: (ws.name, ws.server_id) for address, ws in self.workers.items()}
        answers: dict[str, Any] = await super().register_nanny_plugin(comm, **plugin)
        gone = {before[at] for at, answer in answers.items() if at in before and answer.get(RESTARTS)}
        missing = await self._wait_for(gone, time.monotonic() + RETURN)
        if missing:
            logger.warning("%s did not come back within %d s", ", ".join(sorted(map(str, missing))), RETURN)
        return answers

    def _is_own(self, address: str) -> bool:
        return bool(self.workers[address].nanny == address)

    async def _wait_for(self, gone: set[tuple[Name, str]], deadline: float) -> set[Name]:
        """Waits until others have taken the place of workers, each given by name and server; returns
        the names of those who have not."""
        while True:
            there = {ws.name: ws.server_id for ws in self.workers.values()}
            missing = {name for name, server in gone if there.get(name, server) == server}
            if not missing or time.monotonic() > deadline:
                return missing
            await asyncio.sleep(LOOK_AGAIN)


# Clients are told the class, and know one.
Supervised.__name__ = Scheduler.__name__


async def end_the_stuck(pids: Collection[int]) -> None:
    """Has the supervisor restart the workers that are still the processes they were."""
    known = await control.state()
    for worker in [] if known is None else known["workers"]:
        if worker["pid"] in pids:
            await control.restart(worker["name"])


def dashboard_link(scheduler: Scheduler, prefix: str) -> str:
    """Where a browser finds the dashboard."""
    host, port = get_address_host(scheduler.address), internals.dashboard_port(scheduler)
    host = f"[{host}]" if ":" in host else host
    plain = f"http://{host}:{port}/"
    try:
        link = cast(str, format_dashboard_link(host, port))
    except KeyError:
        # The user's `distributed.dashboard.link` names a variable that is not set.
        link = plain + "status"
    # The default link knows no prefix.
    known = prefix.strip("/") and link == plain + "status"
    return f"{plain}{prefix.strip('/')}/status" if known else link


def adapt(limits: tuple[int, int] | None, scheduler: Scheduler) -> asyncio.Future[None]:
    """A task that keeps the number of workers within the limits, or does nothing for None."""
    if limits is None:
        return asyncio.get_running_loop().create_future()
    from cuda_cluster_dask.adaptive import Adaptive

    return asyncio.create_task(Adaptive(scheduler, *limits).follow())


def _write_client_environment(settings: SchedulerSettings, address: str) -> None:
    """Writes what a shell evaluates so that `Client()` finds this scheduler and speaks as it does."""
    variables = {**settings["client_env"], "DASK_SCHEDULER_ADDRESS": address}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    with open(settings["client_file"], "w") as file:
        file.writelines(lines)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _make_room() -> None:
    """As `dask scheduler` does: fewer collections, and as many connections as are allowed."""
    thresholds = gc.get_threshold()  # distributed#1653
    gc.set_threshold(*(3 * threshold for threshold in thresholds))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard // 2), hard))
