"""A coroutine waits for its child process, which computes for 10 s."""

import asyncio
import sys

from team import RANK, Star

WORK = "import time; end = time.monotonic() + 10\nwhile time.monotonic() < end: sum(range(10000))"


async def step():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", WORK)
    await child.wait()


star = Star()
while True:
    if RANK == 2:
        asyncio.run(step())
    star.barrier()
