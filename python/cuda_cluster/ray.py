"""Ray's actors and tasks, each on a GPU of the plan and bound to what is near it.

Ray starts its processes before it knows their GPU, and sets `CUDA_VISIBLE_DEVICES` in a running one,
just before its first task or its actor's constructor (seen with Ray 2.60). So there are two ways. Where
Ray chooses the GPU, `cuda_cluster.bind()` is the first line of the actor or task:

    @ray.remote(num_gpus=1)
    class Trainer:
        def __init__(self):
            cuda_cluster.bind()

Where the plan chooses, the process is born bound, before its first instruction:

    ray.init(num_gpus=8, resources=cuda_cluster.ray.resources())
    trainers = [Trainer.options(**one).remote() for one in cuda_cluster.ray.options()]

Ray itself is not needed here: these are plain values for it.

*Invariant:* each GPU is one resource of Ray's, so nobody gets one twice.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from typing import Any

from cuda_cluster import program
from cuda_cluster.binding import numbers
from cuda_cluster.look import plan
from cuda_cluster.model import PlannedWorker

#: Keywords of a plan that say which GPUs, which one process is not asked.
_WHICH = ("n_workers", "gpus", "topology")


def resources(**flags: Any) -> dict[str, float]:
    """Custom resources of this machine, for `ray.init(resources=…)`, or as JSON for `ray start
    --resources`: `gpu:3`, one of each GPU; `numa:0`, as many as GPUs are near that node; `nic:mlx5_0:1`,
    as many as GPUs use that port in the plan. `flags` are those of `cuda-cluster plan`.

    Raises ClusterError.
    """
    found: Counter[str] = Counter()
    for worker in plan(engine="command", **flags).workers:
        found.update(_of(worker))
    return {name: float(number) for name, number in sorted(found.items())}


def options(*, python: str | None = None, **flags: Any) -> list[dict[str, Any]]:
    """For each worker of a plan the options of a Ray actor or task (`Actor.options(**one)`) that runs
    on its GPU in a process of its own, born bound: with `n_workers=4` those on the four GPUs with the
    best connections. `flags` are those of `cuda-cluster plan`; `python` is the worker's Python.

    The nodes need the resources of `resources()`, this package where it is here, and their GPUs alike.

    Raises ClusterError.
    """
    each = {name: value for name, value in flags.items() if name not in _WHICH}
    # What a launcher says of the raylet is not said of its workers: the rank is given.
    command = [program.program_path(), "exec", "--gpu", "auto", "--rank", "0", *program.flags(each)]
    executable = shlex.join([*command, "--", python or sys.executable])
    return [
        {
            "num_gpus": 1,
            "resources": dict.fromkeys(_of(worker), 1),
            "runtime_env": {
                "py_executable": executable,
                "env_vars": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": _name(worker)},
            },
        }
        for worker in plan(engine="command", **flags).workers
        if worker.gpu is not None
    ]


def _of(worker: PlannedWorker) -> list[str]:
    """The names of what a worker uses."""
    gpu = [] if worker.gpu is None else [f"gpu:{_name(worker)}"]
    nodes = sorted(numbers(worker.mems or ""))
    return [*gpu, *(f"numa:{node}" for node in nodes), *(f"nic:{nic}" for nic in worker.nics)]


def _name(worker: PlannedWorker) -> str:
    """The worker's GPU, as CUDA names it: machines that are alike have the same numbers."""
    gpu = worker.gpu
    if gpu is None:
        return ""
    is_instance = (gpu.uuid or "").startswith("MIG-")
    return str(gpu.uuid) if is_instance else str(gpu.index)
