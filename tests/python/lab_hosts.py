"""Hosts of a lab: each has a network, processes, mounts, a name, /dev/shm and a small disk of its own. They
share this machine's kernel, its clock and its CPUs.

A host can be switched off in a moment, frozen, and cut off; see `lab_wire.py` for its line. Needs root, in a
network that is the lab's own (`scripts/own-network.sh`).

*Invariant:* what is switched off has no process left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hosts import obstacle
from lab_wire import End, Wire

NETWORK = "198.18.77"  # Of the range for tests of networks.
DESK = f"{NETWORK}.250"  # This process's own end.
MTU = 9000

INIT = """
mount -t proc proc /proc
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size="$4" tmpfs "$1"
mount --bind "$2" /etc/hosts
hostname "$3"
ip link set lo up
trap '' CHLD
echo
exec cat
"""


def unified() -> Path | None:
    """Where the control groups of version 2 are."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(mount.split()[4])
    return None


def lab_obstacle() -> str | None:
    """Why there can be no lab here, or None."""
    if (why := obstacle()) is not None:
        return why
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    groups = unified()
    if groups is None or not os.access(groups, os.W_OK):
        return "no control groups of version 2 can be made here"
    return None


class Host:
    """One of them. `disk` is where its own disk is: the same path on each, and another disk."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number = lab, number
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number + 1}"
        self.hosts = lab.root / f"{self.name}.hosts"
        self.group = lab.group / self.name
        self.disk = lab.disk
        self.init: subprocess.Popen[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self.init is not None

    def switch_on(self) -> None:
        self.names_known(True)
        self.group.mkdir(exist_ok=True)
        apart = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
        arguments = [str(self.disk), str(self.hosts), self.name, self.lab.disk_size]
        self.init = subprocess.Popen(
            self._grouped("unshare", *apart, "sh", "-euc", INIT, "sh", *arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.init.stdout is not None
        assert self.init.stdout.readline() == b"\n", f"{self.name} does not start"
        device = f"cc{os.getpid() % 100_000}h{self.number}"
        end = End.made(device)
        pid = self._first()
        subprocess.run(["ip", "link", "set", device, "netns", str(pid)], check=True)
        for words in (
            ["ip", "link", "set", device, "name", "line"],
            ["ip", "address", "add", f"{self.address}/24", "dev", "line"],
            ["ip", "link", "set", "line", "mtu", str(MTU), "up"],
        ):
            subprocess.run(["nsenter", "--net", "--target", str(pid), *words], check=True)
        self.lab.wire.attach(self.address, end)

    def switch_off(self) -> None:
        """Takes its power: nobody says goodbye, and what it had in memory and on its disk is gone."""
        if self.init is None:
            return
        self.lab.wire.set(self.address, cut=True)
        (self.group / "cgroup.kill").write_text("1")
        for pipe in (self.init.stdin, self.init.stdout):
            assert pipe is not None
            pipe.close()
        self.init.wait()
        self.init = None
        self.lab.wire.detach(self.address)
        end = time.monotonic() + 20
        while self.processes(everything=True):
            assert time.monotonic() < end, f"{self.name} has processes left: {self.processes(True)}"
            time.sleep(0.01)
        while "populated 1" in (self.group / "cgroup.events").read_text():
            time.sleep(0.01)
        for group in sorted(self.group.rglob("*"), reverse=True):
            if group.is_dir():
                group.rmdir()

    def command(self, *arguments: str) -> list[str]:
        """A command that runs there."""
        apart = ["--net", "--pid", "--mount", "--uts", "--ipc", "--target", str(self._first())]
        return self._grouped("nsenter", *apart, "--", *arguments)

    def ask(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end."""
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout, check=False
        )

    def signal(self, entered: subprocess.Popen[str], number: signal.Signals) -> None:
        """Sends a signal to what a command of `command` runs there."""
        for child in Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text().split():
            os.kill(int(child), number)

    def freeze(self, frozen: bool) -> None:
        """Stops all of its processes, which don't notice, or has them go on."""
        (self.group / "cgroup.freeze").write_text(str(int(frozen)))

    def names_known(self, known: bool) -> None:
        """Whether it can resolve the names of the others."""
        lines = ["127.0.0.1 localhost"]
        if known:
            lines += [f"{NETWORK}.{number + 1} host{number}" for number in range(self.lab.size)]
        # In place: it is mounted there.
        self.hosts.write_text("\n".join(lines) + "\n")

    def processes(self, everything: bool = False) -> dict[int, str]:
        """Its processes, but for its first and those that enter it, by this machine's numbers."""
        found = {}
        for tasks in self.group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in map(int, tasks.read_text().split()):
                    with contextlib.suppress(OSError):
                        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                        mine = words.startswith(("cat ", "unshare ", "nsenter "))
                        if everything or not mine:
                            found[pid] = words[:100]
        return found

    def path(self, inside: Path | str) -> Path:
        """A path of its mounts, as this process reaches it."""
        return Path(f"/proc/{self._first()}/root{inside}")

    def _first(self) -> int:
        assert self.init is not None, f"{self.name} is off"
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def _grouped(self, *arguments: str) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs; exec "$@"', "sh", *arguments]


class Lab:
    """Some hosts, and this process's own end of their wire."""

    def __init__(self, size: int, seed: int, disk: Path, disk_size: str = "48m") -> None:
        groups = unified()
        assert groups is not None
        self.size, self.disk, self.disk_size = size, disk, disk_size
        self.root = Path(tempfile.mkdtemp(prefix="cc-lab", dir="/tmp"))
        self.group = groups / f"cc-lab-{os.getpid()}"
        self.group.mkdir()
        self.wire = Wire(seed)
        self.hosts = [Host(self, number) for number in range(size)]

    def connect_desk(self) -> None:
        end = End.made("desk")
        for words in (
            ["ip", "address", "add", f"{DESK}/24", "dev", "desk"],
            ["ip", "link", "set", "desk", "mtu", str(MTU), "up"],
        ):
            subprocess.run(words, check=True)
        self.wire.attach(DESK, end)

    def close(self) -> None:
        for host in self.hosts:
            host.switch_off()
            with contextlib.suppress(FileNotFoundError):
                host.group.rmdir()
        self.wire.close()
        self.group.rmdir()
        shutil.rmtree(self.root)


@contextlib.contextmanager
def lab(size: int, seed: int, disk: Path) -> Iterator[Lab]:
    """A lab whose hosts are on."""
    made = Lab(size, seed, disk)
    try:
        made.connect_desk()
        for host in made.hosts:
            host.switch_on()
        yield made
    finally:
        made.close()
