"""Another process that answers over direct://, and a connection to it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
        self._said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._said, text=True)
        self.address = self.process.stdout.readline().strip()

    def condition(self):
        """What both processes are doing, and what the other one has said, for a failure's message."""
        self._said.seek(0)
        return "; ".join(
            [
                f"the other process: ended with {self.process.poll()}, said {self._said.read()[-1500:]!r}",
                f"its threads: {threads(self.process.pid)}",
                f"ours: {threads(os.getpid())}",
            ]
        )

    async def __aenter__(self):
        self.comm = await connect(self.address)
        return self

    async def __aexit__(self, *_):
        self.comm.abort()
        self.process.kill()
        self.process.wait()
        self._said.close()


def threads(process):
    """The threads of a process: name, state, ticks of CPU, and where each waits in the kernel."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            state, ticks = rest.split()[0], rest.split()[11:13]
            found.append(f"{name} {state} {'+'.join(ticks)} {(task / 'wchan').read_text()}")
        except OSError:
            continue
    return found
