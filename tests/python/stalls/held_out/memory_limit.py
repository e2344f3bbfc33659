"""A rank is at the limit of its control group's memory, and the kernel may not end it for that."""

import os

from team import RANK, Ring

GROUP = "/sys/fs/cgroup/memory/held-out-memory"


def put(name, value):
    with open(f"{GROUP}/{name}", "w") as f:
        f.write(value)


def load_weights():
    os.makedirs(GROUP, exist_ok=True)
    put("memory.limit_in_bytes", str(48 << 20))
    put("memory.oom_control", "1")
    put("cgroup.procs", str(os.getpid()))
    return [bytearray(b"x" * (1 << 20)) for _ in range(200)]


ring = Ring()
ring.barrier()
if RANK == 2:
    load_weights()
ring.barrier()
