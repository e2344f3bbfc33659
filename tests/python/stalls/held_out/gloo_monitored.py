"""A rank looks for a file that another rank has written under another name."""

import datetime
import os
import tempfile
import time

import torch.distributed as dist

dist.init_process_group("gloo")


def wait_for_checkpoint(path):
    while not os.path.exists(path):
        time.sleep(1)


dist.barrier()
if dist.get_rank() == 3:
    wait_for_checkpoint(os.path.join(tempfile.gettempdir(), "held-out-never.pt"))
dist.monitored_barrier(timeout=datetime.timedelta(hours=1))
