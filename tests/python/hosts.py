"""Another host: a network of its own, joined with this one by a link that can be lost.

This one must be the test's own, too: `scripts/own-network.sh` runs a command in one.
"""

import contextlib
import os
import shutil
import subprocess

import pytest


def obstacle():
    """Why no links can be made here, or None."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        return "only root can make a network, with ip and nsenter"
    links = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True, check=True)
    others = {line.split()[1] for line in links.stdout.splitlines()} - {"lo", "out"}
    return f"this network is not the test's own: {others}" if others else None


OBSTACLE = obstacle()
needs_network = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


class Host:
    def __init__(self, pid, namespaces):
        self.pid = pid
        self.namespaces = namespaces
        self.link = f"cc{pid % 100_000}"
        # A range for tests of networks.
        self.here, self.there = (f"198.18.{pid % 250}.{last}" for last in (1, 2))

    def command(self, *arguments):
        """Run there."""
        return ["nsenter", *self.namespaces, "--target", str(self.pid), *arguments]

    def join(self):
        pid = str(self.pid)
        made = subprocess.run(
            ["ip", "link", "add", self.link, "type", "veth", "peer", "name", "far", "netns", pid],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            pytest.skip(f"no network can be made here: {made.stderr.strip()}")
        for command in (
            ["ip", "address", "add", f"{self.here}/30", "dev", self.link],
            self.command("ip", "address", "add", f"{self.there}/30", "dev", "far"),
            self.command("ip", "link", "set", "far", "up"),
            self.command("ip", "link", "set", "lo", "up"),
        ):
            subprocess.run(command, check=True)
        self.set("up")

    def set(self, state):
        """The link: up or down."""
        subprocess.run(["ip", "link", "set", self.link, state], check=True)


#: What a host has of its own besides a network: processes, /dev/shm, a clock that began long ago.
OF_ITS_OWN = ["--pid", "--mount", "--time"]
ITS_CLOCK = ["--mount-proc", "--monotonic", "5000000", "--boottime", "5000000"]


@contextlib.contextmanager
def namespaces(*own):
    """A process in namespaces of its own; its number."""
    clock = ITS_CLOCK if own and set(OF_ITS_OWN) <= set(own) else []
    memory = "mount -t tmpfs memory /dev/shm; " if "--mount" in own else ""
    process = subprocess.Popen(
        ["unshare", *own, *clock, "--fork", "--kill-child", "sh", "-c", f"{memory}echo; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            yield int(children.read().split()[0])
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


@contextlib.contextmanager
def another_host(*more):
    """A host with a network of its own, and `more` namespaces, as unshare names them."""
    own = ["--net", *more]
    with namespaces(*own) as pid:
        host = Host(pid, own)
        try:
            host.join()
            yield host
        finally:
            subprocess.run(["ip", "link", "delete", host.link], check=False, capture_output=True)
