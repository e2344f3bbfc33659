"""Another process that answers over direct://, and a connection to it."""

import subprocess
import sys

from distributed.comm import connect

#: Serves until it is killed; what comes before it defines `answer(comm)`.
SERVE = """
import asyncio
from distributed.comm import listen

async def main():
    async with listen("direct://127.0.0.1:0", answer) as listener:
        print(listener.contact_address, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


class OtherProcess:
    """Runs a program that defines `answer(comm)`."""

    def __init__(self, program):
        command = [sys.executable, "-c", program + SERVE]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()

    async def __aenter__(self):
        self.comm = await connect(self.address)
        return self

    async def __aexit__(self, *_):
        self.comm.abort()
        self.process.kill()
        self.process.wait()
