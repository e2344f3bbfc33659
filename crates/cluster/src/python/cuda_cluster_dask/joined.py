"""Workers of other machines: what they say of themselves when they register, and what the scheduler's
supervisor is told of them.

*Invariant:* a worker of the scheduler's own supervisor is not told of, which knows it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from pathlib import Path
from typing import Any, TypedDict

import distributed
from distributed import Scheduler, SchedulerPlugin

from cuda_cluster_dask import control
from cuda_cluster_dask.status import Status

#: Where it stands in what a worker tells at its registration.
KEY = "cuda_cluster"

#: How the identifier begins with which `silence.py` removes a worker.
SILENT = "cuda-cluster-silent-host"

#: How the identifiers of `Scheduler.remove_worker` begin, with what they mean and whether somebody
#: wished it.
REASONS = {
    "retire-workers": (True, "it was retired"),
    "handle-worker-cleanup": (False, "its connection broke"),
    "check-worker-ttl": (False, "it was silent for longer than distributed.scheduler.worker-ttl"),
    SILENT: (False, "no worker of its host was heard of any more, although its connection stands"),
    "worker-send-comm-fail": (False, "its connection broke"),
    "send-all-comm-fail": (False, "its connection broke"),
    "worker-lifetime": (True, "its lifetime was over"),
    "nanny": (True, "it starts again"),
    "restart": (True, "it was restarted"),
}


class About(TypedDict, total=False):
    """What a worker says of itself (`wire::status::JoinedWorker` in Rust)."""

    host: str
    cluster: str
    process: str
    gpu: int
    pci: str
    cpus: str
    mems: str
    nics: list[str]
    machine: str
    versions: dict[str, str]


def machine() -> str:
    """A name of the network that this process is in, which no other has while it is there: hosts may
    share a name, and networks a kernel. It tells nothing else about it."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        known = f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # A sandbox without either.
        known = socket.gethostname()
    return hashlib.blake2s(known.encode(), digest_size=8).hexdigest()


def versions(own: str) -> dict[str, str]:
    """What both ends of a connection should have alike; `own` is cuda-cluster's."""
    return {
        "cuda-cluster": own,
        "distributed": distributed.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def differences(theirs: object, own: dict[str, str]) -> list[str]:
    """Where a worker's versions are not the scheduler's, with both."""
    said = theirs if isinstance(theirs, dict) else {}
    return [
        f"{what} {said[what]} there, {version} here"
        for what, version in own.items()
        if what in said and said[what] != version
    ]


async def about(version: str) -> About:
    """What this process's supervisor knows of it; only its host if nobody answers."""
    said: About = {"host": socket.gethostname(), "machine": machine(), "versions": versions(version)}
    name = os.environ.get(control.PROCESS, "")
    state, plan = await control.state(), await control.plan()
    own = next((one for one in state["workers"] if one["name"] == name), None) if state else None
    if state is None or own is None:
        return said
    said |= {"cluster": state["name"], "process": name}
    if (gpu := own["gpu"]) is not None:
        said["gpu"] = gpu["index"]
        if gpu["pci"] is not None:
            said["pci"] = gpu["pci"]
    if own["cpus"] is not None:
        said["cpus"] = own["cpus"]
    if own["mems"] is not None:
        said["mems"] = own["mems"]
    planned = next((one for one in plan["workers"] if one["name"] == name), None) if plan else None
    if planned is not None:
        said["nics"] = planned["nics"]
    return said


class Watch(SchedulerPlugin):
    """Tells of those that come and go."""

    name = "cuda-cluster-joined"

    def __init__(self, status: Status, version: str) -> None:
        self._status = status
        self._there: dict[str, str] = {}
        self._versions = versions(version)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        known = scheduler.workers[worker]
        said = known.extra.get(KEY)
        if said is None and known.nanny == worker:
            return  # Its supervisor is this one's.
        self._there[worker] = str(known.name)
        said = said if isinstance(said, dict) else {}
        host = said.get("host", known.host)
        for difference in differences(said.get("versions"), self._versions):
            # Once for all workers of a host.
            self._status.noted(f"workers that have joined from {host} differ: {difference}")
        self._status.joined({"host": known.host, **said, "name": str(known.name), "address": worker})

    def remove_worker(self, scheduler: Scheduler, worker: str, **known: Any) -> None:
        name = self._there.pop(worker, None)
        if name is not None:
            wished, reason = why(str(known.get("stimulus_id", "")))
            self._status.parted(name, not wished, reason)


def why(stimulus: str) -> tuple[bool, str]:
    """Whether somebody wished that a worker was removed, and why it was."""
    known = (told for begin, told in REASONS.items() if stimulus.startswith(begin))
    return next(known, (True, f"it was removed ({stimulus or 'nobody says why'})"))
