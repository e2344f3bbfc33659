"""A Dask cluster of which one worker has a task in which something is wrong: `dask_causes.py ADDRESS CAUSE`."""

import queue
import socket
import sys
import threading
import time

from distributed import Client


def computes():
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        sum(range(1000))


def sleeps():
    time.sleep(3600)


def own_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def queue_without_writer():
    queue.Queue().get()


def silent_server():
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname()).recv(1)


def many_small_tasks(n):
    time.sleep(0.05)
    return n


if __name__ == "__main__":
    address, cause = sys.argv[1:]
    with Client(address) as client:
        print("connected", flush=True)
        if cause == "many_small_tasks":
            for first in range(0, 10**6, 100):
                client.gather(client.map(many_small_tasks, range(first, first + 100)))
        workers = client.scheduler_info()["workers"]
        odd = next(one for one, told in workers.items() if told["name"] == "gpu2" or told["id"] == "gpu2")
        client.submit(globals()[cause], workers=[odd], pure=False).result()
