"""Objects for the scheduler and workers, which are other processes, as `LocalCluster` has them.

*Invariant:* values are those that the scheduler last reported; nothing here uses the network.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Status

from cuda_cluster import program
from cuda_cluster.model import Plan, PlannedWorker

if TYPE_CHECKING:
    from cuda_cluster.dask.cluster import LocalCUDACluster

Name = int | str


@dataclass(frozen=True)
class MemoryManager:
    """The part of a worker's memory manager that the scheduler reports."""

    memory_limit: int | None


class WorkerView:
    """A worker, whichever process has its name now."""

    def __init__(self, cluster: LocalCUDACluster, name: Name) -> None:
        self._cluster = cluster
        self.name = name

    @property
    def _now(self) -> tuple[str | None, dict[str, Any]]:
        known = self._cluster.scheduler_info["workers"].items()
        return next(((at, one) for at, one in known if one["name"] == self.name), (None, {}))

    @property
    def _identity(self) -> dict[str, Any]:
        return self._now[1]

    @property
    def address(self) -> str | None:
        """Its current address, which changes with a restart; None where the scheduler has no such
        worker."""
        return self._now[0]

    worker_address = address

    @property
    def nthreads(self) -> int:
        return self._identity.get("nthreads", 0)

    @property
    def memory_manager(self) -> MemoryManager:
        return MemoryManager(self._identity.get("memory_limit"))

    @property
    def local_directory(self) -> str | None:
        return self._identity.get("local_directory")

    @property
    def status(self) -> Status:
        name = self._identity.get("status")
        if name == "init":
            return Status.running  # When it registered; later states are not reported.
        return Status[name] if name in Status.__members__ else Status.closed

    @property
    def process(self) -> str | None:
        """The supervisor's name for it, as in `cuda-cluster logs NAME PROCESS`."""
        return self._cluster._processes.get(self.name)

    def __repr__(self) -> str:
        return f"<Worker {self.address!r}, name: {self.name}, status: {self.status.name}>"


class Workers(Mapping[str, WorkerView]):
    """The scheduler's workers by their addresses."""

    def __init__(self, cluster: LocalCUDACluster) -> None:
        self._cluster = cluster

    def __getitem__(self, address: str) -> WorkerView:
        known = self._cluster.scheduler_info["workers"][address]
        return WorkerView(self._cluster, known["name"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cluster.scheduler_info["workers"])

    def __len__(self) -> int:
        return len(self._cluster.scheduler_info["workers"])


class SchedulerView:
    """The scheduler."""

    def __init__(self, cluster: LocalCUDACluster) -> None:
        self._cluster = cluster

    @property
    def address(self) -> str:
        return self._cluster.scheduler_address

    @property
    def workers(self) -> Workers:
        return Workers(self._cluster)

    @property
    def status(self) -> Status:
        return self._cluster.status

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"'scheduler.{name}' is not available: the scheduler is another process; "
            "ask it with client.run_on_scheduler"
        )

    def __repr__(self) -> str:
        return f"<Scheduler {self.address!r}, workers: {len(self.workers)}>"


def names(plan: Plan) -> dict[str, Name]:
    """Dask's names of the workers, by their processes."""
    own = plan.engine["dask"].get("names", {})
    return {worker.name: own.get(worker.name, worker.name) for worker in plan.workers}


def spec(worker: PlannedWorker) -> dict[str, Any]:
    """A worker's entry of `worker_spec`."""
    from distributed import Worker

    options = {
        "nthreads": worker.threads,
        "memory_limit": worker.memory_limit_bytes,
        "env": dict(worker.env),
    }
    return {"cls": Worker, "options": options}


def picture(run_directory: str, machine: str | None) -> str:
    """A picture of a cluster's machine with its workers, as SVG; empty if there is none."""
    arguments = ["topo", "-o", "svg", f"--plan={run_directory}/plan.json"]
    if machine is not None:
        arguments.append(f"--topology={machine}")
    try:
        svg = program.run(arguments, timeout=30)
        return svg[svg.index("<svg") :]
    except Exception:
        return ""  # A notebook shows the rest without it.


#: A worker in such a picture: its fill, its edge, and what is told of it.
_WORKER = re.compile(r'fill="[^"]*" stroke="[^"]*"><title>(?P<name>[^,<]*)(?P<rest>[^<]*)</title>')
#: The colours of a worker by its state, as on the page; any other state is one of trouble.
_COLOURS = {
    "ready": ("#e6f5e4", "#1a7f37"),
    "starting": ("#fdf0d8", "#9a5b00"),
    "stopping": ("#fdf0d8", "#9a5b00"),
    "waiting": ("#e9ecf2", "#6b7588"),
    "stopped": ("#e9ecf2", "#6b7588"),
}
_TROUBLE = ("#fde4e4", "#c4232f")


class States:
    """The states of a cluster's workers, as its supervisor last wrote them."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, "state.json")
        self._at: tuple[int, int] | None = None
        self._known: dict[str, str] = {}

    def now(self) -> dict[str, str]:
        """By the workers' names, in their order; none of a cluster that has left nothing."""
        try:
            at = os.stat(self._path)
            if (at.st_mtime_ns, at.st_ino) != self._at:
                with open(self._path, encoding="utf-8") as file:
                    self._known = {one["name"]: one["state"] for one in json.load(file)["workers"]}
                self._at = (at.st_mtime_ns, at.st_ino)
        except FileNotFoundError:
            self._known, self._at = {}, None
        except (OSError, ValueError, KeyError, TypeError):
            pass  # It is written anew after a change.
        return self._known


def alive(picture: str, states: Mapping[str, str]) -> str:
    """A picture with each worker in the colour of its state."""

    def worker(found: re.Match[str]) -> str:
        state = states.get(html.unescape(found["name"]))
        if state is None:
            return found[0]
        fill, edge = _COLOURS.get(state, _TROUBLE)
        told = f"{found['name']}{found['rest']}, {html.escape(worded(state))}"
        return f'fill="{fill}" stroke="{edge}" stroke-width="2"><title>{told}</title>'

    return _WORKER.sub(worker, picture)


def worded(state: str) -> str:
    return {"ready": "READY", "unresponsive": "not answering"}.get(state, state)


def summary(states: Mapping[str, str]) -> str:
    """Such as `2 of 3 workers READY; gpu1 restarting`."""
    wanted = {name: state for name, state in states.items() if state != "stopped"}
    if not wanted:
        return "no worker runs"
    others = [f"{name} {worded(state)}" for name, state in wanted.items() if state != "ready"]
    ready = f"{len(wanted) - len(others)} of {len(wanted)} worker{'' if len(wanted) == 1 else 's'} READY"
    return "; ".join([ready, ", ".join(others)]) if others else ready
