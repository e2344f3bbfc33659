"""`dask_cuda.local_cuda_cluster`."""

from cuda_cluster.dask import LocalCUDACluster
from distributed import Nanny, Worker

# Others take these from here.
from .initialize import initialize
from .utils import (
    cuda_visible_devices,
    nvml_device_index,
    parse_cuda_visible_device,
    parse_device_memory_limit,
)

__all__ = [
    "LocalCUDACluster",
    "LoggedNanny",
    "LoggedWorker",
    "cuda_visible_devices",
    "initialize",
    "nvml_device_index",
    "parse_cuda_visible_device",
    "parse_device_memory_limit",
]


class LoggedWorker(Worker):
    """Says in its log what it spills."""

    async def start(self):
        await super().start()
        if hasattr(self.data, "set_address"):
            self.data.set_address(self.address)


class LoggedNanny(Nanny):
    """A nanny of such workers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, worker_class=LoggedWorker, **kwargs)
