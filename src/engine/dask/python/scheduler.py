"""The scheduler."""

import asyncio
import gc
import resource
import shutil

from distributed import Scheduler

from cuda_cluster_dask import ports, process


async def serve(settings, status):
    """Runs a scheduler until it is asked to end, or closes itself; returns the exit status."""
    asked = asyncio.create_task(process.stop_asked())
    _make_room()
    port = ports.free(settings, settings["ports"], settings["ports_required"])
    status.step(f"listening on port {port}" if port else "listening on any free port")
    first, *copies = settings["scheduler_files"]
    async with Scheduler(
        protocol=settings["protocol"],
        host=settings["host"],
        interface=settings["interface"],
        port=port,
        security=process.security(settings["tls"], "scheduler"),
        dashboard=settings["dashboard"],
        dashboard_address=settings["dashboard_address"],
        http_prefix=settings["dashboard_prefix"],
        scheduler_file=first,
    ) as scheduler:
        for copy in copies:
            shutil.copyfile(first, copy)
        status.ready(scheduler.address)
        ended = asyncio.create_task(scheduler.finished())
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await scheduler.close(reason="asked to end")
        else:
            status.leaving("end_cluster", "a client shut the cluster down, or nobody used it")
    return 0


def _make_room():
    """As `dask scheduler` does: fewer collections, and as many connections as are allowed."""
    thresholds = gc.get_threshold()  # distributed#1653
    gc.set_threshold(*(3 * threshold for threshold in thresholds))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard // 2), hard))
