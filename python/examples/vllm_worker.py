"""vLLM: its workers, each bound before it uses CUDA.

    PYTHONPATH=. vllm serve MODEL -tp 8 --worker-cls vllm_worker.Worker

vLLM's own `--numa-bind` starts workers by numactl: by node, not by the CPUs that a container or a launcher
leaves, and without NICs. A plugin (`vllm.general_plugins`) runs before the worker knows its GPU, and a
worker extension after CUDA has begun; the worker's class is between the two (vLLM 0.33).
"""

from typing import Any

from vllm.v1.worker import gpu_worker

import cuda_cluster


class Worker(gpu_worker.Worker):
    def init_device(self) -> Any:
        # `local_rank` becomes CUDA's number of the GPU here, as in the method that this calls.
        parallel = self.parallel_config
        device = parallel.get_local_gpu_index(self.local_rank)
        physical = parallel.assigned_physical_gpu_ids
        if physical is None:
            bound = cuda_cluster.bind(device=device)
        else:
            bound = cuda_cluster.bind(gpu=physical[device])
        gpu_worker.logger.info("%s: CPUs %s, NICs %s", bound.worker, bound.cpus, bound.nics)
        return super().init_device()
