"""A rank sorts through `sort`, which reads all of its input before it writes a line."""

import random
import subprocess

from team import RANK, Star

star = Star()
lines = "\n".join(str(random.random()) for _ in range(300_000))
while True:
    if RANK == 2:
        for _ in range(5):
            subprocess.run(["sort"], input=lines, capture_output=True, text=True, check=True)
    star.barrier()
