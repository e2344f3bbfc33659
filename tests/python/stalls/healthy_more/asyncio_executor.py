"""A coroutine waits for a computation of 10 s in a thread."""

import asyncio
import hashlib
import time

from team import RANK, Star


def compute():
    end = time.monotonic() + 10
    while time.monotonic() < end:
        hashlib.sha256(bytes(1 << 22)).digest()


async def step():
    await asyncio.to_thread(compute)


star = Star()
while True:
    if RANK == 1:
        asyncio.run(step())
    star.barrier()
