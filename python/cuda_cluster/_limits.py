"""How much memory ``direct://`` holds for later messages, of what Dask lets a worker have, and how much a
worker asks another for at once.

What is held counts as memory of the process, by which Dask decides when a worker spills, pauses, and is
ended. So a worker holds a share of its limit, and nothing once the process has as much as the lowest of
Dask's thresholds: none of them is reached because of memory that nobody uses.

*Invariant:* the limits of all workers of a process hold, as they are now.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from dask.utils import parse_bytes
from distributed import Status
from tornado.ioloop import PeriodicCallback

from cuda_cluster import _beforehand
from cuda_cluster._internals import MEMORY_LIMIT, WorkerMemoryManager
from cuda_cluster._settings import setting

#: Of the memory limit of a worker, or of the machine's memory: at most this is held.
SHARE = 8

#: And at most so many bytes.
MOST = 512 << 20

#: On one machine, a worker asks another for so many bytes at once: that takes as long as Dask's own number
#: over TCP, and each further request a turn of the event loops of both.
AT_ONCE = 300_000_000

#: Dask's own number. Any other was set by somebody, and holds.
DASKS_AT_ONCE = 50_000_000

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


def follow(server: Any, direct: Any, is_loopback: bool) -> None:
    """Heeds the memory limit of a worker, which may change while it runs. One that listens on loopback
    addresses alone has all its peers on this machine, and asks them for more at once; Dask bounds what is
    on its way to a worker by `transfer.memory-fraction` all the same."""
    manager = getattr(server, "memory_manager", None)
    # A nanny's is that of another process.
    if isinstance(manager, WorkerMemoryManager):
        _workers.add(server)
        interval = manager.memory_monitor_interval * 1000
        callback = PeriodicCallback(functools.partial(bound, direct), interval)
        server.periodic_callbacks["direct-memory"] = callback
    bound(direct)
    if isinstance(manager, WorkerMemoryManager):
        if is_loopback and server.state.transfer_message_bytes_limit == DASKS_AT_ONCE:
            server.state.transfer_message_bytes_limit = AT_ONCE
        _beforehand.begin(server, direct, kept=_bounds()[0])


def _bounds() -> tuple[int, int | None]:
    """How many bytes are held at most, and from how many bytes of the whole process on none are."""
    managers = [worker.memory_manager for worker in _workers if worker.status != Status.closed]
    limited = [manager for manager in managers if manager.memory_limit]
    limits = [manager.memory_limit for manager in limited]
    keep = min([MOST, *(limit // SHARE for limit in (MEMORY_LIMIT, *limits))])
    keep = parse_bytes(setting("distributed.comm.direct.keep-memory", keep))
    return keep, min(map(_threshold, limited), default=None)


def _threshold(manager: Any) -> int:
    """The memory of the process at which Dask begins to act, if that is more than at its limit."""
    fractions = (
        manager.memory_target_fraction,
        manager.memory_spill_fraction,
        manager.memory_pause_fraction,
        setting("distributed.worker.memory.terminate"),
    )
    return int(manager.memory_limit * min([one for one in fractions if one], default=1.0))
