"""The scheduler."""

import asyncio
import atexit
import contextlib
import gc
import os
import resource
import shlex
import shutil

from distributed import Scheduler

from cuda_cluster_dask import ports, process
from cuda_cluster_dask.failure import StartFailure


async def serve(settings, status):
    """Runs a scheduler until it is asked to end, or closes itself; returns the exit status."""
    asked = asyncio.create_task(process.stop_asked())
    _make_room()
    first, *copies = settings["scheduler_files"]
    async with await start(settings, status, first) as scheduler:
        for copy in copies:
            shutil.copyfile(first, copy)
            atexit.register(_remove, copy)
        _write_client_environment(settings, scheduler.address)
        status.ready(scheduler.address)
        ended = asyncio.create_task(scheduler.finished())
        adapting = adapt(settings["adapt"], scheduler)
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        adapting.cancel()
        if asked.done():
            await scheduler.close(reason="asked to end")
        else:
            status.leaving("end_cluster", "a client shut the cluster down, or nobody used it")
    return 0


async def start(settings, status, file):
    """Starts a scheduler that writes its address to `file`."""
    for _ in range(5):
        port = ports.free(settings, settings["ports"], settings["ports_required"])
        status.step(f"listening on port {port}" if port else "listening on any free port")
        try:
            return await Scheduler(
                protocol=settings["protocol"],
                host=settings["host"],
                interface=settings["interface"],
                port=port,
                security=process.security(settings["tls"], "scheduler"),
                dashboard=settings["dashboard"],
                dashboard_address=settings["dashboard_address"],
                http_prefix=settings["dashboard_prefix"],
                scheduler_file=file,
            )
        except RuntimeError:
            if port == 0 or ports.free(settings, (port, port), required=False) == port:
                raise
            # Somebody took the port between the look and the listening.
    raise StartFailure("other programs take every port a moment before this one")


def adapt(limits, scheduler):
    """A task that keeps the number of workers within the limits, or does nothing for None."""
    if limits is None:
        return asyncio.get_running_loop().create_future()
    from cuda_cluster_dask.adaptive import Adaptive

    return asyncio.create_task(Adaptive(scheduler, *limits).follow())


def _write_client_environment(settings, address):
    """Writes what a shell evaluates so that `Client()` finds this scheduler and speaks as it does."""
    variables = {**settings["client_env"], "DASK_SCHEDULER_ADDRESS": address}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    with open(settings["client_file"], "w") as file:
        file.writelines(lines)


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _make_room():
    """As `dask scheduler` does: fewer collections, and as many connections as are allowed."""
    thresholds = gc.get_threshold()  # distributed#1653
    gc.set_threshold(*(3 * threshold for threshold in thresholds))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard // 2), hard))
