"""What a worker with a GPU has beyond Dask's own: its context and memory pools.

The pieces are dask-cuda's; sizes arrive in bytes of the worker's own GPU. CPU affinity is not
among them: it was in force before Python started.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import dask

from cuda_cluster_fork.failure import StartFailure, describe
from cuda_cluster_dask.settings import WorkerSettings


def create_context(protocol: str, planned: str | None) -> None:
    """Makes the context of the first visible GPU, which must be the planned one, before threads and
    UCX exist."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise StartFailure(f"no CUDA context: {error}") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver, "cuInit", 0)
    _check(driver, "cuDeviceGet", ctypes.byref(device), 0)
    identity = ctypes.create_string_buffer(16)
    _check(driver, "cuDeviceGetUuid", identity, device)
    found = f"GPU-{uuid.UUID(bytes=identity.raw)}"
    if planned is not None and found.lower() != planned.lower():
        raise StartFailure(f"CUDA's first GPU is {found}, the plan's is {planned}")
    if protocol.startswith("ucx"):
        # distributed-ucxx makes it itself, at the right moment, and warns of one made before.
        dask.config.set({"distributed-ucxx.create-cuda-context": True})
        return
    _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _check(driver, "cuCtxSetCurrent", context)


def _check(driver: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(driver, function)(*arguments)
    if code != 0:
        text = ctypes.c_char_p(b"an error that the driver does not know")
        driver.cuGetErrorString(code, ctypes.byref(text))
        words = (text.value or b"").decode()
        raise StartFailure(f"no CUDA context: {function}: {words} (code {code})")


def plugins(settings: WorkerSettings) -> tuple[Any, ...]:
    """Worker plugins for RMM and cuDF."""
    chosen = []
    rmm, cudf = settings["rmm"], settings["cudf_spill"]
    if rmm is None and cudf is None:
        return ()
    try:
        from dask_cuda.plugins import CUDFSetup, RMMSetup
    except Exception as error:
        raise StartFailure(
            f"RMM memory pools and cuDF's spilling need dask-cuda, which can't be imported "
            f"({describe(error)}); install what it lacks"
        ) from error
    if rmm is not None:
        chosen.append(
            RMMSetup(
                initial_pool_size=rmm["pool_bytes"],
                maximum_pool_size=rmm["maximum_pool_bytes"],
                managed_memory=rmm["managed"],
                async_alloc=rmm["asynchronous"],
                release_threshold=rmm["release_threshold_bytes"],
                log_directory=rmm["log_directory"],
                track_allocations=rmm["track_allocations"],
                external_lib_list=rmm["set_allocator_for"] or None,
            )
        )
    if cudf is not None:
        chosen.append(CUDFSetup(spill=True, spill_stats=cudf))
    return tuple(chosen)
