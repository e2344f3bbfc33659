"""A rank follows a log by `tail -f`; rank 0 adds a line after each 9 s of computing."""

import os
import subprocess
import tempfile
import time

from team import PORT, RANK, Star

path = os.path.join(tempfile.gettempdir(), f"healthy-{PORT}.log")
open(path, "a").close()
star = Star()
if RANK == 3:
    tail = subprocess.Popen(["tail", "-n", "0", "-f", path], stdout=subprocess.PIPE)
while True:
    if RANK == 0:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            sum(range(10000))
        with open(path, "a") as file:
            file.write("step\n")
    if RANK == 3:
        tail.stdout.readline()
