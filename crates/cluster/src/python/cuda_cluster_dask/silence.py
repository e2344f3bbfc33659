"""Notices hosts that have fallen silent although their kernels still answer: all of their processes are
stopped, frozen, or without memory. No connection breaks then, and Dask's own limit for a silent worker
(`distributed.scheduler.worker-ttl`, 5 minutes) is as long as it is because one that holds the interpreter's
lock is silent, too. All workers of a host seldom do that at the same time; so where there are several, a
fifth of that limit is enough.

*Invariant:* time in which the scheduler itself was stopped is nobody's silence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Scheduler

from cuda_cluster_dask import joined

logger = logging.getLogger("distributed.scheduler")

LOOK = 1.0  # Seconds.
SHARE = 5  # Of Dask's limit.


class Silence:
    """For how long nothing was heard of a host, of each by the last heartbeats of its workers."""

    def __init__(self) -> None:
        self._heard: dict[Hashable, dict[str, float]] = {}
        self._silent: dict[Hashable, float] = {}
        self._looked: float | None = None

    def longer_than(
        self, limit: float, heard: Mapping[Hashable, dict[str, float]], now: float
    ) -> list[Hashable]:
        """The hosts of several workers, none of which has been heard of for so many seconds."""
        passed = 0 if self._looked is None else min(now - self._looked, 2 * LOOK)
        self._looked = now
        self._silent = {
            host: self._silent.get(host, 0) + passed if times == self._heard.get(host) else 0
            for host, times in heard.items()
        }
        self._heard = {host: dict(times) for host, times in heard.items()}
        return [host for host, silent in self._silent.items() if len(heard[host]) > 1 and silent >= limit]


async def watch(scheduler: Scheduler) -> None:
    """Removes the workers of silent hosts until the scheduler ends. They come back when they can."""
    ttl = parse_timedelta(dask.config.get("distributed.scheduler.worker-ttl"))
    if not ttl:
        return
    limit, known = ttl / SHARE, Silence()
    while True:
        await asyncio.sleep(LOOK)
        hosts = by_host(scheduler.workers.values())
        for host in known.longer_than(limit, hosts, time.monotonic()):
            logger.warning("no worker of %s was heard of for %.0f s: %s", host, limit, ", ".join(hosts[host]))
            for address in hosts[host]:
                await scheduler.remove_worker(address, stimulus_id=f"{joined.SILENT}-{time.time()}")


def by_host(workers: Any) -> dict[Hashable, dict[str, float]]:
    """When each worker that has joined was last heard of; those of one `up` are together."""
    hosts: dict[Hashable, dict[str, float]] = defaultdict(dict)
    for worker in workers:
        said = worker.extra.get(joined.KEY)
        if isinstance(said, dict):
            hosts[worker.host, said.get("host"), said.get("cluster")][worker.address] = worker.last_seen
    return hosts
