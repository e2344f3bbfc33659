"""Where a worker keeps results: in device memory, in host memory, on disk.

Dask spills by what results say that they take, and looks every 100 ms at what the process has. A
worker with little memory can fill it in less: its imports, arguments of tasks and messages on their
way come on top of the results that it keeps. So this storage also looks at the process, whenever
something large comes: a new result, a message, a result from the disk.

*Invariant:* Dask's thresholds are those of its configuration and of the worker's limit, as they are
now; without either, this storage does what Dask's does.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dask
import zict
from dask.utils import parse_bytes
from distributed import Worker

from cuda_cluster_fork.failure import describe
from cuda_cluster_dask.internals import SpillBuffer
from cuda_cluster_dask.sent_as import sent_as
from cuda_cluster_dask.settings import WorkerSettings
from cuda_cluster_dask.status import Status

logger = logging.getLogger(__name__)

#: Once so much of the limit has come, the storage looks.
LOOK = 1 / 64


def storage(settings: WorkerSettings, status: Status) -> Callable[[str], Any] | None:
    """What `Worker(data=...)` takes; None where Dask's own has nothing to spill by."""
    limit, device_limit = settings["memory_limit"], settings["device_memory_limit"]
    memory = "distributed.worker.memory"
    target, spill, most = (dask.config.get(f"{memory}.{key}") for key in ("target", "spill", "max-spill"))
    device_storage = None if device_limit is None else of_dask_cuda(status)
    if device_storage is not None:
        # What results say they take; the process as a whole is looked at besides.
        host = int(limit * (target or 1)) if limit else None
        limits = {"device_memory_limit": device_limit, "memory_limit": host}
        return lambda worker_local_directory: device_storage(worker_local_directory, **limits)
    if not limit or not (target or spill):
        return None
    return lambda worker_local_directory: within_limit(SpillBuffer)(
        os.path.join(worker_local_directory, "storage"),
        target=int(limit * target) if target else sys.maxsize,
        max_spill=most and parse_bytes(most),
    )


def of_dask_cuda(status: Status) -> Any:
    """The class that spills from device to host memory, if it can be had."""
    try:
        from dask_cuda.device_host_file import DeviceHostFile
    except Exception as error:
        # As without dask-cuda (`cluster::dask::prepare`).
        status.note(
            f"device memory is not spilled: dask-cuda can't be imported ({describe(error)}); "
            "install what it lacks"
        )
        return None
    return within_limit(DeviceHostFile)


def heed(worker: Worker) -> None:
    """Has a worker's storage follow the memory of its process, unless the user brought another."""
    if hasattr(worker.data, "make_room"):
        worker.data.worker = weakref.proxy(worker)


def within_limit(kind: type) -> Any:
    """A class of storage, with what is here."""
    return sent_as(kind, WithinLimit)


if TYPE_CHECKING:
    from cuda_cluster_dask.internals import SpillBuffer as Storage  # What it extends.
else:
    Storage = object


class WithinLimit(Storage):
    """A storage that spills by the memory of the process, too."""

    worker: Worker | None = None
    came = 0  # Bytes since it looked last.
    told = False  # That the disk takes nothing.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffer = getattr(self, "host_buffer", None)
        if isinstance(buffer, zict.Buffer):
            # What was spilled while a task uses it is not read a second time, as in Dask's own.
            buffer.slow = zict.Cache(buffer.slow, zict.WeakValueMapping())

    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            super().__setitem__(key, value)
        except OSError as error:
            # Of dask-cuda's: what does not go to a full disk is still in memory, as in Dask's own.
            if key not in self:
                raise
            self.tell(error)
        if self.worker is not None:
            self.look_after(self.worker, self.fast.weights.get(key, 0))

    def __getitem__(self, key: Any) -> Any:
        on_device = getattr(self, "device_keys", ())
        if self.worker is not None and key not in self.fast and key not in on_device:
            task = self.worker.state.tasks.get(key)
            self.make_room(task.nbytes or 0 if task else 0)
        return super().__getitem__(key)

    def tell(self, error: OSError) -> None:
        """Says once that the disk takes nothing."""
        if not self.told:
            self.told = True
            logger.error(
                "results can't be written to the disk, and stay in memory: %s; "
                "hint: --local-directory names a place with more room",
                error,
            )

    def look_after(self, worker: Worker, size: int) -> None:
        self.came += size
        if self.came >= (worker.memory_manager.memory_limit or 0) * LOOK:
            self.came = 0
            self.make_room()

    def make_room(self, more: int = 0) -> None:
        """If `more` bytes would bring the process above Dask's threshold for spilling, spills
        what was used longest ago, until they would leave it below its target."""
        if self.worker is None:
            return
        manager = self.worker.memory_manager
        spill = manager.memory_spill_fraction
        if not manager.memory_limit or spill is False:
            return
        has = self.worker.monitor.get_process_memory
        if has() + more <= manager.memory_limit * spill:
            return
        target = manager.memory_limit * (manager.memory_target_fraction or spill)
        while self.fast and has() + more > target and self.evict() != -1:
            pass
