"""The wire between the hosts of a lab: packets go through this process, which delays, loses and drops them.

`tc netem` would do, but many kernels are built without it. Each host has one end of a TUN device; what a
host sends is read here, and written to the host whose address it has.

*Invariant:* packets between two hosts keep their order.
"""

from __future__ import annotations

import fcntl
import heapq
import ipaddress
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass

SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
TUN, WITHOUT_HEADER = 0x0001, 0x1000
LARGEST = 65535
VERSION_4 = 4


@dataclass
class End:
    """One host's end, and what its line is like now."""

    name: str
    descriptor: int
    cut: bool = False
    delay: float = 0.0
    loss: float = 0.0

    @classmethod
    def made(cls, name: str) -> End:
        """A new device, in this network until somebody moves it."""
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(
                descriptor, SET_INTERFACE, struct.pack("16sH22x", name.encode(), TUN | WITHOUT_HEADER)
            )
        except OSError:
            os.close(descriptor)
            raise
        return cls(name, descriptor)


class Wire:
    """Carries packets until it is closed."""

    def __init__(self, seed: int) -> None:
        self._ends: dict[bytes, End] = {}
        self._lock = threading.Lock()
        self._chance = random.Random(seed)
        self._later: list[tuple[float, int, bytes, bytes]] = []
        self._count = 0
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def attach(self, address: str, end: End) -> None:
        """Connects the end of a host; one that was there before is gone."""
        with self._lock:
            before = self._ends.pop(key(address), None)
            self._ends[key(address)] = end
        if before is not None:
            os.close(before.descriptor)
        os.write(self._wake, b".")

    def detach(self, address: str) -> None:
        """Takes a host's end away."""
        with self._lock:
            end = self._ends.pop(key(address), None)
        if end is not None:
            os.close(end.descriptor)
            os.write(self._wake, b".")

    def set(self, address: str, *, cut: bool = False, delay: float = 0.0, loss: float = 0.0) -> None:
        """What a host's line is like from now on; delay in seconds, each way."""
        with self._lock:
            if (end := self._ends.get(key(address))) is not None:
                end.cut, end.delay, end.loss = cut, delay, loss

    def close(self) -> None:
        os.write(self._wake, b"q")
        self._thread.join()
        with self._lock:
            for end in self._ends.values():
                os.close(end.descriptor)
            self._ends.clear()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while True:
            with self._lock:
                sources = {end.descriptor: source for source, end in self._ends.items()}
            due = self._later[0][0] - time.monotonic() if self._later else None
            try:
                ready, _, _ = select.select([self._woken, *sources], [], [], due and max(due, 0))
            except (OSError, ValueError):
                continue  # An end was taken away meanwhile.
            if self._woken in ready and b"q" in os.read(self._woken, 64):
                return
            for descriptor in ready:
                if descriptor in sources:
                    self._take(descriptor, sources[descriptor])
            self._deliver(time.monotonic())

    def _take(self, descriptor: int, source: bytes) -> None:
        for _ in range(64):
            with self._lock:
                start = self._ends.get(source)
                if start is None or start.descriptor != descriptor:
                    return
                try:
                    packet = os.read(descriptor, LARGEST)
                except BlockingIOError:
                    return
                except OSError:
                    # Its host was switched off.
                    del self._ends[source]
                    os.close(descriptor)
                    return
                if len(packet) < 20 or packet[0] >> 4 != VERSION_4:
                    continue
                goal = self._ends.get(packet[16:20])
                if goal is None or any(end.cut or self._is_lost(end) for end in (start, goal)):
                    continue
                at = time.monotonic() + start.delay + goal.delay
            self._count += 1
            heapq.heappush(self._later, (at, self._count, packet[16:20], packet))

    def _is_lost(self, end: End) -> bool:
        return end.loss > 0 and self._chance.random() < end.loss

    def _deliver(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, _, address, packet = heapq.heappop(self._later)
            with self._lock:
                end = self._ends.get(address)
                if end is None or end.cut:
                    continue
                try:
                    os.write(end.descriptor, packet)
                except OSError:
                    pass  # Lost, as in a queue that is full.


def key(address: str) -> bytes:
    """An address as packets have it."""
    return ipaddress.IPv4Address(address).packed
