"""A rank joins a queue whose threads run programs that wait for 9 s."""

import queue
import subprocess
import threading

from team import RANK, Star


def run():
    while True:
        subprocess.run(["sleep", str(orders.get())], check=True)
        orders.task_done()


star = Star()
orders = queue.Queue()
if RANK == 3:
    for _ in range(2):
        threading.Thread(target=run, daemon=True).start()
while True:
    if RANK == 3:
        for seconds in (9, 1, 2):
            orders.put(seconds)
        orders.join()
    star.barrier()
