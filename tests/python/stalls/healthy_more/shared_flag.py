"""The ranks look at a word of shared memory every millisecond; rank 2 computes for 10 s before it counts on."""

import mmap
import os
import tempfile
import time

from team import PORT, RANK, Star

path = os.path.join(tempfile.gettempdir(), f"healthy-{PORT}.flag")
star = Star()
if RANK == 2:
    with open(path, "wb") as file:
        file.write(bytes(4096))
star.barrier()
with open(path, "r+b") as file:
    page = mmap.mmap(file.fileno(), 4096)
step = 0
while True:
    step = (step + 1) % 256
    if RANK == 2:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sum(range(10000))
        page[0] = step
    while page[0] != step:
        time.sleep(0.001)
