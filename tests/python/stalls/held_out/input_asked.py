"""A rank's launcher starts the worker, and the worker asks a question which nobody sees."""

import os
import subprocess
import sys

from team import RANK, Star


def confirm_overwrite():
    return input("results exist, overwrite? [y/n] ")


def work():
    star = Star()
    star.barrier()
    if RANK == 1:
        confirm_overwrite()
    star.barrier()


if "WORKER" in os.environ:
    work()
else:
    worker = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, env={**os.environ, "WORKER": "1"}
    )
    sys.exit(worker.wait())
