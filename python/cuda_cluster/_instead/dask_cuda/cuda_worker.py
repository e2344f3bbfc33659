"""`dask_cuda.cuda_worker`."""

from cuda_cluster.dask import CUDAWorker

__all__ = ["CUDAWorker"]
