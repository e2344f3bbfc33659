"""Ranks wait for a key in a store of files, which they ask again and again; rank 0 sets it after 10 s of computing."""

import os
import tempfile
import time

import torch.distributed as dist

path = os.path.join(tempfile.gettempdir(), f"healthy-{os.environ['MASTER_PORT']}.store")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(path, size)
step = 0
while True:
    step += 1
    if rank == 0:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sum(range(10000))
        store.set(f"step {step}", "1")
    store.get(f"step {step}")
