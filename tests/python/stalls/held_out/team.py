"""Three ways in which ranks of a plain Python program meet: a star of connections, a ring, and files that are polled."""

import os
import tempfile
import time
from multiprocessing.connection import Client, Listener

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = int(os.environ["MASTER_PORT"])
HOST = os.environ["MASTER_ADDR"]
KEY = b"held out"


def _connect(port):
    while True:
        try:
            return Client((HOST, port), authkey=KEY)
        except OSError:
            time.sleep(0.05)


class Star:
    """Rank 0 collects from all and answers all."""

    def __init__(self):
        self.links = {}
        if RANK == 0:
            with Listener((HOST, PORT), authkey=KEY, backlog=SIZE) as listener:
                for _ in range(SIZE - 1):
                    link = listener.accept()
                    self.links[link.recv()] = link
        else:
            self.links[0] = _connect(PORT)
            self.links[0].send(RANK)

    def all_gather(self, value):
        if RANK:
            self.links[0].send(value)
            return self.links[0].recv()
        values = [value] + [self.links[i].recv() for i in range(1, SIZE)]
        for i in range(1, SIZE):
            self.links[i].send(values)
        return values

    def barrier(self):
        self.all_gather(None)


class Ring:
    """Each rank hears its left neighbour only."""

    def __init__(self):
        listener = Listener((HOST, PORT + 1 + RANK), authkey=KEY)
        if RANK == 0:
            self.right = _connect(PORT + 1 + (RANK + 1) % SIZE)
            self.left = listener.accept()
        else:
            self.left = listener.accept()
            self.right = _connect(PORT + 1 + (RANK + 1) % SIZE)

    def all_reduce(self, value):
        total = value
        for _ in range(SIZE - 1):
            self.right.send(value)
            value = self.left.recv()
            total += value
        return total

    def barrier(self):
        self.all_reduce(0)


class Files:
    """Each rank writes a file a round, and looks every 50 ms whether those of the others are there."""

    def __init__(self):
        self.folder = os.path.join(tempfile.gettempdir(), f"held-out-{PORT}")
        os.makedirs(self.folder, exist_ok=True)
        self.round = 0

    def barrier(self):
        self.round += 1
        open(os.path.join(self.folder, f"{self.round}.{RANK}"), "w").close()
        wanted = [os.path.join(self.folder, f"{self.round}.{i}") for i in range(SIZE)]
        while not all(map(os.path.exists, wanted)):
            time.sleep(0.05)
