"""Another host: a network of its own, joined with this one by a link that can be lost."""

import contextlib
import os
import shutil
import subprocess

import pytest

#: Only root can make a network.
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"),
    reason="only root can make a network, with ip and nsenter",
)


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
