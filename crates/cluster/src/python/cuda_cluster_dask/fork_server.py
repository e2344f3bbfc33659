"""The fork server: imports once, then forks a process for whoever asks.

A child of the scheduler's process, or of the first worker's where the scheduler is elsewhere, forked
before that has a second thread, CUDA or UCX.

*Invariant:* what was worked out at import for one process is renewed for another.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn, cast

from cuda_cluster_dask import imports, internals, process
from cuda_cluster_dask.status import Status
from cuda_cluster_fork import birth, server
from cuda_cluster_fork.failure import StartFailure, describe

if TYPE_CHECKING:
    from cuda_cluster_dask.settings import ForkServer, WorkerSettings

#: Dask's configuration, file by file.
Files = list[dict[str, Any]]


def start(fork: ForkServer) -> bool:
    """Forks the server off this process; False, with the reason in the log, if that would not be
    safe."""
    # What a worker can do without, or tells better itself.
    later = [name for name in fork["imports"] if name.startswith("dask_cuda.")]
    imports.load([name for name in fork["imports"] if name not in later])
    imports.load_early(later)
    reason = server.unsafe()
    if reason is not None:
        print(f"workers are executed, not forked: {reason}", file=sys.stderr)
        return False
    listener = server.listen(fork["socket"])
    # Objects that live on are not written to by collections, and stay shared.
    gc.freeze()
    parent = os.getpid()
    if os.fork() == 0:
        birth.die_with(parent)
        birth.name("dask fork server")
        serve(listener)
    listener.close()
    return True


def serve(listener: socket.socket) -> NoReturn:
    """Forks for every request, for ever; ends with the scheduler's process."""
    files = internals.configuration_files()
    while True:
        newborn = server.answer(listener)
        if newborn is not None:
            live(newborn, files)


def live(newborn: server.Newborn, files: Files) -> NoReturn:
    """The life of a forked process, which ends here."""
    newborn.wait_for_guardian()
    pipe = Status(newborn.status)
    try:
        orders = newborn.become(pipe)
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
