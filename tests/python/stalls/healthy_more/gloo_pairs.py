"""Two groups of two ranks; the second waits in a barrier while the first computes and exchanges."""

import time

import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
while True:
    for _ in range(3):
        if rank == 0:
            compute(4)
        dist.all_reduce(torch.ones(10), group=pairs[rank // 2])
    dist.barrier()
