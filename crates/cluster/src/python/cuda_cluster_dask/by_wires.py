"""Has a scheduler place tasks by the wires between its workers, as far as these differ.

It is a plugin of the scheduler: it learns which workers there are, and what they report of their transfers
and measurements with their heartbeats. What is decided otherwise then is in `hooks.py`, and how in
`wires.py`.

*Invariant:* a scheduler whose wires are alike, or whose Dask is not known, is as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import dask
import distributed
from distributed import Scheduler, SchedulerPlugin

from cuda_cluster_dask import hooks
from cuda_cluster_dask.wires import METRIC, Table, Wires, is_rate

logger = logging.getLogger("distributed.scheduler")

#: Where Dask's configuration switches it on and off (`DASK_CUDA_CLUSTER__PLACE_BY_WIRES=true`): it goes before
#: what the plan says.
KEY = "cuda-cluster.place-by-wires"

#: Seconds between two looks at what workers report; they do so every half second at most.
LOOK_AGAIN = 0.5


class ByWires(SchedulerPlugin):
    """Learns the wires, and puts the hooks in while they differ."""

    name = "cuda-cluster-by-wires"

    def __init__(self, scheduler: Scheduler, gb_per_s: Mapping[str, Mapping[str, float]]) -> None:
        self.scheduler = scheduler
        planned = {one: {to: rate * 1e9 for to, rate in row.items()} for one, row in gb_per_s.items()}
        self.wires = Wires(planned)
        self.hooks = hooks.Hooks(scheduler, Table())
        #: The report of each worker that was read last.
        self._read: dict[str, object] = {}
        self._due: asyncio.TimerHandle | None = None

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._look_soon()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        self._read.pop(worker, None)
        self._look_soon()

    async def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self.hooks.take()

    def _look_soon(self) -> None:
        # Of many that come at once, all are seen together.
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(0.02, self._decide)

    async def follow(self) -> None:
        """Reads reports until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            if self.read():
                self._decide()

    def read(self) -> bool:
        """Reads what workers have reported since the last time; returns whether there was anything."""
        any_news = False
        for address, ws in self.scheduler.workers.items():
            if ws.metrics and ws.metrics is not self._read.get(address):
                self._read[address] = ws.metrics
                any_news |= self._learn(str(ws.name), ws.metrics)
        return any_news

    def _learn(self, receiver: str, metrics: Mapping[str, Any]) -> bool:
        workers, any_news = self.scheduler.workers, False
        # Sums of rates, and how many: other processes say so.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            for address, (rates, count) in metrics["bandwidth"]["workers"].items():
                if address in workers and count > 0:
                    self.wires.learn(str(workers[address].name), receiver, rates / count, count)
                    any_news = True
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            for address, rate in metrics[METRIC].items():
                if address in workers and is_rate(rate):
                    self.wires.measure(str(workers[address].name), receiver, rate)
                    any_news = True
        return any_news

    def _decide(self) -> None:
        """Puts the hooks in, or takes them away, by what is known now."""
        self._due = None
        names = {str(ws.name): ws for ws in self.scheduler.workers.values()}
        table = Table.of(self.wires.rates(), names)
        self.hooks.know(table)
        if table.differ and not self.hooks.there:
            logger.info("Tasks are placed by the wires between workers, which differ")
            self.hooks.put()
        elif not table.differ and self.hooks.there:
            if table.seconds:
                logger.info("Tasks are placed as Dask does: the wires between workers are alike")
            self.hooks.take()


def add(
    scheduler: Scheduler, gb_per_s: Mapping[str, Mapping[str, float]], asked: bool
) -> asyncio.Task[None] | None:
    """Has a scheduler place tasks by wires, if that is asked for or Dask's configuration says so; returns
    what is to be cancelled when it ends. None, and a line in its log, if this Dask does not allow it."""
    said = dask.config.get(KEY, default=None)
    if not (asked if said is None else said is True):
        return None
    reason = hooks.strange(scheduler)
    if reason is not None:
        logger.warning(
            "Tasks are placed as Dask %s does, not by the wires between workers: %s "
            "(known are the releases from %s to %s)",
            distributed.__version__,
            reason,
            *hooks.READ,
        )
        return None
    plugin = ByWires(scheduler, gb_per_s)
    scheduler.add_plugin(plugin)
    return asyncio.create_task(plugin.follow())
