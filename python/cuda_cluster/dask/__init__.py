"""Dask clusters on one machine's GPUs: what dask-cuda's users know, over a supervised cluster.

from cuda_cluster.dask import LocalCUDACluster
from distributed import Client

with LocalCUDACluster(protocol="ucxx", enable_nvlink=True) as cluster, Client(cluster) as client:
    ...
"""

from cuda_cluster.dask.client import initialize
from cuda_cluster.dask.cluster import LocalCUDACluster
from cuda_cluster.dask.cuda_worker import CUDAWorker
from cuda_cluster.dask.runner import MPIRunner, Runner, SLURMRunner

__all__ = ["CUDAWorker", "LocalCUDACluster", "MPIRunner", "Runner", "SLURMRunner", "initialize"]
