"""Gives up retirements that get no further.

A worker whose data no other can take, because they cannot be pickled or have no room there, is asked for
them again and again. It would rest for ever between work and its end, and who scales would wait for it.

*Invariant:* a retirement that goes on moves something within `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import logging
import time

from distributed import Scheduler

from cuda_cluster_dask.internals import RetireWorker

logger = logging.getLogger("distributed.scheduler")

LOOK = 1  # Seconds.
PATIENCE = 30  # Seconds: one object after the other, and large ones take long.


class Retirements:
    """How far each of them is: how many objects only its worker has, and since when."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def stuck(self, left: dict[str, int], now: float) -> list[str]:
        """Takes what is left to be moved from each worker; returns those where it did not get less for too
        long."""
        for address, count in left.items():
            before = self._seen.get(address)
            if before is None or count < before[0]:
                self._seen[address] = (count, now)
        self._seen = {address: seen for address, seen in self._seen.items() if address in left}
        return [address for address, (_, since) in self._seen.items() if now - since > PATIENCE]


async def watch(scheduler: Scheduler) -> None:
    """Watches over the retirements of a scheduler until it ends."""
    known = Retirements()
    while True:
        await asyncio.sleep(LOOK)
        manager = scheduler.extensions["amm"]
        running = {one.address: one for one in manager.policies if isinstance(one, RetireWorker)}
        left = {address: only_there(scheduler, address) for address in running}
        for address in known.stuck(left, time.monotonic()):
            logger.warning(
                "%s is not retired: none of %d objects that only it has could be moved for %d s",
                address,
                left[address],
                PATIENCE,
            )
            # As the policy does itself where nobody has room.
            running[address].no_recipients = True
            manager.policies.discard(running[address])


def only_there(scheduler: Scheduler, address: str) -> int:
    """How many objects no other worker has."""
    worker = scheduler.workers.get(address)
    return 0 if worker is None else sum(len(task.who_has or ()) == 1 for task in worker.has_what)
