"""A trainer of one GPU with PyTorch: `bind()` before CUDA begins, and the loader's workers have the same.

Started by anybody's pool, with one GPU in CUDA_VISIBLE_DEVICES or a launcher's local rank:

    torchrun --nproc-per-node=8 torch_loader.py
    CUDA_VISIBLE_DEVICES=3 python torch_loader.py

Under `cuda-cluster run -- python torch_loader.py` each rank is born bound, and `bind()` finds nothing to do.
"""

import os

import cuda_cluster

# Before torch: threads of its libraries are born bound, and read OMP_NUM_THREADS when they are loaded.
BOUND = cuda_cluster.bind()

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Squares(Dataset):
    """What the workers of the loader read, and where they are."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> tuple[int, list[int]]:
        return at * at, sorted(os.sched_getaffinity(0))


def main() -> None:
    # Forked or spawned, they have this process's CPUs and memory policy.
    loader = DataLoader(Squares(), batch_size=None, num_workers=2, multiprocessing_context="forkserver")
    total, places = 0, set()
    for value, cpus in loader:
        total += value
        places.add(tuple(cpus))
    threads = torch.get_num_threads()
    print(f"{BOUND.worker} cpus {BOUND.cpus} nics {BOUND.nics} threads {threads} total {total}", flush=True)
    assert places == {tuple(sorted(os.sched_getaffinity(0)))}, places


if __name__ == "__main__":
    main()
