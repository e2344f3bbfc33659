"""Somebody has attached gdb to a rank and gone away."""

import os
import subprocess
import time

from team import RANK, Ring


def attach():
    # A session of its own: it belongs to no rank. It ends when the rank does.
    if os.fork() == 0:
        os.setsid()
        target = os.getppid()
        gdb = subprocess.Popen(
            ["gdb", "-nx", "-q", "-p", str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        gdb.wait()
        os._exit(0)


def compute():
    end, total = time.monotonic() + 60, 0
    while time.monotonic() < end:
        total += sum(range(1000))
    return total


ring = Ring()
ring.barrier()
if RANK == 2:
    attach()
    compute()
ring.barrier()
