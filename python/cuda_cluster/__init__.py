"""One worker process per GPU on one machine: probed, planned, bound, connected, supervised.

A thin, typed layer over the `cuda-cluster` program, which the wheel carries. Nothing is decided
here: keywords become the program's flags, and its JSON becomes objects.

    import cuda_cluster

    with cuda_cluster.up(enable_nvlink=True) as cluster:
        print(cluster.state().workers[0].cpus)

Dask's users want `cuda_cluster.dask.LocalCUDACluster`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda_cluster.binding import Bound, bind
    from cuda_cluster.cluster import Cluster, attach, up
    from cuda_cluster.errors import ClusterError, NotBound, ProgramNotFound, WrongInput
    from cuda_cluster.look import plan, topology
    from cuda_cluster.model import (
        ClusterState,
        Event,
        Gpu,
        JoinedWorker,
        Link,
        Nic,
        NicPort,
        NumaNode,
        Plan,
        PlannedWorker,
        Process,
        Topology,
    )
    from cuda_cluster.program import program_path, version

# Loaded when first used: each worker of Dask loads this package for `direct://` alone.
_HOMES = {
    "binding": ("Bound", "bind"),
    "cluster": ("Cluster", "attach", "up"),
    "errors": ("ClusterError", "NotBound", "ProgramNotFound", "WrongInput"),
    "look": ("plan", "topology"),
    "model": (
        "ClusterState",
        "Event",
        "Gpu",
        "JoinedWorker",
        "Link",
        "Nic",
        "NicPort",
        "NumaNode",
        "Plan",
        "PlannedWorker",
        "Process",
        "Topology",
    ),
    "program": ("program_path", "version"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Bound",
    "Cluster",
    "ClusterError",
    "ClusterState",
    "Event",
    "Gpu",
    "JoinedWorker",
    "Link",
    "Nic",
    "NicPort",
    "NotBound",
    "NumaNode",
    "Plan",
    "PlannedWorker",
    "Process",
    "ProgramNotFound",
    "Topology",
    "WrongInput",
    "attach",
    "bind",
    "plan",
    "program_path",
    "topology",
    "up",
    "version",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
