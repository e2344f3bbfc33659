"""Ranks are servers; clients come rarely: rank 1 asks rank 0 every 15 s."""

import asyncio
import os

RANK = int(os.environ["RANK"])
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


async def answer(reader, writer):
    while await reader.readline():
        writer.write(b"ok\n")


async def main():
    server = await asyncio.start_server(answer, HOST, PORT + RANK)
    if RANK != 1:
        await server.serve_forever()
    await asyncio.sleep(1)
    reader, writer = await asyncio.open_connection(HOST, PORT)
    while True:
        writer.write(b"?\n")
        await reader.readline()
        await asyncio.sleep(15)


asyncio.run(main())
