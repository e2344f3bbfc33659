"""Asks the supervisor over the run directory's socket: HTTP, as `supervise::control` speaks it.

Without a supervisor (a process started by hand) nobody answers, which is None.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TypedDict, cast

RUN_DIRECTORY = "CUDA_CLUSTER_RUN_DIR"
PROCESS = "CUDA_CLUSTER_PROCESS"
PATIENCE = 5  # Seconds; the supervisor answers within milliseconds.
LOOKS, LOOK_AGAIN = 20, 0.05  # Seconds.


class Gpu(TypedDict):
    """What is read here of a process's GPU."""

    index: int
    pci: str | None


class Process(TypedDict):
    """What is read here of a process's state."""

    name: str
    state: str
    pid: int | None
    address: str | None
    gpu: Gpu | None
    cpus: str | None
    mems: str | None


class State(TypedDict):
    """What is read here of a cluster's state; without a scheduler, that is elsewhere."""

    name: str
    state: str
    scheduler: Process | None
    workers: list[Process]


class PlannedWorker(TypedDict):
    """What is read here of a worker's plan."""

    name: str
    nics: list[str]


class Plan(TypedDict):
    """What is read here of a cluster's plan."""

    workers: list[PlannedWorker]


async def state() -> State | None:
    """The cluster's state, as `ps -o json` shows it, or None."""
    answer = await _ask("GET", "/v1/state")
    return None if answer is None else cast(State, json.loads(answer))


async def plan() -> Plan | None:
    """The cluster's plan, or None."""
    answer = await _ask("GET", "/v1/plan")
    return None if answer is None else cast(Plan, json.loads(answer))


async def restart(process: str) -> None:
    """Has a process started, or started again."""
    await _ask("POST", f"/v1/restart/{process}")


async def has_been_ready() -> bool:
    """Whether the whole cluster has started before; False when nobody knows."""
    known = await state()
    return known is not None and known["state"] not in ("starting", "verifying")


async def others_are_ready() -> bool:
    """Whether another worker of the cluster is READY; False when nobody knows."""
    own, known = os.environ.get(PROCESS, ""), await state()
    return known is not None and any(
        one["state"] == "ready" and one["name"] != own for one in known["workers"]
    )


async def is_starting() -> bool:
    """Whether the whole cluster starts for the first time; False when nobody knows."""
    known = await state()
    return known is not None and known["state"] == "starting"


async def leaving_together(own: str) -> list[str] | None:
    """Addresses of the workers that end together with this one, whose address is `own`, while others
    go on; none if no others go on, or nobody knows. None if this worker was to go on, too."""
    name = os.environ.get(PROCESS, "")
    known = None
    for _ in range(LOOKS):
        known = await state()
        if known is None:
            return []
        phases = {one["name"]: one["state"] for one in known["workers"]}
        if phases.get(name) == "stopping":
            break
        # Slurm signals every process at once: the supervisor is about to know.
        await asyncio.sleep(LOOK_AGAIN)
    else:
        if known is None or known["state"] != "stopping":
            return None
    assert known is not None
    # Where there is no scheduler here, it is elsewhere, and so are workers that go on.
    scheduler = known["scheduler"]
    if scheduler is not None and (known["state"] == "stopping" or scheduler["state"] != "ready"):
        return []
    stopping = {one["address"] for one in known["workers"] if one["state"] == "stopping"}
    return sorted({at for at in stopping if at is not None} | {own})


async def _ask(method: str, path: str) -> bytes | None:
    directory = os.environ.get(RUN_DIRECTORY)
    if directory is None:
        return None
    try:
        return await asyncio.wait_for(_exchange(f"{directory}/control.sock", method, path), PATIENCE)
    except (OSError, ValueError, asyncio.TimeoutError):
        return None


async def _exchange(socket: str, method: str, path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        request = f"{method} {path} HTTP/1.1\r\nHost: cluster\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        if not head.split(b" ")[1].startswith(b"2"):
            raise ValueError(head.decode())
        return body
    finally:
        writer.close()
