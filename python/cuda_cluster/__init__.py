"""One worker process per GPU on one machine: probed, planned, bound, connected, supervised.

A thin, typed layer over the `cuda-cluster` program, which the wheel carries. Nothing is decided
here: keywords become the program's flags, and its JSON becomes objects.

    import cuda_cluster

    with cuda_cluster.up(enable_nvlink=True) as cluster:
        print(cluster.state().workers[0].cpus)

Dask's users want `cuda_cluster.dask.LocalCUDACluster`.
"""

from cuda_cluster.cluster import Cluster, attach, up
from cuda_cluster.errors import ClusterError, ProgramNotFound, WrongInput
from cuda_cluster.look import plan, topology
from cuda_cluster.model import (
    ClusterState,
    Event,
    Gpu,
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

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterState",
    "Event",
    "Gpu",
    "Link",
    "Nic",
    "NicPort",
    "NumaNode",
    "Plan",
    "PlannedWorker",
    "Process",
    "ProgramNotFound",
    "Topology",
    "WrongInput",
    "attach",
    "plan",
    "program_path",
    "topology",
    "up",
    "version",
]
