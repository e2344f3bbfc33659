"""SGLang: its schedulers, one for each GPU, bound before they use CUDA. A plugin by SGLang's own entry point:

    [project.entry-points."sglang.srt.plugins"]
    cuda-cluster = "sglang_plugin:register"

and SGLANG_AUTO_NUMA_BIND=0, or SGLang also starts them by numactl, by node, and without NICs (SGLang 0.5.23).
"""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import cuda_cluster


def bind(server_args: Any, gpu_id: int, *args: Any, **kwargs: Any) -> None:
    """Before `configure_scheduler_process`, the first that a scheduler does with its GPU's number."""
    bound = cuda_cluster.bind(device=gpu_id)
    print(f"GPU {gpu_id} is {bound.worker}: CPUs {bound.cpus}, NICs {bound.nics}", flush=True)


def register() -> None:
    HookRegistry.register("sglang.srt.managers.scheduler.configure_scheduler_process", bind, HookType.BEFORE)
