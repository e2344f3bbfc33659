"""A rank computes only while nobody else wants its CPU, which another process has most of the time."""

import os
import subprocess
import sys

from team import RANK, Star

star = Star()
if RANK == 3:
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    if RANK == 3:
        for _ in range(30):
            sum(range(10000))
    star.barrier()
