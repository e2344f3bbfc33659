"""A coroutine calls what blocks, so that the one which would fill the queue never runs."""

import asyncio
import os
import queue

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
requests = queue.Queue()


async def consume():
    return requests.get()


async def produce():
    await asyncio.sleep(0.1)
    requests.put(1)


async def serve():
    arrived, release = asyncio.Semaphore(0), asyncio.Event()

    async def one(reader, writer):
        await reader.readexactly(1)
        arrived.release()
        await release.wait()
        writer.write(b"!")
        await writer.drain()

    await asyncio.start_server(one, HOST, PORT)
    for _ in range(SIZE - 1):
        await arrived.acquire()
    release.set()
    await asyncio.sleep(1)


async def take_part():
    while True:
        try:
            reader, writer = await asyncio.open_connection(HOST, PORT)
            break
        except OSError:
            await asyncio.sleep(0.05)
    if RANK == 2:
        producer = asyncio.ensure_future(produce())
        await consume()
        await producer
    writer.write(b"?")
    await reader.readexactly(1)


asyncio.run(take_part() if RANK else serve())
