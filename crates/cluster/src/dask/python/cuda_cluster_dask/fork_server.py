"""The fork server: imports once, then forks a process for whoever asks.

A child of the scheduler's process, or of the first worker's where the scheduler is elsewhere, forked
before that has a second thread, CUDA or UCX. The
guardian asks over a Unix socket and hands over what it would have given the shim: the
instructions, the status pipe, and the output. The new process is forked twice, so that its parent
is the guardian, which adopts, watches and reaps it like every process that it executed.

*Invariant:* a process is forked only from one thread that never touched a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from cuda_cluster_dask import birth, imports, internals, process
from cuda_cluster_dask.failure import StartFailure, describe
from cuda_cluster_dask.status import Status

if TYPE_CHECKING:
    from cuda_cluster_dask.settings import ForkServer, WorkerSettings

BACKLOG = 1024
LONGEST_REQUEST = 64 << 10

#: Dask's configuration, file by file.
Files = list[dict[str, Any]]


def start(fork: ForkServer) -> bool:
    """Forks the server off this process; False, with the reason in the log, if that would not be
    safe."""
    path = fork["socket"]
    if os.path.exists(path):
        os.unlink(path)
    # What a worker can do without, or tells better itself.
    later = [name for name in fork["imports"] if name.startswith("dask_cuda.")]
    imports.load([name for name in fork["imports"] if name not in later])
    imports.load_early(later)
    reason = unsafe()
    if reason is not None:
        print(f"workers are executed, not forked: {reason}", file=sys.stderr)
        return False
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    # Objects that live on are not written to by collections, and stay shared.
    gc.freeze()
    parent = os.getpid()
    if os.fork() == 0:
        birth.die_with(parent)
        birth.name("dask fork server")
        serve(listener)
    listener.close()
    return True


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


def serve(listener: socket.socket) -> NoReturn:
    """Forks for every request, for ever; ends with the scheduler's process."""
    files = internals.configuration_files()
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                text, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
                if has_gone(connection):
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                pid = fork(listener, connection, json.loads(text)["guardian"], descriptors, files)
                answer: dict[str, int | str] = {"pid": pid}
            except (OSError, ValueError) as error:
                answer = {"refused": str(error)}
            # Who asked may have gone, or wait no longer: then the new process ends by itself.
            with contextlib.suppress(OSError):
                connection.send(json.dumps(answer).encode())


def has_gone(connection: socket.socket) -> bool:
    """Whether the other end was closed."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def fork(
    listener: socket.socket,
    connection: socket.socket,
    guardian: int,
    descriptors: list[int],
    files: Files,
) -> int:
    """Forks a grandchild with the guardian as parent; returns its process id."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        unneeded = (reader, listener.fileno())
        _fork_again(writer, unneeded, connection, guardian, descriptors, files)
    os.close(writer)
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitpid(between, 0)
    with os.fdopen(reader) as pipe:
        return int(pipe.read() or refuse("the system forks no further"))


def refuse(reason: str) -> NoReturn:
    """Raises why there is no new process."""
    raise OSError(reason)


def _fork_again(
    writer: int,
    unneeded: Iterable[int],
    connection: socket.socket,
    guardian: int,
    descriptors: list[int],
    files: Files,
) -> NoReturn:
    """The process in between: it only forks, tells the number, and ends."""
    try:
        child = os.fork()
        if child == 0:
            for descriptor in (writer, *unneeded):
                os.close(descriptor)
            instructions, status, output = descriptors
            live(connection, guardian, instructions, status, output, files)
        # It leads its own group before anybody learns its number.
        os.setpgid(child, child)
        os.write(writer, str(child).encode())
    finally:
        os._exit(0)


def live(
    connection: socket.socket,
    guardian: int,
    instructions: int,
    status: int,
    output: int,
    files: Files,
) -> NoReturn:
    """The life of a forked process, which ends here. It begins when the guardian says so: one that
    the guardian does not know of would be there twice."""
    birth.die_with(guardian)
    with connection:
        if not connection.recv(64):
            os._exit(125)
    pipe = Status(status)
    try:
        with os.fdopen(instructions) as file:
            orders: birth.Instructions = json.load(file)
        birth.become(orders, guardian, pipe, output)
        role = orders["program"]["argv"][-1]
        settings = cast("WorkerSettings", process.settings_here())
        process_name = settings["name"]
        birth.name(f"dask {role} {process_name}")
        refresh(files)
    except BaseException as error:
        pipe.failed(str(error) if isinstance(error, StartFailure) else describe(error))
        os._exit(125)
    process.leave(process.run(role, settings, pipe))


def refresh(files: Files) -> None:
    """Renews what was worked out at import for another process; `files` is Dask's configuration in
    files, which takes long to read."""
    if "numpy.random" in sys.modules:
        # Else all workers would draw the same numbers; `random` renews itself.
        sys.modules["numpy.random"].seed()
    random.seed()
    internals.refresh_configuration(files)
