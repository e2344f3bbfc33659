"""A rank is out of memory, and waits for an hour before it tries again."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def train_step(step):
    if dist.get_rank() == 2 and step == 3:
        raise RuntimeError("CUDA out of memory")
    dist.all_reduce(torch.ones(1000))


def recover():
    time.sleep(3600)


for step in range(10):
    try:
        train_step(step)
    except RuntimeError:
        recover()
