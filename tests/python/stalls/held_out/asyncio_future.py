"""One of the futures that a rank gathers is never set."""

import asyncio

from team import RANK, Ring


async def wait_for_ack(acks, i):
    return await acks[i]


async def push_parameters():
    loop = asyncio.get_running_loop()
    acks = [loop.create_future() for _ in range(4)]
    for i in range(3):
        loop.call_later(0.1 * i, acks[i].set_result, i)
    await asyncio.gather(*(wait_for_ack(acks, i) for i in range(4)))


ring = Ring()
ring.barrier()
if RANK == 1:
    asyncio.run(push_parameters())
ring.barrier()
