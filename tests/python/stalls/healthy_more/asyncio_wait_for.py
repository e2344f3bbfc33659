"""A coroutine waits for news with a limit of 11 s, and goes on without."""

import asyncio
import contextlib

from team import RANK, Ring


async def step():
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 11)


ring = Ring()
while True:
    if RANK == 3:
        asyncio.run(step())
    ring.barrier()
