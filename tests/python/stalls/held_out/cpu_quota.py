"""A rank may run for one millisecond a second."""

import os

from team import RANK, Star

GROUP = "/sys/fs/cgroup/cpu/held-out-cpu"


def put(name, value):
    with open(f"{GROUP}/{name}", "w") as f:
        f.write(value)


def limit():
    os.makedirs(GROUP, exist_ok=True)
    put("cpu.cfs_period_us", "1000000")
    put("cpu.cfs_quota_us", "1000")
    put("tasks", str(os.getpid()))


def augment():
    total = 0
    for i in range(50_000_000):
        total += i * i
    return total


star = Star()
star.barrier()
if RANK == 3:
    limit()
    augment()
star.barrier()
