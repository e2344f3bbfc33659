"""Asks workers of other machines what comes to them, for `cuda-cluster verify`: the scheduler does, over the
connections that Dask has with its workers. So there is no other port and no other secret. Over the same socket
the scheduler says what its tasks wait for (`queued.py`, for `why`) and what they do (`tasks.py`, for the page).

*Invariant:* who answers is the worker at that address; what it does not say is not said here.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

from distributed import Scheduler

from cuda_cluster_dask import joined, measure, queued, tasks
from cuda_cluster_dask.internals import send_recv
from cuda_cluster_fork.failure import describe

#: The name of the scheduler's socket (`cluster::dask::client`).
SOCKET = "between"

#: What it means that nothing answers a question: Dask's workers take what they do not know for done.
STRANGER = "{} cannot be asked to measure: it is no worker of cuda-cluster's, or of an older one"


async def listen(scheduler: Scheduler) -> str | None:
    """Answers questions from now on; returns why that is not possible, or None."""
    return await measure.serve(functools.partial(_answer, scheduler), SOCKET)


async def _answer(scheduler: Scheduler, ask: str, at: str = "", name: str = "", **question: Any) -> Any:
    """Where the scheduler is, what its tasks do or wait for, or what the worker called `name` says, which is at `at`."""
    if ask == "machine":
        return {"machine": joined.machine(), "host": socket.gethostname()}
    if ask == "queued":
        return {"queued": queued.told(scheduler)}
    if ask == "tasks":
        return tasks.told(scheduler)
    try:
        comm = await scheduler.rpc.connect(at)
        try:
            answer = await send_recv(comm, op=measure.ASKED, ask=ask, **question)
        finally:
            scheduler.rpc.reuse(at, comm)
    except Exception as error:
        return {"error": f"{name} cannot be asked to measure: {describe(error)}"}
    return answer if isinstance(answer, dict) else {"error": STRANGER.format(name)}
