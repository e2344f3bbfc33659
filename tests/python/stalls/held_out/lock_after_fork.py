"""A rank forks while another of its threads has the lock of the log; the child waits for it forever."""

import os
import threading
import time

from team import RANK, Star

log_lock = threading.Lock()


def write_log(text):
    with log_lock:
        time.sleep(0.4)


def keep_log():
    while True:
        write_log("alive")


def evaluate_in_child():
    child = os.fork()
    if child == 0:
        write_log("evaluation has begun")
        os._exit(0)
    os.waitpid(child, 0)


star = Star()
star.barrier()
if RANK == 0:
    threading.Thread(target=keep_log, daemon=True).start()
    time.sleep(0.1)
    evaluate_in_child()
star.barrier()
