"""Rank 3 waits for 15 s in the evaluation for a service, by sleeping and asking again every 3 s."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
while True:
    if dist.get_rank() == 3:
        for _ in range(5):
            time.sleep(3)
    dist.barrier()
