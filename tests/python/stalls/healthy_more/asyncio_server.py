"""Rank 0 answers the others over streams, each of which asks every two seconds."""

import asyncio
import os

RANK = int(os.environ["RANK"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


async def answer(reader, writer):
    while await reader.readline():
        await asyncio.sleep(0.3)
        writer.write(b"ok\n")


async def main():
    if RANK == 0:
        server = await asyncio.start_server(answer, HOST, PORT)
        await server.serve_forever()
    while True:
        try:
            reader, writer = await asyncio.open_connection(HOST, PORT)
            break
        except OSError:
            await asyncio.sleep(0.1)
    while True:
        writer.write(b"?\n")
        await reader.readline()
        await asyncio.sleep(2)


asyncio.run(main())
