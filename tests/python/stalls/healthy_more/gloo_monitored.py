"""Ranks wait in a monitored barrier for one that computes for 10 s."""

import time

import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


dist.init_process_group("gloo")
rank = dist.get_rank()
while True:
    if rank == 2:
        compute(10)
    dist.monitored_barrier()
