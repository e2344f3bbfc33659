"""`dask_cuda.cuda_worker`."""

from cuda_cluster.dask import CUDAWorker

from .initialize import initialize
from .utils import cuda_visible_devices, get_n_gpus, nvml_device_index

__all__ = ["CUDAWorker", "cuda_visible_devices", "get_n_gpus", "initialize", "nvml_device_index"]
