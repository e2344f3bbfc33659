"""Which workers a cluster has, and more or fewer of them.

*Invariant:* a name of Dask's is that of one process of the plan, from the start to the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import dask
from distributed import Status

from cuda_cluster import accepted
from cuda_cluster import cluster as core
from cuda_cluster._internals import Cluster, NoOpAwaitable
from cuda_cluster.dask import views
from cuda_cluster.dask.views import Name
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState, Plan

logger = logging.getLogger("distributed.deploy.cuda_cluster")

#: The status of a worker that hands its data over before it ends.
RETIRING = Status.closing_gracefully.name

#: States of a worker that nothing starts but a request.
NOT_RUNNING = ("stopped", "failed")


class Scaled(Cluster):
    """A cluster whose workers are processes that a supervisor starts and ends."""

    _supports_scaling = True

    def _begin_without_workers(self) -> None:
        self._attached: core.Cluster | None = None
        self._state: ClusterState | None = None
        self._planned: Plan | None = None
        #: The workers that are wanted, in the order of their names.
        self._requested: dict[Name, None] = {}
        #: The process of each worker that there may be.
        self._processes: dict[Name, str] = {}
        self._correcting = asyncio.Lock()
        #: How often `scale` was called, and how many of these calls have been carried out.
        self._asked = self._done = 0

    def _map_workers(self) -> None:
        """Maps Dask's names to processes, by address; without an address, by the plan."""
        assert self._state is not None and self._planned is not None
        known = self.scheduler_info["workers"]
        processes = {process.name: process for process in self._state.workers}
        for process, name in views.names(self._planned).items():
            address = processes[process].address
            name = known[address]["name"] if address in known else name
            self._processes[name] = process
            if processes[process].state not in NOT_RUNNING:
                self._requested[name] = None

    @property
    def workers(self) -> dict[Name, views.WorkerView]:
        """The requested workers by their names in Dask: the GPUs' indices."""
        return {name: views.WorkerView(self, name) for name in self._requested}

    @property
    def worker_spec(self) -> dict[Name, dict[str, Any]]:
        """The options of each requested worker."""
        workers = self._planned.workers if self._planned else []
        planned = {worker.name: worker for worker in workers}
        return {name: views.spec(planned[self._processes[name]]) for name in self._requested}

    @property
    def cuda_visible_devices(self) -> list[Name]:
        """The GPUs that workers run on, or can be scaled to."""
        return list(self._processes)

    def scale(self, n: int = 0, memory: Any = None, cores: int | None = None) -> Any:
        """Changes the number of workers to `n`. Those that end hand their data to others first.
        Raises ValueError if there are fewer GPUs."""
        n = accepted.WHOLE.take("n", n)
        if n < 0:
            raise ValueError(f"n must not be negative: {n}")
        n = max(n, self._needed(memory, cores))
        if n > len(self._processes):
            raise ValueError("Can not scale beyond visible devices", self.cuda_visible_devices)
        kept = list(self._requested)[:n]
        new = [name for name in self._processes if name not in self._requested]
        self._requested = dict.fromkeys([*kept, *new[: n - len(kept)]])
        self._asked += 1
        self.loop.add_callback(self._try_to_correct, self._asked)
        return NoOpAwaitable() if self.asynchronous else None

    def _needed(self, memory: Any, cores: int | None) -> int:
        """The number of workers with that much in total."""
        needed = 0
        planned = self._planned.workers if self._planned else []
        if memory is not None and planned and planned[0].memory_limit_bytes:
            needed = -(-dask.utils.parse_bytes(memory) // planned[0].memory_limit_bytes)
        if cores is not None and planned and planned[0].threads:
            needed = max(needed, -(-cores // planned[0].threads))
        return int(needed)

    async def _try_to_correct(self, asked: int) -> None:
        """The same as `_correct` for a call of `scale`, and for nobody who waits. A later call may have
        been carried out with an earlier one: then others may have scaled meanwhile."""
        try:
            await self._correct(asked)
        except (OSError, ClusterError) as error:
            # What was asked of a cluster that is being closed is no longer wanted.
            if self.status == Status.running:
                logger.warning("%s could not be scaled: %s", self.name, error)

    async def _correct(self, asked: int | None = None) -> None:
        """Ends and starts workers until those run that are requested."""
        async with self._correcting:
            if asked is not None and asked <= self._done:
                return
            known, running, leaving = await self._running()
            there = running
            while gone := there - self._requested.keys():
                retired = await self.scheduler_comm.retire_workers(
                    names=list(gone), remove=True, close_workers=True
                )
                names = {worker["name"] for worker in retired.values()}
                self._keep(gone & known - names)
                await asyncio.sleep(0.05)
                known, running, leaving = await self._running()
                # Whoever is back, or new, was started by somebody else.
                there = there & running - names
            while leaving & self._requested.keys():
                # Wanted again while it hands its data over: it ends, or the scheduler keeps it.
                await asyncio.sleep(0.05)
                known, running, leaving = await self._running()
            assert self._attached is not None
            carried_out = self._asked
            for name in self._requested.keys() - running:
                await asyncio.to_thread(self._attached.restart, self._processes[name])
            self._done = carried_out

    def _keep(self, refused: set[Name]) -> None:
        """Counts workers as wanted that the scheduler does not retire."""
        if refused:
            names = ", ".join(sorted(map(str, refused)))
            logger.warning(
                "%s keeps %s: the scheduler retires no worker whose data no other takes", self.name, names
            )
            self._requested |= dict.fromkeys(refused)

    async def _running(self) -> tuple[set[Name], set[Name], set[Name]]:
        """The workers that the scheduler knows, those that run or start (not those that it has removed,
        which are ending), and those that it is retiring."""
        assert self._attached is not None
        state = await asyncio.to_thread(self._attached.state)
        phases = {process.name: process.state for process in state.workers}
        identity = await self.scheduler_comm.identity(n_workers=-1)
        workers = identity["workers"].values()
        known = {worker["name"] for worker in workers}
        leaving = {worker["name"] for worker in workers if worker["status"] == RETIRING}
        ended = {name for name, one in self._processes.items() if phases[one] in NOT_RUNNING}
        ending = {name for name, one in self._processes.items() if phases[one] == "ready"} - known
        return known, self._processes.keys() - ended - ending, leaving

    async def scale_down(self, workers: Iterable[Name]) -> None:
        """Ends workers that `adapt` doesn't need."""
        for name in workers:
            self._requested.pop(name, None)
        await self._correct()

    def adapt(self, *args: Any, minimum: int = 0, maximum: Any = None, **kwargs: Any) -> Any:
        """Adapts the number of workers to the work, between two limits."""
        most = len(self._processes)
        maximum = most if maximum is None else min(maximum, most)
        return super().adapt(*args, minimum=minimum, maximum=maximum, **kwargs)
