"""Objects for the scheduler and workers, which are other processes, as `LocalCluster` has them.

*Invariant:* values are those that the scheduler last reported; nothing here uses the network.
"""

from __future__ import annotations

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
