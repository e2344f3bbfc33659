"""Forks a process for whoever asks.

The guardian asks over a Unix socket and hands over what it would have given the shim: the
instructions, the status pipe, and the output. The new process is forked twice, so that its parent
is the guardian, which adopts, watches and reaps it like every process that it executed.

*Invariant:* a process is forked only from one thread that never touched a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from cuda_cluster_fork import birth
from cuda_cluster_fork.pipe import Pipe

BACKLOG = 1024
LONGEST_REQUEST = 64 << 10


@dataclass
class Newborn:
    """What a process is forked with."""

    connection: socket.socket
    guardian: int
    instructions: int
    status: int
    #: One descriptor for both streams, or one for each.
    outputs: list[int]

    def wait_for_guardian(self) -> None:
        """Waits until the guardian says that this process may begin: one that the guardian does not
        know of would be there twice."""
        birth.die_with(self.guardian)
        with self.connection:
            if not self.connection.recv(64):
                os._exit(125)

    def become(self, pipe: Pipe) -> birth.Instructions:
        """Makes this process what its instructions say, and returns them."""
        with os.fdopen(self.instructions) as file:
            orders: birth.Instructions = json.load(file)
        birth.become(orders, self.guardian, pipe, self.outputs)
        return orders


def listen(path: str) -> socket.socket:
    """The socket at which a guardian asks."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def unsafe() -> str | None:
    """Why this process must not be forked, or None."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"what was imported started {threads - 1} threads"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # The one that read the directory.
        if target.startswith("/dev/nvidia"):
            return f"what was imported opened {target}"
    return None


def answer(listener: socket.socket) -> Newborn | None:
    """Forks for the next request. Returns None here, and in the new process what it is born with."""
    connection, _ = listener.accept()
    try:
        text, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 4)
        if has_gone(connection):
            _close(descriptors)
            connection.close()
            return None
        instructions, status, *outputs = descriptors
        guardian = json.loads(text)["guardian"]
        newborn = Newborn(connection, guardian, instructions, status, outputs)
        pid = fork(listener)
        if pid == 0:
            return newborn
        _close(descriptors)
        told: dict[str, int | str] = {"pid": pid}
    except (OSError, ValueError) as error:
        told = {"refused": str(error)}
    with connection, contextlib.suppress(OSError):
        # Who asked may have gone, or wait no longer: then the new process ends by itself.
        connection.send(json.dumps(told).encode())
    return None


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def has_gone(connection: socket.socket) -> bool:
    """Whether the other end was closed."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def fork(listener: socket.socket) -> int:
    """Forks a grandchild, which its guardian adopts; returns its process id, and there 0."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = -1
        try:
            child = _fork_again(writer)
        finally:
            if child != 0:
                os._exit(0)
        _close((reader, writer))
        listener.close()
        return 0
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader) as pipe:
        return int(pipe.read() or refuse("the system forks no further"))


def _fork_again(writer: int) -> int:
    """The process in between: it only forks and tells the number; its caller ends it. Returns 0 in
    the new one."""
    child = os.fork()
    if child != 0:
        # It leads its own group before anybody learns its number.
        os.setpgid(child, child)
        os.write(writer, str(child).encode())
    return child


def refuse(reason: str) -> NoReturn:
    """Raises why there is no new process."""
    raise OSError(reason)
