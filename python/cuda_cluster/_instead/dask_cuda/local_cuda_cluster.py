"""`dask_cuda.local_cuda_cluster`."""

from cuda_cluster.dask import LocalCUDACluster
from distributed import Nanny, Worker

__all__ = ["LocalCUDACluster", "LoggedNanny", "LoggedWorker"]


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
