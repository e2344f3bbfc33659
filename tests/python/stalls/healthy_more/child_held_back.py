"""A rank lets its child run for only every other 0.7 s, by signals, as `cpulimit` does."""

import signal
import subprocess
import sys
import time

from team import RANK, Star

WORK = "import time; end = time.process_time() + 5\nwhile time.process_time() < end: sum(range(10000))"
star = Star()
while True:
    if RANK == 2:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        while child.poll() is None:
            time.sleep(0.7)
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            child.send_signal(signal.SIGCONT)
    star.barrier()
