"""Dask's configuration, as far as it is read here.

*Invariant:* a value of a wrong type is a TypeError that names its key.
"""

from __future__ import annotations

from typing import Any

import dask

from cuda_cluster import accepted

#: What is read, and what it takes.
KINDS = {
    "scheduler-address": accepted.TEXT,
    "cudf-spill-warning": accepted.SWITCH,
    "distributed.comm.native.secret-file": accepted.PATH,
    "distributed.comm.native.lane": accepted.TEXT,
    "distributed.comm.native.devices": accepted.SWITCH,
    "distributed.comm.native.keep-memory": accepted.SIZE,
    "distributed.comm.timeouts.tcp": accepted.SPAN,
    "distributed.comm.timeouts.connect": accepted.SPAN,
    "distributed.comm.socket-backlog": accepted.WHOLE,
    "distributed.worker.memory.terminate": accepted.SHARE,
}


def setting(key: str, default: Any = None) -> Any:
    """What Dask is configured with; None where that is said."""
    value = dask.config.get(key, default=default)
    return None if value is None else KINDS[key].take(key, value)
