"""A rank waits for the processes that it has spawned, which compute for 10 s."""

import time

import torch.distributed as dist
import torch.multiprocessing


def compute(number):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        sum(range(10000))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    while True:
        if dist.get_rank() == 1:
            torch.multiprocessing.spawn(compute, nprocs=2)
        dist.barrier()
