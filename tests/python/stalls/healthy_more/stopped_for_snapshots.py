"""A rank waits for its child, which another program stops for 1.5 s out of 4 to copy its memory."""

import os
import subprocess
import sys

from team import RANK, Star

WORK = "import time; end = time.process_time() + 5\nwhile time.process_time() < end: sum(range(10000))"
COPY = "while kill -STOP $1; do sleep 1.5; kill -CONT $1; sleep 2.5; done 2> /dev/null"
star = Star()
while True:
    if RANK == 0:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        copies = subprocess.Popen(["sh", "-c", COPY, "sh", str(child.pid)], start_new_session=True)
        child.wait()
        os.waitpid(copies.pid, 0)
    star.barrier()
