"""The others wait for a key in the store that rank 0 sets after 12 s of work."""

import datetime
import time

import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
for step in range(1000):
    if dist.get_rank() == 0:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            sum(range(10000))
        store.set(f"ready {step}", "1")
    else:
        store.wait([f"ready {step}"], datetime.timedelta(minutes=5))
