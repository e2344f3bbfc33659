"""Dashboards of the scheduler and of workers, which are loaded when somebody opens them.

Bokeh takes as long to import as all the rest of Dask, and most pages are never seen.

*Invariant:* the pages are where `distributed` has them.
"""

from __future__ import annotations

import asyncio
import importlib

from distributed import Scheduler, Worker
import tornado.web as web

#: The pages of a worker; a scheduler has too many to list.
OF_A_WORKER = "status|counters|system|profile|profile-server"


def of_scheduler(scheduler: Scheduler, prefix: str) -> None:
    """Answers for the dashboard of a scheduler until it is there."""
    _offer(scheduler, "distributed.dashboard.scheduler", r"/.*", prefix)


def of_worker(worker: Worker, prefix: str) -> None:
    """Answers for the dashboard of a worker that is started, until it is there."""
    prefix = "/" + prefix.strip("/") if prefix else ""
    prefix = "" if prefix == "/" else prefix
    _offer(worker, "distributed.dashboard.worker", rf"{prefix}/(?:{OF_A_WORKER})", prefix)


def _offer(server: Scheduler | Worker, module: str, paths: str, prefix: str) -> None:
    load = Load(server, module, prefix)
    load.stands_for = web.Application([(paths, Page, {"load": load})])
    server.http_application.add_application(load.stands_for)


class Load:
    """Loads the dashboard, once."""

    stands_for: web.Application | None = None

    def __init__(self, server: Scheduler | Worker, module: str, prefix: str) -> None:
        self._server, self._module, self._prefix = server, module, prefix
        self._lock = asyncio.Lock()

    async def __call__(self) -> None:
        async with self._lock:
            application = self._server.http_application
            if self.stands_for not in application.applications:
                return
            module = await asyncio.to_thread(importlib.import_module, self._module)
            module.connect(application, self._server.http_server, self._server, prefix=self._prefix)
            application.applications.remove(self.stands_for)


class Page(web.RequestHandler):
    """Stands for a page of the dashboard."""

    def initialize(self, load: Load) -> None:
        self._load = load

    async def get(self) -> None:
        try:
            await self._load()
        except ImportError as error:
            self.set_status(501)
            self.finish(f"There is no dashboard without Bokeh: {error}. To install: pip install bokeh")
            return
        # Relative, as a proxy may stand before it.
        page = self.request.path.rpartition("/")[2] or "./"
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect(page + query)
