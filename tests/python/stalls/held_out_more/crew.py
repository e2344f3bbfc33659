"""Three ways in which ranks of a plain Python program meet: a hub, a tree, and counters in a shared file."""

import mmap
import os
import selectors
import socket
import struct
import tempfile
import time

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def connect(port):
    while True:
        try:
            return socket.create_connection((HOST, port))
        except OSError:
            time.sleep(0.05)


def receive(link, size):
    got = b""
    while len(got) < size:
        more = link.recv(size - len(got))
        if not more:
            raise EOFError("a rank has gone")
        got += more
    return got


class Hub:
    """Rank 0 hears whoever speaks first, and answers when all have spoken."""

    def __init__(self):
        if RANK:
            self.link = connect(PORT)
            self.link.sendall(bytes([RANK]))
            return
        self.selector, self.links = selectors.DefaultSelector(), []
        with socket.create_server((HOST, PORT), backlog=SIZE) as listener:
            for _ in range(SIZE - 1):
                link, _ = listener.accept()
                receive(link, 1)
                self.links.append(link)
                self.selector.register(link, selectors.EVENT_READ)

    def meet(self):
        if RANK:
            self.link.sendall(b"?")
            receive(self.link, 1)
            return
        missing = SIZE - 1
        while missing:
            for key, _ in self.selector.select():
                receive(key.fileobj, 1)
                missing -= 1
        for link in self.links:
            link.sendall(b"!")


class Tree:
    """Sums go up a binary tree and come down again: rank 3 is below 1, and 1 and 2 are below 0."""

    def __init__(self):
        below = [i for i in (2 * RANK + 1, 2 * RANK + 2) if i < SIZE]
        self.below = []
        if below:
            with socket.create_server((HOST, PORT + 1 + RANK), backlog=SIZE) as listener:
                self.below = [listener.accept()[0] for _ in below]
        self.above = connect(PORT + 1 + (RANK - 1) // 2) if RANK else None

    def total(self, value):
        for link in self.below:
            value += struct.unpack("q", receive(link, 8))[0]
        if self.above:
            self.above.sendall(struct.pack("q", value))
            (value,) = struct.unpack("q", receive(self.above, 8))
        for link in self.below:
            link.sendall(struct.pack("q", value))
        return value

    def meet(self):
        self.total(0)


class Counters:
    """Each rank counts its rounds in a file that all map, and looks at those of the others every 20 ms."""

    def __init__(self):
        path = os.path.join(tempfile.gettempdir(), f"held-out-{PORT}.counters")
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, 8 * SIZE)
        self.rounds = mmap.mmap(file, 8 * SIZE)
        os.close(file)
        self.round = 0

    def meet(self):
        self.round += 1
        struct.pack_into("q", self.rounds, 8 * RANK, self.round)
        while min(struct.unpack_from(f"{SIZE}q", self.rounds)) < self.round:
            time.sleep(0.02)
