"""A rank has a twentieth of a CPU by its control group."""

import os

from team import RANK, Star

GROUP = "/sys/fs/cgroup/cpu/held-out-cpu"
star = Star()
if RANK == 0:
    os.makedirs(GROUP, exist_ok=True)
    for name, value in (
        ("cpu.cfs_period_us", "1000000"),
        ("cpu.cfs_quota_us", "50000"),
        ("tasks", str(os.getpid())),
    ):
        with open(f"{GROUP}/{name}", "w") as f:
            f.write(value)
while True:
    if RANK == 0:
        for i in range(2_000_000):
            i * i
    star.barrier()
