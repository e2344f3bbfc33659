"""Ranks that meet over TCP: rank 0 listens at MASTER_ADDR, the others connect to it. Or as STALLS_OVER says,
by a library: gloo, mpi.
"""

import importlib
import os
import socket
import struct
import time

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _receive(link, length):
    data = b""
    while len(data) < length:
        more = link.recv(length - len(data))
        if not more:
            raise ConnectionError("the peer has gone")
        data += more
    return data


class World:
    def __init__(self):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.links = {}
        if RANK == 0:
            listener = socket.create_server(address)
            for _ in range(SIZE - 1):
                link, _ = listener.accept()
                self.links[struct.unpack("i", _receive(link, 4))[0]] = link
        else:
            while True:
                try:
                    link = socket.create_connection(address)
                    break
                except OSError:
                    time.sleep(0.02)
            link.sendall(struct.pack("i", RANK))
            self.links[0] = link

    def all_reduce(self, value):
        if RANK:
            self.links[0].sendall(struct.pack("d", value))
            return struct.unpack("d", _receive(self.links[0], 8))[0]
        total = value + sum(struct.unpack("d", _receive(self.links[i], 8))[0] for i in range(1, SIZE))
        for i in range(1, SIZE):
            self.links[i].sendall(struct.pack("d", total))
        return total

    def barrier(self):
        self.all_reduce(0.0)

    def receive(self, source):
        return _receive(self.links[source], 8)

    def broadcast(self, value):
        if RANK:
            return struct.unpack("d", _receive(self.links[0], 8))[0]
        for i in range(1, SIZE):
            self.links[i].sendall(struct.pack("d", value))
        return value


def meet():
    """Those that the other ranks are met by."""
    over = os.environ.get("STALLS_OVER")
    return importlib.import_module(f"over_{over}").World() if over else World()
