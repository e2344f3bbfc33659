"""`dask_cuda.utils`, where dask-cuda is not installed: what other projects import from it.

The answers are the program's: GPUs by `cuda-cluster topo`.
"""

import functools
import os
import time

import cuda_cluster
from dask.utils import parse_bytes

__all__ = [
    "cuda_visible_devices",
    "get_cpu_affinity",
    "get_cpu_count",
    "get_device_total_memory",
    "get_gpu_count",
    "get_gpu_uuid",
    "get_n_gpus",
    "has_device_memory_resource",
    "nvml_device_index",
    "parse_cuda_visible_device",
    "parse_device_memory_limit",
    "wait_workers",
]


@functools.cache
def _gpus():
    return cuda_cluster.topology().gpus


def _gpu(device):
    """The GPU of an index or a UUID."""
    text = str(device)
    for gpu in _gpus():
        if text == str(gpu.index) or (gpu.uuid and gpu.uuid == text):
            return gpu
    raise ValueError(f"Invalid device index or UUID: {device}")


def get_cpu_count():
    return os.cpu_count()


def get_gpu_count():
    return len(_gpus())


def get_n_gpus():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return get_gpu_count() if visible is None else len(visible.split(","))


def get_gpu_uuid(device_index=0):
    return _gpu(device_index).uuid


def get_device_total_memory(device_index=0):
    """In bytes; None for a GPU without memory of its own."""
    return _gpu(device_index).memory_bytes


def has_device_memory_resource(device_index=0):
    return get_device_total_memory(device_index) is not None


def get_cpu_affinity(device_index=None):
    """The CPUs near a GPU."""
    cpus = []
    for part in (_gpu(device_index or 0).cpus or "").split(","):
        low, _, high = part.partition("-")
        if low:
            cpus += range(int(low), int(high or low) + 1)
    return cpus or list(range(os.cpu_count() or 1))


def parse_cuda_visible_device(device):
    """An index as a number, a UUID as it is."""
    try:
        return int(device)
    except TypeError as error:
        raise TypeError("CUDA_VISIBLE_DEVICES must be integers or strings") from error
    except ValueError:
        if any(device.startswith(prefix) for prefix in ("GPU-", "MIG-")):
            return device
        raise ValueError("Devices in CUDA_VISIBLE_DEVICES must be integers or UUIDs") from None


def cuda_visible_devices(i, visible=None):
    """The visible devices, turned so that the one at position `i` is first."""
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or range(get_gpu_count())
    if isinstance(visible, str):
        visible = visible.split(",")
    devices = [str(parse_cuda_visible_device(one)) for one in visible]
    return ",".join([*devices[i:], *devices[:i]])


def nvml_device_index(i, CUDA_VISIBLE_DEVICES):
    """The number, or the UUID, of the visible device at position `i`."""
    if isinstance(CUDA_VISIBLE_DEVICES, str):
        CUDA_VISIBLE_DEVICES = CUDA_VISIBLE_DEVICES.split(",")
    return parse_cuda_visible_device(CUDA_VISIBLE_DEVICES[i])


def parse_device_memory_limit(device_memory_limit, device_index=0, alignment_size=1):
    """A limit in bytes; None for no limit."""
    limit = device_memory_limit
    if limit in (None, 0, "0", 0.0, "0.0"):
        return None
    total = get_device_total_memory(device_index)
    if limit == "auto":
        return total
    limit = 0.8 if limit == "default" else limit
    try:
        limit = float(limit)
    except ValueError:
        limit = parse_bytes(limit)
    else:
        limit = total * limit if limit < 1 or str(device_memory_limit) == "1.0" else limit
    return int(limit) // alignment_size * alignment_size


def wait_workers(client, min_timeout=10, seconds_per_gpu=2, n_gpus=None, timeout_callback=None):
    """Waits for as many workers as there are GPUs; says whether they came."""
    n_gpus = n_gpus or get_n_gpus()
    deadline = time.time() + max(min_timeout, seconds_per_gpu * n_gpus)
    while len(client.scheduler_info(n_workers=-1)["workers"]) != n_gpus:
        if time.time() > deadline:
            if callable(timeout_callback):
                timeout_callback()
            return False
        time.sleep(0.1)
    return True
