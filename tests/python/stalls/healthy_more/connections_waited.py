"""A rank waits for the first of three children that has something to say; each waits for 9 to 13 s."""

import multiprocessing
import multiprocessing.connection
import time

from team import RANK, Star


def child(link, seconds):
    while True:
        time.sleep(seconds)
        link.send(seconds)


if __name__ == "__main__":
    star = Star()
    links = []
    if RANK == 3:
        for seconds in (9, 11, 13):
            here, there = multiprocessing.Pipe()
            multiprocessing.Process(target=child, args=(there, seconds), daemon=True).start()
            links.append(here)
    while True:
        if RANK == 3:
            for link in multiprocessing.connection.wait(links):
                link.recv()
        star.barrier()
