"""Modules that the scheduler loads before it needs them."""

from __future__ import annotations

import asyncio

import dask
from distributed import Scheduler, SchedulerPlugin

from cuda_cluster_dask import imports
from cuda_cluster_fork.failure import StartFailure

#: Dask's configuration for what the client's program has loaded, as `cuda_cluster.dask` finds it.
KEY = "cuda-cluster.imports"


class Meanwhile(SchedulerPlugin):
    """Imports what the client's program has loaded while that makes its first graph, which the scheduler reads,
    and which would wait for it. (A scheduler in the client's own process has it.)

    In the event loop's rounds, not in a thread: Python gives one of two threads that import what imports each
    other a half-made module.
    """

    name = "cuda-cluster-imports"

    def __init__(self) -> None:
        names = dask.config.get(KEY, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise StartFailure(
                f"Dask's configuration '{KEY}' must be a list of modules' names, not {names!r}"
            )
        self._names = iter(names)

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        asyncio.get_running_loop().call_soon(self._load_next, scheduler)

    def _load_next(self, scheduler: Scheduler) -> None:
        # What a graph needs that is being read is imported for it, perhaps by a thread.
        name = next(self._names, None) if scheduler._active_graph_updates == 0 else None
        if name is not None:
            imports.load_what_is_there([name])
            asyncio.get_running_loop().call_soon(self._load_next, scheduler)
