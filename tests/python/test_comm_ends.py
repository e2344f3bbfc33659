"""direct://, the end of an interpreter in the middle of transfers: the process ends as it wanted to, and
its peer has read right bytes before it is told of the end."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed.comm import CommClosedError, listen
from distributed.protocol import to_serialize

from conftest import eventually
from test_comm import ADDRESS, descriptors, in_a_loop

SIZE = 5_000_000

#: Sends and receives until it ends, here or, its loop being in another thread, there.
PEER = """
import asyncio, atexit, os, signal, sys, threading, time
import numpy as np
import cuda_cluster.comm
from distributed.comm import connect
from distributed.protocol import to_serialize

route, address, size, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
if route == "tcp":
    cuda_cluster.comm._connect_unix = lambda names: None

async def travel(comm):
    async def write():
        number = 0
        while True:
            data = np.full(size, number % 251, dtype="u1")
            await comm.write({"number": number, "data": to_serialize(data)})
            number += 1
            if number == 3:
                enough.set()

    async def read():
        while True:
            await comm.read()

    await asyncio.gather(write(), read())

async def main():
    comm = await connect(address)
    travelling = asyncio.ensure_future(travel(comm))
    if threading.current_thread() is not threading.main_thread():
        await travelling
    while not enough.is_set():
        await asyncio.sleep(0.01)
    await asyncio.sleep(seconds)
    HERE

enough = threading.Event()
if THREAD:
    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    enough.wait()
    time.sleep(seconds)
    THERE
else:
    asyncio.run(main())
"""

#: What it does, whether its loop is in a daemon thread, and its exit status.
ENDS = {
    "it returns": ("pass", False, 0),
    "sys.exit": ("sys.exit(7)", False, 7),
    "it raises": ("1 / 0", False, 1),
    "os._exit": ("os._exit(7)", False, 7),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", False, -signal.SIGTERM),
    "atexit raises": ("atexit.register(lambda: 1 / 0)", False, 0),
    "it returns beside a loop": ("pass", True, 0),
    "sys.exit beside a loop": ("sys.exit(7)", True, 7),
    "atexit raises beside a loop": ("atexit.register(lambda: 1 / 0)", True, 0),
}


async def read_to_the_end(end):
    number = 0
    with contextlib.suppress(CommClosedError):
        while True:
            got = await end.read()
            assert got["number"] == number, (got["number"], number)
            assert len(got["data"]) == SIZE and (got["data"] == number % 251).all(), number
            number += 1
    return number


async def write_to_the_end(end):
    with contextlib.suppress(CommClosedError):
        while True:
            await end.write({"data": to_serialize(np.ones(SIZE, dtype="u1"))})


@pytest.mark.parametrize("route", ["copied", "mapped", "tcp", "ucx"])
@pytest.mark.parametrize("how", ENDS)
@in_a_loop
async def test_an_interpreter_that_ends_while_it_sends_and_receives(how, route):
    code, thread, status = ENDS[how]
    program = PEER.replace("THREAD", str(thread))
    for place, is_it in (("THERE", thread), ("HERE", not thread)):
        program = program.replace(place, code if is_it else "pass")
    before, accepted = descriptors(), asyncio.Queue()
    environment = {**os.environ, "DASK_DISTRIBUTED__COMM__DIRECT__ROUTE": route.replace("tcp", "auto")}
    async with listen(ADDRESS, accepted.put) as listener:
        moment = random.Random(how + route).random() / 5
        peer = subprocess.Popen(
            [sys.executable, "-c", program, route, listener.contact_address, str(SIZE), str(moment)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = await asyncio.wait_for(accepted.get(), 120)
        end.allow_offload = False
        try:
            both = asyncio.gather(read_to_the_end(end), write_to_the_end(end))
            number, _ = await asyncio.wait_for(both, 120)
            said = await asyncio.to_thread(peer.stderr.read)
            assert await asyncio.to_thread(peer.wait, 60) == status, said
            assert "Fatal" not in said and "panicked" not in said, said
            # It has sent more, of which the system discards what was not read.
            assert number >= 1, number
        finally:
            end.abort()
            peer.kill()
            peer.wait()
            peer.stderr.close()
    left = [one.name for one in Path("/dev/shm").glob(f"cuda-cluster-{os.getuid()}-*-{peer.pid}-*")]
    assert not left, left
    eventually(lambda: descriptors() <= before + 8, f"{before} descriptors, now {descriptors()}")
