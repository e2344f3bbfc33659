"""As many workers as the work needs: the scheduler's own estimate, between two limits.

The estimate and the patience before a worker goes are `distributed`'s, with its configuration
(`distributed.adaptive.interval`, `wait-count`, `target-duration`). A worker that goes is retired
by the scheduler, its data moved to others; one that comes is started by the supervisor.

*Invariant:* a worker leaves only by being retired, so no result is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Set
from typing import cast

import dask
from dask.utils import parse_timedelta
from distributed import Scheduler

from cuda_cluster_dask import control
from cuda_cluster_dask.internals import AdaptiveCore

logger = logging.getLogger("distributed.adaptive")

# Phases of a worker that the supervisor has not given up.
RUNNING = ("waiting", "starting", "ready", "unresponsive", "restarting")


class Adaptive(AdaptiveCore):
    """Decides for one scheduler, by the workers' names."""

    plan: Set[str] = frozenset()
    requested: Set[str] = frozenset()
    observed: Set[str] = frozenset()

    def __init__(self, scheduler: Scheduler, minimum: int, maximum: int) -> None:
        wait_count = dask.config.get("distributed.adaptive.wait-count")
        super().__init__(minimum=minimum, maximum=maximum, wait_count=wait_count)
        self.scheduler = scheduler
        self.stopped: list[str] = []

    async def follow(self) -> None:
        """Looks and acts for ever."""
        interval = parse_timedelta(dask.config.get("distributed.adaptive.interval"), "ms")
        while True:
            await asyncio.sleep(interval)
            state = await control.state()
            if state is None or state["state"] not in ("ready", "degraded"):
                continue  # What is being started counts when it is there.
            self.look(state["workers"])
            await self.adapt()

    def look(self, workers: list[control.Process]) -> None:
        """Takes note of the workers that there are."""
        self.plan = self.requested = {w["name"] for w in workers if w["state"] in RUNNING}
        self.observed = {w.name for w in self.scheduler.workers.values()} & self.plan
        self.stopped = [w["name"] for w in workers if w["state"] == "stopped"]

    async def target(self) -> int:
        return cast(int, self.scheduler.adaptive_target())

    async def workers_to_close(self, target: int) -> list[str]:
        asked = {"target": target, "minimum": self.minimum, "attribute": "name"}
        return cast(list[str], self.scheduler.workers_to_close(**asked))

    async def scale_up(self, n: int) -> None:
        new = self.stopped[: n - len(self.plan)]
        logger.info("Starting %s: %d workers are needed", ", ".join(new), n)
        await asyncio.gather(*map(control.restart, new))

    async def scale_down(self, workers: Iterable[str]) -> None:
        logger.info("Retiring %s: they are not needed", ", ".join(sorted(workers)))
        await self.scheduler.retire_workers(names=workers, remove=True, close_workers=True)
