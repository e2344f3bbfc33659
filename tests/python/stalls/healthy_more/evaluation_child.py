"""Rank 0 runs its evaluation as a program of its own for 15 s."""

import subprocess
import sys

from team import RANK, Star

CODE = "import time\nend = time.time() + 15\nwhile time.time() < end: sum(range(10000))"
star = Star()
while True:
    if RANK == 0:
        subprocess.run([sys.executable, "-c", CODE], check=True)
    star.barrier()
