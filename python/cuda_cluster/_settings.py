"""Dask's configuration, as far as it is read here.

*Invariant:* a value of a wrong type is a TypeError, and one that means nothing a ValueError, that names
its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta

from cuda_cluster import accepted

#: How large frames of `native://` may travel.
LANES = ("auto", "mapped", "copied", "socket", "ucx")


def _lane(value: Any) -> str:
    lane: str = accepted.TEXT.plain(value)
    if lane not in LANES:
        raise ValueError(f"must be {', '.join(LANES[:-1])} or {LANES[-1]}")
    return lane


def _read_by(read: Callable[[Any], Any], kind: accepted.Kind) -> accepted.Kind:
    """The same kind, whose values Dask must be able to read."""

    def plain(value: Any) -> Any:
        value = kind.plain(value)
        try:
            read(value)
        except (ValueError, KeyError):
            raise ValueError(f"must be {kind.words}") from None
        return value

    return accepted.Kind(kind.words, plain)


SIZE = _read_by(parse_bytes, accepted.SIZE)
SPAN = _read_by(parse_timedelta, accepted.SPAN)

#: What is read, and what it takes.
KINDS = {
    "scheduler-address": accepted.TEXT,
    "cudf-spill-warning": accepted.SWITCH,
    "distributed.comm.native.secret-file": accepted.PATH,
    "distributed.comm.native.lane": accepted.Kind("a text", _lane),
    "distributed.comm.native.devices": accepted.SWITCH,
    "distributed.comm.native.keep-memory": SIZE,
    "distributed.comm.timeouts.tcp": SPAN,
    "distributed.comm.timeouts.connect": SPAN,
    "distributed.comm.socket-backlog": accepted.WHOLE,
    "distributed.worker.memory.terminate": accepted.SHARE,
}


def setting(key: str, default: Any = None) -> Any:
    """What Dask is configured with; None where that is said."""
    value = dask.config.get(key, default=default)
    return None if value is None else KINDS[key].take(key, value)


def check() -> None:
    """Takes every setting of `native://`, so that a wrong one is told before anything needs it."""
    for key in KINDS:
        if key.startswith("distributed.comm.native."):
            setting(key)
