"""A rank writes into the pipe of its child, which takes 64 KiB every 7 s (a printer, say)."""

import subprocess
import sys

from team import RANK, Star

CHILD = "import os, time\nwhile os.read(0, 1 << 16): time.sleep(7)"
star = Star()
if RANK == 2:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, bufsize=0)
while True:
    if RANK == 2:
        child.stdin.write(bytes(1 << 16))
    star.barrier()
