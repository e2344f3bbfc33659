"""Wires that are not there: what a worker of Dask gets from another, and sends it, takes as long as a wire
of a given bandwidth would.

Loaded by each worker (`--preload`). `CUDA_CLUSTER_TEST_WIRES` names a JSON file: `port`, the first of the
workers' ports, and `bytes_per_s`, a row a sender with a column a receiver, both in the order of ports; null
is no limit. Each direction of each pair is a wire of its own, on which messages pass one after the other,
as on NVLinks. Workers talk over connections that one of them has opened, so limiting what goes over those
that this process opens limits each byte once.

It waits until the wire would have carried a message. It cannot make a message faster: where this machine
takes longer, that is what it takes. `bench.py` measures how exact it is.
"""

import asyncio
import json
import os
import time

from dask.sizeof import sizeof
from distributed.comm import tcp
from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends

#: Smaller messages are not data.
SMALL = 1 << 14


class Wire:
    """One direction of a pair."""

    def __init__(self, bytes_per_s):
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0

    async def carry(self, size, began):
        """Returns when a message that began then would have passed."""
        self.free_at = max(self.free_at, began) + size / self.bytes_per_s
        wait = self.free_at - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)


class Limited(tcp.TCP):
    """A connection to another worker."""

    incoming = outgoing = None

    async def read(self, deserializers=None):
        message = await super().read(deserializers)
        size = bytes_of(message)
        if self.incoming is not None and size > SMALL:
            # Since when the sender has sent is not known here. It is what it took at most: a wire carries
            # far less than this machine.
            await self.incoming.carry(size, time.monotonic() - size / MACHINE)
            if self.closed():
                raise CommClosedError("closed while data passed the wire")
        return message

    async def write(self, msg, serializers=None, on_error="message"):
        began = time.monotonic()
        size = await super().write(msg, serializers, on_error)
        if self.outgoing is not None and size > SMALL:
            await self.outgoing.carry(size, began)
        return size


#: Bytes per second between two processes of this machine over TCP, about.
MACHINE = 1.5e9


def bytes_of(message):
    """Of what a message carries: results, or bytes that were asked for."""
    data = message.get("data") if isinstance(message, dict) else None
    if data is None:
        return 0
    if isinstance(data, dict):
        return sum(map(sizeof, data.values()))
    return getattr(data, "nbytes", None) or sizeof(data)


class Connector(tcp.TCPConnector):
    comm_class = Limited
    own = None

    async def connect(self, address, deserialize=True, **connection_args):
        comm = await super().connect(address, deserialize, **connection_args)
        peer = int(address.rpartition(":")[2]) - FIRST
        if self.own is not None and 0 <= peer < len(ROWS):
            comm.incoming, comm.outgoing = wire(peer, self.own), wire(self.own, peer)
        return comm


def wire(sender, receiver):
    if (sender, receiver) not in WIRES:
        rate = ROWS[sender][receiver]
        WIRES[sender, receiver] = None if rate is None else Wire(rate)
    return WIRES[sender, receiver]


with open(os.environ["CUDA_CLUSTER_TEST_WIRES"]) as file:
    _asked = json.load(file)
FIRST, ROWS, WIRES = _asked["port"], _asked["bytes_per_s"], {}
backends["tcp"]._connector_class = Connector


def dask_setup(worker):
    Connector.own = worker.port - FIRST
