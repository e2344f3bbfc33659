"""A rank touches five times the memory that its control group has; the rest is in swap."""

import os
import random
import subprocess
import tempfile

from crew import RANK, Hub

GROUP = "/sys/fs/cgroup/memory/held-out-swap"
LIMIT, USED = 40 << 20, 200 << 20


def put(name, value):
    with open(f"{GROUP}/{name}", "w") as f:
        f.write(value)


def confine():
    swap = os.path.join(tempfile.gettempdir(), "swap")
    with open(swap, "wb") as f:
        os.posix_fallocate(f.fileno(), 0, 400 << 20)
    os.chmod(swap, 0o600)
    subprocess.run(["mkswap", "-q", swap], check=True)
    subprocess.run(["swapon", swap], check=True)
    os.makedirs(GROUP, exist_ok=True)
    put("memory.limit_in_bytes", str(LIMIT))
    put("cgroup.procs", str(os.getpid()))


def shuffle():
    table = bytearray(USED)
    generator = random.Random(1)
    for _ in range(100_000_000):
        table[generator.randrange(USED)] = 1
    return table


hub = Hub()
hub.meet()
if RANK == 1:
    confine()
    shuffle()
hub.meet()
