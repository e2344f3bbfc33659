"""What Dask's tasks do, for the page and for `why`: counts that the scheduler has anyway.

*Invariant:* no task is looked at, however many there are.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from distributed import Scheduler

from cuda_cluster_dask import joined

#: The heartbeats' word for the bytes that a worker has sent, to workers and to clients.
SENT = "cuda_cluster_sent_bytes"

#: Most prefixes of tasks that are told.
MOST = 16

#: What tasks of a state wait for (`wire::tasks::Wait` in Rust).
WAITS = {"waiting": "input", "no-worker": "able_worker", "queued": "room"}


def told(scheduler: Scheduler) -> dict[str, Any]:
    """Counts by prefix, by what tasks wait for, and by worker (`cluster::dask::Tasks` in Rust)."""
    functions = sorted(map(_function, scheduler.task_prefixes.values()), key=_tasks, reverse=True)
    waiting = [
        {"wait": wait, "tasks": waits, "examples": []}
        for state, wait in WAITS.items()
        if (waits := count(scheduler, state))
    ]
    return {
        "functions": [function for function in functions[:MOST] if _tasks(function)],
        "waiting": waiting,
        "workers": [_worker(worker) for worker in scheduler.workers.values()],
        "has_pages": importlib.util.find_spec("bokeh") is not None,
    }


def count(scheduler: Scheduler, state: str) -> int:
    """Tasks in a state."""
    return sum(prefix.states.get(state, 0) for prefix in scheduler.task_prefixes.values())


def _tasks(function: dict[str, Any]) -> int:
    return int(function["runs"] + function["active"] + function["failed"])


def _function(prefix: Any) -> dict[str, Any]:
    """A prefix as the native engine tells of a function (`wire::tasks::FunctionOverview`)."""
    states, ever = prefix.states, prefix.state_counts
    seconds = prefix.duration_average
    return {
        "name": prefix.name,
        "runs": ever.get("memory", 0),
        "active": states.get("processing", 0) + sum(states.get(state, 0) for state in WAITS),
        "sent": states.get("processing", 0),
        "failed": ever.get("erred", 0),
        "seconds": seconds if seconds >= 0 else None,
    }


def _worker(worker: Any) -> dict[str, Any]:
    transfer = worker.metrics.get("transfer", {})
    return {
        "name": str(worker.name),
        # On another machine its number may be another process's.
        "pid": None if joined.KEY in worker.extra else worker.pid,
        "processing": len(worker.processing),
        "kept": len(worker.has_what),
        "transfers": transfer.get("incoming_count_total", 0),
        "incoming_bytes": transfer.get("incoming_bytes", 0),
        # None of one that is not ours, or of an older version.
        "sent_bytes": worker.metrics.get(SENT),
    }
