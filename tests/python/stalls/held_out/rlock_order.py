"""Two threads of a rank take two locks in opposite orders."""

import threading
import time

from team import RANK, Ring

weights, metrics = threading.RLock(), threading.RLock()


def write_metrics():
    with metrics:
        time.sleep(0.3)
        with weights:
            pass


def apply_gradients():
    with weights:
        time.sleep(0.3)
        with metrics:
            pass


def step():
    if RANK == 1:
        threading.Thread(target=write_metrics, name="metrics").start()
        apply_gradients()


ring = Ring()
for _i in range(3):
    ring.barrier()
step()
ring.barrier()
