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

#: How large frames of `direct://` may travel.
ROUTES = ("auto", "mapped", "copied", "socket", "ucx")


def _route(value: Any) -> str:
    route: str = accepted.TEXT.plain(value)
    if route not in ROUTES:
        raise ValueError(f"must be {', '.join(ROUTES[:-1])} or {ROUTES[-1]}")
    return route


def _read_by(read: Callable[[Any], Any], kind: accepted.Kind, most: int) -> accepted.Kind:
    """The same kind, whose values Dask must be able to read, and which are not beyond what the system
    can count."""

    def plain(value: Any) -> Any:
        value = kind.plain(value)
        try:
            known = read(value)
        except (ValueError, KeyError, IndexError, OverflowError):
            raise ValueError(f"must be {kind.words}") from None
        if not 0 <= known <= most:
            raise ValueError(f"must be {kind.words}, from 0 to {most}")
        return value

    return accepted.Kind(kind.words, plain)


SIZE = _read_by(parse_bytes, accepted.SIZE, 2**63 - 1)
#: In seconds. Thirty years are as good as for ever.
SPAN = _read_by(parse_timedelta, accepted.SPAN, 10**9)

#: What is read, and what it takes.
KINDS = {
    "scheduler-address": accepted.TEXT,
    "cudf-spill-warning": accepted.SWITCH,
    "distributed.comm.direct.secret-file": accepted.PATH,
    "distributed.comm.direct.route": accepted.Kind("a text", _route),
    "distributed.comm.direct.devices": accepted.SWITCH,
    "distributed.comm.direct.keep-memory": SIZE,
    "distributed.comm.timeouts.tcp": SPAN,
    "distributed.comm.timeouts.connect": SPAN,
    "distributed.comm.socket-backlog": _read_by(int, accepted.WHOLE, 2**31 - 1),
    "distributed.worker.memory.terminate": accepted.SHARE,
}

#: What Dask has a value for unless somebody takes it away.
NEEDED = {
    "distributed.comm.timeouts.tcp",
    "distributed.comm.timeouts.connect",
    "distributed.comm.socket-backlog",
}


def setting(key: str, default: Any = None) -> Any:
    """What Dask is configured with; where it is None, the default."""
    value = dask.config.get(key, default=None)
    if value is None and key not in NEEDED:
        return default
    return KINDS[key].take(key, value)


def check() -> None:
    """Takes every setting of communication, so that a wrong one is told before anything needs it."""
    for key in KINDS:
        if key.startswith("distributed.comm."):
            setting(key)
