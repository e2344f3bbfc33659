"""A program writes more than a pipe holds; the rank waits for its end and does not read."""

import subprocess
import sys

from team import RANK, Ring


def build_index():
    child = subprocess.Popen(
        [sys.executable, "-c", "for i in range(100000): print('indexed', i)"], stdout=subprocess.PIPE
    )
    child.wait()
    return child.stdout.read()


ring = Ring()
ring.barrier()
if RANK == 3:
    build_index()
ring.barrier()
