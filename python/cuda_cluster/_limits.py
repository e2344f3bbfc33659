"""How much memory ``direct://`` holds for later messages, of what Dask lets a worker have.

What is held counts as memory of the process, by which Dask decides when a worker spills, pauses, and is
ended. So a worker holds a share of its limit, and nothing once the process has as much as the lowest of
Dask's thresholds: none of them is reached because of memory that nobody uses.

*Invariant:* the limits of all workers of a process hold, as they are now.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import psutil  # type: ignore[import-untyped]
from dask.utils import parse_bytes
from distributed import Status
from tornado.ioloop import PeriodicCallback

from cuda_cluster._internals import CPU_COUNT, MEMORY_LIMIT, WorkerMemoryManager
from cuda_cluster._settings import setting

#: Of the memory limit of a worker, or of the machine's memory: at most this is held.
SHARE = 8

#: And at most so many bytes.
MOST = 512 << 20

#: Of the machine's free memory, a worker that starts touches at most this share.
FREE = 32

#: And at most so many bytes for each processor that it may use, which clear the pages: each
#: GiB can take a second.
PER_CPU = 64 << 20

#: The workers of this process that have listened.
_workers: weakref.WeakSet[Any] = weakref.WeakSet()

#: What the Rust part was told last.
_told: tuple[int, int | None] | None = None


def bound(direct: Any) -> None:
    """Tells the Rust part what this process may hold now."""
    global _told
    now = _bounds()
    if now != _told:
        direct.bound_memory(*now)
        _told = now


def follow(server: Any, direct: Any) -> None:
    """Heeds the memory limit of a worker, which may change while it runs."""
    manager = getattr(server, "memory_manager", None)
    # A nanny's is that of another process.
    if isinstance(manager, WorkerMemoryManager):
        _workers.add(server)
        interval = manager.memory_monitor_interval * 1000
        callback = PeriodicCallback(functools.partial(bound, direct), interval)
        server.periodic_callbacks["direct-memory"] = callback
    bound(direct)
    if isinstance(manager, WorkerMemoryManager):
        direct.prepare_memory(_prepared())


def _bounds() -> tuple[int, int | None]:
    """How many bytes are held at most, and from how many bytes of the whole process on none are."""
    managers = [worker.memory_manager for worker in _workers if worker.status != Status.closed]
    limited = [manager for manager in managers if manager.memory_limit]
    limits = [manager.memory_limit for manager in limited]
    keep = min([MOST, *(limit // SHARE for limit in (MEMORY_LIMIT, *limits))])
    keep = parse_bytes(setting("distributed.comm.direct.keep-memory", keep))
    return keep, min(map(_threshold, limited), default=None)


def _prepared() -> int:
    """How many bytes are touched before the first message: half of what may be held, if the machine
    has many times as much, and processors for it."""
    keep, _ = _bounds()
    available: int = psutil.virtual_memory().available
    cpus: int = CPU_COUNT
    return min(keep // 2, available // FREE, PER_CPU * cpus)


def _threshold(manager: Any) -> int:
    """The memory of the process at which Dask begins to act, if that is more than at its limit."""
    fractions = (
        manager.memory_target_fraction,
        manager.memory_spill_fraction,
        manager.memory_pause_fraction,
        setting("distributed.worker.memory.terminate"),
    )
    return int(manager.memory_limit * min([one for one in fractions if one], default=1.0))
