"""The program whose output a rank reads has been stopped by a signal."""

import os
import signal
import subprocess
import time

from team import RANK, Ring


def stream_tokens():
    child = subprocess.Popen(["sh", "-c", "while :; do echo token; sleep 0.01; done"], stdout=subprocess.PIPE)
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGSTOP)
    return list(child.stdout)


ring = Ring()
ring.barrier()
if RANK == 3:
    stream_tokens()
ring.barrier()
