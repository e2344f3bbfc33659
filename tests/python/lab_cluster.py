"""The Dask cluster of a lab: an `up` with the scheduler on the first host, and one on each other that joins
it by the first one's name.

*Invariant:* an `up` that has ended was looked at before the next one is started there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import conftest  # noqa: F401 - names the program
import dask
from distributed import Client
from lab_hosts import Host, Lab

PROGRAM = os.environ["CUDA_CLUSTER_BIN"]
HOME, GUESTS = "home", "guests"
PORT = 8786
MACHINE = ["--simulate", "--topology", "dgx-h100", "--engine", "dask", "--python", sys.executable]
MACHINE += ["--memory-limit", "1GB", "--no-dashboard", "--ready-within", "5m"]

#: A connection on which nothing arrives any more breaks after 12 s, and a host is silent after 16 s, so that
#: days are shorter; data goes to the disk early, so that a full one is noticed.
DASK = {
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "80s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "0.002",
}


@dataclass
class Ended:
    """An `up` that has ended: its code, and what `ps -a` says why, or what it said itself."""

    host: int
    code: int
    cause: str
    output: str


class Up:
    """One `up` on a host."""

    def __init__(self, host: Host, name: str, *words: str) -> None:
        self.host, self.name = host, name
        self.output = tempfile.TemporaryFile("w+")
        command = [PROGRAM, "up", "--name", name, *MACHINE, "--host", host.address]
        command += ["--local-directory", f"{host.disk}/scratch", *words]
        self.process = subprocess.Popen(
            host.command(*command), stdout=self.output, stderr=subprocess.STDOUT, text=True
        )

    def ended(self) -> Ended:
        """What there is to see of its end."""
        self.output.seek(0)
        output = self.output.read()
        self.output.close()
        cause = ""
        if self.host.is_on:
            said = self.host.ask(PROGRAM, "ps", "-a", self.name).stdout.splitlines()
            cause = re.sub(r"\bat [-0-9:]{8,}T?[ 0-9:.Z]*", "", "".join(said[:1]))
            cause = "; ".join([cause] + [line for line in said if "asked to end" in line]) if cause else ""
        last = [line for line in output.splitlines() if line.startswith(("error", "stopping", "cluster: "))]
        # Workers of other hosts may go between why it ends and its end.
        why = [line for line in last[:-3] if "asked to end" in line]
        cause = cause or "; ".join(why + last[-3:])
        return Ended(self.host.number, self.process.returncode, cause, output[-1500:])


class Cluster:
    """All of them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.ups: dict[int, Up] = {}
        self._seen = ("", 0)
        # Workers import what they run.
        path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        os.environ.update(DASK, PYTHONPATH=path)
        dask.config.refresh()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        client = Client(f"tcp://{self.lab.hosts[0].address}:{PORT}", timeout=30, set_as_default=False)
        try:
            yield client
        finally:
            client.close(timeout=5)

    def state(self) -> dict | None:
        """What `ps` says where the scheduler is."""
        home = self.lab.hosts[0]
        said = home.ask(PROGRAM, "ps", HOME, "-o", "json") if home.is_on else None
        return json.loads(said.stdout) if said is not None and said.returncode == 0 else None

    def kill(self, host: Host, process: str) -> None:
        """Kills a process of the cluster there, if it is there."""
        name = GUESTS if host.number else HOME
        said = host.ask(PROGRAM, "ps", name, "-o", "json")
        if said.returncode == 0:
            state = json.loads(said.stdout)
            all_ = [*state["workers"], state["scheduler"] or {"name": ""}]
            for pid in (one["pid"] for one in all_ if one["name"] == process and one["pid"]):
                host.ask("kill", "-KILL", str(pid))

    def terminate(self, host: Host) -> None:
        """As a batch system does."""
        up = self.ups.get(host.number)
        if up is not None and up.process.poll() is None:
            host.signal(up.process, signal.SIGTERM)

    def bring_back(self, waits: bool, within: float) -> tuple[list[Ended], bool]:
        """Starts again what has ended, until all workers are there. `waits`: first for those that joined to
        give a scheduler up that has ended. Returns what had ended, and whether all are there."""
        ended, end = [], time.monotonic() + within
        home = self.ups.get(0)
        if waits and home is not None and (home.process.poll() is not None or not self.lab.hosts[0].is_on):
            while any(up.process.poll() is None for up in self.ups.values()):
                if time.monotonic() > end:
                    return ended, False
                time.sleep(0.2)
            end = time.monotonic() + within
        while not self._is_whole():
            if time.monotonic() > end:
                return ended, False
            for host in self.lab.hosts:
                up = self.ups.get(host.number)
                if up is not None and up.process.poll() is not None:
                    ended.append(up.ended())
                    del self.ups[host.number]
                if not host.is_on:
                    host.switch_on()
                if host.number not in self.ups:
                    self.ups[host.number] = self._up(host)
            time.sleep(0.3)
        return ended, True

    def joined(self) -> list[str]:
        """The workers that have joined, as the scheduler's host sees them."""
        state = self.state() or {}
        return [f"{one['name']} is {one['state']}" for one in state.get("joined", [])]

    def looked_at(self) -> str:
        """What `why` and the logs say on each host, for whoever asks why something waits."""
        said = [str(self.state())]
        for host in self.lab.hosts:
            if host.is_on:
                name = GUESTS if host.number else HOME
                said += [f"--- {host.name}", host.ask(PROGRAM, "why", name).stdout]
                logs = host.path(host.disk) / "cuda-cluster" / name / "logs"
                for log in sorted(logs.glob("*.log")):
                    said += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-40:]]
        return "\n".join(said)

    def running(self) -> list[str]:
        return [f"host{number}" for number, up in self.ups.items() if up.process.poll() is None]

    def reasons(self) -> list[str]:
        """Why workers that had joined went, as far as not told before."""
        said = self.lab.hosts[0].ask(PROGRAM, "events", HOME, "--json")
        records = [json.loads(line) for line in said.stdout.splitlines()]
        first = records[0]["at"] if records else ""
        # Another `up` begins another list.
        seen, self._seen = (self._seen[1] if first == self._seen[0] else 0), (first, len(records))
        return [record["reason"] for record in records[seen:] if record["event"] == "parted"]

    def down(self) -> dict[str, list[str]]:
        """Ends all in order; returns what is left on the hosts."""
        for number in sorted(self.ups, reverse=True):
            self.terminate(self.lab.hosts[number])
        for up in self.ups.values():
            up.process.wait(60)
            up.output.close()
        self.ups.clear()
        found = {}
        for host in self.lab.hosts:
            end = time.monotonic() + 20
            while (left := self._left(host)) and time.monotonic() < end:
                time.sleep(0.2)
            if left:
                found[host.name] = left
        return found

    def _left(self, host: Host) -> list[str]:
        """Processes, control groups, sockets and files, but for those of a cluster in which something died,
        which are kept for `ps -a`, and for the two by which Dask locks its directory."""
        runs = host.path(host.disk) / "cuda-cluster"
        kept = [run for run in runs.glob("*") if (run / "crashes").exists() or self._failed(host, run.name)]
        known = lambda path: any(path.is_relative_to(run) for run in kept) and not path.is_socket()
        files = [path for place in ("/dev/shm", host.disk) for path in host.path(place).rglob("*")]
        found = [path for path in files if not path.is_dir() and not known(path)]
        found = [path for path in found if path.name not in ("purge.lock", "global.lock")]
        groups = [path for path in host.group.iterdir() if path.is_dir()]
        return [*host.processes().values(), *map(str, found), *map(str, groups)]

    def _failed(self, host: Host, name: str) -> bool:
        return bool(host.ask(PROGRAM, "ps", "-a", name).stdout)

    def _up(self, host: Host) -> Up:
        if host.number == 0:
            return Up(host, HOME, "--gpus", "0", "--scheduler-port", str(PORT))
        return Up(host, GUESTS, "--gpus", "0-1", "--join", f"tcp://host0:{PORT}")

    def _is_whole(self) -> bool:
        if len(self.ups) < self.lab.size or len(self.running()) < self.lab.size:
            return False
        state = self.state()
        if state is None or state["state"] != "ready":
            return False
        there = [one for one in state.get("joined", []) if one["state"] == "ready"]
        return len(there) == 2 * (self.lab.size - 1)
