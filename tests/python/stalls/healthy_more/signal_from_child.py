"""A rank waits for a signal that its child sends when a reservation begins, 10 s later."""

import os
import signal
import subprocess

from team import RANK, Star

star = Star()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while True:
    if RANK == 1:
        child = subprocess.Popen(["sh", "-c", f"sleep 10; kill -USR1 {os.getpid()}"])
        signal.sigwait([signal.SIGUSR1])
        child.wait()
    star.barrier()
