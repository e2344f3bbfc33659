"""`dask_cuda.utils_test`, where dask-cuda is not installed."""

from distributed import Nanny, Worker

__all__ = ["IncreasedCloseTimeoutNanny", "MockWorker"]


class MockWorker(Worker):
    """A worker, for tests."""


class IncreasedCloseTimeoutNanny(Nanny):
    """A nanny; here the supervisor is one for all workers, and patient."""
