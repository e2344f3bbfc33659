"""What this process's worker fetches from others and since when, for `cuda-cluster why`: Dask keeps no times
of that.

*Invariant:* what is told has begun and not ended, and a fetch costs one entry, however many results it has.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Collection, Iterator
from typing import Any, TypedDict

from distributed import Worker

from cuda_cluster_dask.queued import shown

#: The most fetches that are told of, and the most results of one that are looked at.
TOLD, LOOKED_AT = 16, 1000


class Fetching(TypedDict):
    """What comes from another worker in one message (`cluster::dask::Fetching` in Rust)."""

    name: str
    others: int
    source: str
    bytes: int
    millis: int
    tasks: int


#: By a number of each fetch: whose results, which, how many bytes, since when.
_open: dict[int, tuple[str, Collection[Any], int, float]] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def lasts(source: str, keys: Collection[Any], size: int) -> Iterator[None]:
    """While it does, these results come from the worker at an address."""
    number = next(_numbers)
    _open[number] = source, keys, size, time.monotonic()
    try:
        yield
    finally:
        del _open[number]


def told(worker: Worker) -> list[Fetching]:
    """Those that have taken longest first, as a dictionary keeps the order in which they began."""
    now = time.monotonic()
    return [_told(worker, *one, now) for one in itertools.islice(_open.values(), TOLD)]


def _told(
    worker: Worker, source: str, keys: Collection[Any], size: int, since: float, now: float
) -> Fetching:
    tasks = worker.state.tasks
    known = [tasks[key] for key in itertools.islice(keys, LOOKED_AT) if key in tasks]
    largest = max(known, key=lambda one: one.nbytes or 0, default=None)
    return {
        "name": shown(next(iter(keys), "") if largest is None else largest.key),
        "others": max(0, len(keys) - 1),
        "source": source,
        "bytes": size,
        "millis": int((now - since) * 1000),
        "tasks": len({waiting.key for one in known for waiting in one.waiters}),
    }
