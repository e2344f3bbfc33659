"""Ranks look for each other's files; one of them computes for 12 s."""

import time

from team import RANK, Files

files = Files()
while True:
    if RANK == 2:
        end = time.monotonic() + 12
        while time.monotonic() < end:
            sum(range(10000))
    files.barrier()
