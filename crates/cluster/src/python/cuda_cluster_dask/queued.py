"""What the scheduler's tasks wait for, for `cuda-cluster why`: which run, which no worker may run.

*Invariant:* nothing is changed, and an answer takes time by its bounds, not by the number of tasks.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any

from distributed import Scheduler

from cuda_cluster_dask import joined, tasks
from cuda_cluster_dask.internals import monotonic

#: The most tasks that are told of, of all workers together, and of those that no worker may run.
PLACED, HELD = 256, 4

#: So many tasks have those counted that wait for them, and so many of those at most.
WITH_DEPENDENTS, COUNTED = 8, 10_000

#: The longest key that is told.
LONGEST = 80

#: What it means that a worker is given no tasks, by its status.
PAUSED = {
    "paused": "Dask has paused, because its memory is full",
    "closing_gracefully": "ends, and hands its data over",
}


def told(scheduler: Scheduler) -> dict[str, Any]:
    """What the scheduler knows (`cluster::dask::client` in Rust)."""
    now = time.time()
    each = max(1, PLACED // max(1, len(scheduler.workers)))
    placed = [one for ws in scheduler.workers.values() for one in _placed(ws, now, each)]
    placed.sort(key=lambda one: -one[1]["for_ms"] if one[1]["runs"] else 0)
    for task, one in placed[:WITH_DEPENDENTS]:
        count = _dependents(task)
        one["dependents"], one["more"] = count, count >= COUNTED
    held = heapq.nsmallest(
        HELD, itertools.islice(scheduler.unrunnable.items(), COUNTED), key=lambda one: one[1]
    )
    return {
        "waiting": tasks.count(scheduler, "waiting"),
        "ready": tasks.count(scheduler, "queued"),
        "unplaced": len(scheduler.unrunnable),
        "held": [
            {"name": _name(task), "why": _why(scheduler, task), "for_ms": int((monotonic() - since) * 1000)}
            for task, since in held
        ],
        "placed": [one for _, one in placed],
        "paused": [
            {**_worker(ws), "why": PAUSED[ws.status.name]}
            for ws in scheduler.workers.values()
            if ws.status.name in PAUSED
        ],
    }


def _placed(ws: Any, now: float, most: int) -> list[tuple[Any, dict[str, Any]]]:
    """Tasks that a worker has: those that run for longest by its last heartbeat, or else some that
    do not."""
    since = max(0.0, now - ws.last_seen)
    running = heapq.nlargest(most, ws.executing.items(), key=lambda one: one[1])
    found = [
        (task, {**_task(task, ws), "runs": True, "for_ms": int((lasted + since) * 1000)})
        for task, lasted in running
    ]
    waiting = (task for task in ws.processing if task not in ws.executing)
    return found + [
        (task, {**_task(task, ws), "runs": False}) for task in itertools.islice(waiting, 0 if found else 1)
    ]


def _task(task: Any, ws: Any) -> dict[str, Any]:
    return {"name": _name(task), "function": task.prefix.name, **_worker(ws)}


def _worker(ws: Any) -> dict[str, Any]:
    """The process number only of one of this machine's supervisor."""
    return {"rank": str(ws.name), "pid": None if joined.KEY in ws.extra else ws.pid}


def _name(task: Any) -> str:
    return shown(task.key)


def shown(key: Any) -> str:
    """A key as it is told."""
    name = str(key)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _dependents(task: Any) -> int:
    """Tasks that wait for one, directly or not."""
    found: set[Any] = set()
    todo = [task]
    while todo and len(found) < COUNTED:
        for one in todo.pop().dependents:
            if one.state == "waiting" and one not in found:
                found.add(one)
                todo.append(one)
    return min(len(found), COUNTED)


def _why(scheduler: Scheduler, task: Any) -> str:
    """What a task needs that no worker has."""
    there = scheduler.workers
    wanted = [str(there[one].name) if one in there else one for one in sorted(task.worker_restrictions or ())]
    needs = []
    if wanted:
        needs.append(f"it must run on {' or '.join(wanted)}")
    if task.host_restrictions:
        needs.append(f"it must run on the host {' or '.join(sorted(task.host_restrictions))}")
    for name, amount in (task.resource_restrictions or {}).items():
        if not amount:
            any_there = any(name in ws.resources for ws in there.values())
            what = "none of these takes tasks now" if any_there else "there is none"
            needs.append(f"it needs a worker with {name}, and {what}")
            continue
        most = max((ws.resources.get(name, 0) for ws in there.values()), default=0)
        needs.append(f"it needs {name}={amount:g}, and the most is {most:g}")
    if not there:
        needs.append("there is none")
    elif not scheduler.running:
        needs.append("none takes tasks now")
    return ", and ".join(needs) or "none takes it now"
