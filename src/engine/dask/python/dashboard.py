"""A worker's dashboard, which is loaded when somebody opens it.

Bokeh takes longer to import than all the rest of a worker, and most workers' pages are never seen.

*Invariant:* the pages are where `distributed` has them.
"""

import asyncio
import importlib

from tornado import web

PAGES = "status|counters|system|profile|profile-server"


def offer(worker, prefix):
    """Answers for the dashboard of a worker that is started, until it is there."""
    prefix = "/" + prefix.strip("/") if prefix else ""
    prefix = "" if prefix == "/" else prefix
    known = {"load": Load(worker, prefix)}
    pages = web.Application([(rf"{prefix}/({PAGES})", Page, known)])
    known["load"].stands_for = pages
    worker.http_application.add_application(pages)


class Load:
    """Loads the dashboard, once."""

    stands_for = None

    def __init__(self, worker, prefix):
        self._worker, self._prefix = worker, prefix
        self._lock = asyncio.Lock()

    async def __call__(self):
        async with self._lock:
            application = self._worker.http_application
            if self.stands_for not in application.applications:
                return
            module = await asyncio.to_thread(importlib.import_module, "distributed.dashboard.worker")
            module.connect(application, self._worker.http_server, self._worker, prefix=self._prefix)
            application.applications.remove(self.stands_for)


class Page(web.RequestHandler):
    """Stands for a page of the dashboard."""

    def initialize(self, load):
        self._load = load

    async def get(self, page):
        try:
            await self._load()
        except ImportError as error:
            self.set_status(501)
            self.finish(f"There is no dashboard without Bokeh: {error}. To install: pip install bokeh")
            return
        # Relative, as a proxy may stand before it.
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect(page + query)
