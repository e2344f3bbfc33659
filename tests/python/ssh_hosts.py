"""Hosts that are reached by ssh: networks and names of their own on this machine, each with an sshd that has
a configuration, keys and a port of its own.

*Invariant:* nothing of this machine's ssh is used but its programs, and nothing is left.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import BUILT, RUNTIME

PORT = 2222
#: Daemons are not on everybody's path.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def missing():
    """Programs that are not installed."""
    needed = ("sshd", "ssh", "ssh-keygen", "ip", "unshare", "nsenter")
    return [one for one in needed if shutil.which(one, path=PATH) is None]


class SshHost:
    """A network, a name, mounts and an sshd; `number` is its address's."""

    def __init__(self, hosts, name, number):
        self.name, self.address = name, f"198.18.0.{number}"
        self.runtime = Path(RUNTIME) / name
        self._hosts, self._link, self._number = hosts, f"to-{name}", number
        self.programs = hosts.folder / name / "bin"

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.runtime.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, self.runtime, ignore_errors=True)
            self.programs.mkdir(parents=True)
            (self.programs / "cuda-cluster").symlink_to(BUILT)
            script = f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && hostname {self.name} && echo"
            self._place = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-euc", f"{script}; exec cat"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(self._close)
            if self._place.stdout.readline() != b"\n":
                pytest.skip("no host with mounts and a name of its own can be made here")
            self._join()
            stack.callback(run, "ip", "link", "delete", self._link, check=False)
            self._start()
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def command(self, *words):
        return ["nsenter", "--net", "--uts", "--mount", "--target", str(self._place.pid), *words]

    def set(self, state):
        """The link: up or down."""
        run("ip", "link", "set", self._link, state)

    def processes(self):
        """What of our programs runs there, by number."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{entry}/environ").read_bytes()
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if f"XDG_RUNTIME_DIR={self.runtime}\0".encode() in environment:
                    found[int(entry)] = command
        return found

    def left(self):
        """What a cluster has left there."""
        return [str(path) for path in self.runtime.glob("cuda-cluster/*")] + self.working()

    def working(self):
        """Processes there that are not of ssh."""
        return [one for one in self.processes().values() if "sshd" not in one]

    def asked(self, *words):
        """What the program says there."""
        command = self.command("env", f"XDG_RUNTIME_DIR={self.runtime}", str(BUILT), *words)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def _join(self):
        pid = str(self._place.pid)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "far", "netns", pid)
        run("ip", "link", "set", self._link, "master", "hosts")
        run(*self.command("ip", "address", "add", f"{self.address}/24", "dev", "far"))
        run(*self.command("ip", "link", "set", "far", "up"))
        run(*self.command("ip", "link", "set", "lo", "up"))
        self.set("up")

    def _start(self):
        folder = self._hosts.folder
        # As if the wheel were installed there.
        names = [name for name in ("PYTHONPATH", "CUDA_CLUSTER_COMM") if name in os.environ]
        given = " ".join(f"{name}={os.environ[name]}" for name in names)
        path = os.pathsep.join([str(self.programs), "/usr/local/bin", "/usr/bin", "/bin"])
        lines = [
            f"Port {PORT}",
            f"ListenAddress {self.address}",
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/user_key.pub",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            f"SetEnv PATH={path} XDG_RUNTIME_DIR={self.runtime} HOME={folder} {given}",
        ]
        config = folder / self.name / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        log = folder / self.name / "sshd.log"
        sshd = shutil.which("sshd", path=PATH)
        self._sshd = subprocess.Popen(self.command(sshd, "-D", "-f", str(config), "-E", str(log)))
        deadline = time.monotonic() + 30
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            assert self._sshd.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def _end(self):
        for pid, command in self.processes().items():
            if "sshd" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._sshd.terminate()
        self._sshd.wait()

    def _close(self):
        self._place.stdin.close()
        self._place.stdout.close()
        self._place.wait()


class SshHosts:
    """Hosts of these names, from which this one is reached at `here`."""

    here = "198.18.0.1"

    def __init__(self, *names):
        self._names = names

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cch")))
            for key in ("host_key", "user_key", "other_key"):
                run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
            run("ip", "link", "add", "hosts", "type", "bridge")
            stack.callback(run, "ip", "link", "delete", "hosts", check=False)
            run("ip", "address", "add", f"{self.here}/24", "dev", "hosts")
            run("ip", "link", "set", "hosts", "up")
            numbered = enumerate(self._names, start=2)
            hosts = [SshHost(self, name, number) for number, name in numbered]
            self._configure(hosts)
            self.all = {host.name: stack.enter_context(host) for host in hosts}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def __getitem__(self, name):
        return self.all[name]

    def _configure(self, hosts):
        """What ssh knows of the hosts, and of some that are not there."""
        known, lines = self.folder / "known_hosts", []
        key = (self.folder / "host_key.pub").read_text()
        gone = [("refusing", self.here, "user_key"), ("absent", "198.18.0.99", "user_key")]
        keyless = [(f"keyless-{host.name}", host.address, "other_key") for host in hosts]
        there = [(host.name, host.address, "user_key") for host in hosts]
        for name, address, identity in there + keyless + gone:
            lines += [f"Host {name}", f"  HostName {address}", f"  IdentityFile {self.folder / identity}"]
        lines += [
            "Host *", "  User root", f"  Port {PORT}", "  IdentitiesOnly yes", "  IdentityAgent none",
            f"  UserKnownHostsFile {known}", "  StrictHostKeyChecking yes", "  ConnectTimeout 5",
        ]  # fmt: skip
        known.write_text("".join(f"[{host.address}]:{PORT} {key}" for host in hosts))
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")
        (self.folder / "hosts.yaml").write_text(
            f"version: 1\nengine: dask\ndask: {{ssh: [ssh, -F, {self.folder / 'ssh_config'}]}}\n"
        )


def run(*command, check=True):
    subprocess.run(command, check=check, capture_output=not check)
