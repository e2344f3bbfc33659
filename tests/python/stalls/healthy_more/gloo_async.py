"""Ranks start an all-reduce, compute and wait for it; rank 1 comes 10 s later."""

import time

import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


dist.init_process_group("gloo")
rank = dist.get_rank()
while True:
    if rank == 1:
        compute(10)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    compute(0.2)
    work.wait()
