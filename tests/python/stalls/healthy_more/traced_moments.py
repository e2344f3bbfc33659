"""Somebody asks gdb for the stack of a rank's child every few seconds."""

import subprocess
import sys

from team import RANK, Star

WORK = "import time; end = time.monotonic() + 14\nwhile time.monotonic() < end: sum(range(10000))"
ASK = "while gdb -nx -q -batch -p $1 -ex bt; do sleep 2; done"
star = Star()
while True:
    if RANK == 3:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        gdb = subprocess.Popen(
            ["sh", "-c", ASK, "sh", str(child.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        child.wait()
        gdb.terminate()
        gdb.wait()
    star.barrier()
