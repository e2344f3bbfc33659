"""All ranks are done; the one that took the early way out has not told its writer thread to end."""

import queue
import threading

from crew import RANK, Hub

results = queue.Queue()


def write_out():
    while results.get() is not None:
        pass


def main():
    hub = Hub()
    threading.Thread(target=write_out, name="writer").start()
    for step in range(10):
        results.put(step)
        hub.meet()
    if RANK == 2:
        return
    results.put(None)


main()
