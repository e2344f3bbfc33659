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
    def __init__(self, process):
        self.process = process
        self.link = f"cc{process.pid % 100_000}"
        # A range for tests of networks.
        self.here, self.there = (f"198.18.{process.pid % 250}.{last}" for last in (1, 2))

    def command(self, *arguments):
        """Run there."""
        return ["nsenter", "--net", "--target", str(self.process.pid), *arguments]

    def join(self):
        pid = str(self.process.pid)
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


@contextlib.contextmanager
def another_host():
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    host = Host(process)
    try:
        host.join()
        yield host
    finally:
        subprocess.run(["ip", "link", "delete", host.link], check=False, capture_output=True)
        process.stdin.close()
        process.stdout.close()
        process.wait()
