"""The life of one process: settings, role, end.

*Invariant:* the exit status is 0 exactly when the end was wished; unless the supervisor itself
wished it, the status pipe says what is to follow.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, cast

from cuda_cluster_dask import frames, imports, kept_ports, ports
from cuda_cluster_fork.failure import StartFailure, describe
from cuda_cluster_dask.status import Status

if TYPE_CHECKING:
    from distributed import Security

    from cuda_cluster_dask.settings import SchedulerSettings, Settings, Tls, WorkerSettings


#: Variables with the settings as JSON, in parts. What a process starts itself does not inherit them.
SETTINGS = "CUDA_CLUSTER_SECRET_SETTINGS_"


def main(role: str) -> NoReturn:
    """Runs a role and ends the process."""
    leave(run(role, settings_here(), Status.from_environment()))


def settings_here() -> Settings:
    """Takes this process's settings out of its environment."""
    parts = (os.environ.pop(f"{SETTINGS}{number}", "") for number in itertools.count())
    return cast("Settings", json.loads("".join(itertools.takewhile(bool, parts))))


def run(role: str, settings: Settings, status: Status) -> int:
    """Runs a role; returns the exit status."""
    try:
        if role == "scheduler":
            # Where it can't listen is told before there are workers, and mostly before what takes long
            # to import.
            kept_ports.choose(cast("SchedulerSettings", settings))
            ports.dashboard_address(settings["plan"]["dashboard_address"])
        status.step("importing distributed")
        return _run(role, settings, status)
    except StartFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        status.failed(str(failure))
    except asyncio.CancelledError:
        return 0  # Asked to end while it started.
    except BaseException as error:
        traceback.print_exc()
        if not status.is_ready:
            status.failed(describe(error))
    return 1


def _run(role: str, settings: Settings, status: Status) -> int:
    import dask

    from cuda_cluster_dask import internals

    values = settings["config"] | settings["plan"]["config"]
    dask.config.set({key: dask.config.interpret_value(value) for key, value in values.items()})
    if settings["plan"]["protocol"] == "direct":
        _check_direct()
    if settings["fork_server"] is not None:
        from cuda_cluster_dask import fork_server

        if fork_server.start(settings["fork_server"]):
            status.forks()
    if role == "scheduler":
        from cuda_cluster_dask import scheduler

        serving = scheduler.serve(cast("SchedulerSettings", settings), status)
    else:
        status.step("importing " + ", ".join(settings["plan"]["pre_import"] or ["the worker"]))
        imports.load(settings["plan"]["pre_import"])
        from cuda_cluster_dask import worker

        serving = worker.serve(cast("WorkerSettings", settings), status)
    gc.enable()
    factory = internals.get_loop_factory()
    return cast(int, frames.in_one_piece(lambda: internals.asyncio_run(serving, loop_factory=factory)))


def _check_direct() -> None:
    """Says which setting of `direct://` is wrong, before anything connects."""
    from cuda_cluster import comm

    try:
        comm.check()
    except (TypeError, ValueError) as error:
        raise StartFailure(str(error)) from error


def stop_asked(status: Status) -> asyncio.Task[int]:
    """A task that is done when this process is asked to end (SIGTERM, SIGINT) from now on, and tells
    by which signal. Until it is READY, it also cancels the task that calls this, which starts it."""
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    signals: asyncio.Queue[int] = asyncio.Queue()

    # Not by the loop's own handlers: while these close, a signal prints a traceback, and afterwards
    # it kills.
    def handle(number: int, _: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(signals.put_nowait, number)

    # Not in the task, which first runs when its maker waits: until then a signal would kill.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    asked = asyncio.create_task(signals.get())

    def end(_: asyncio.Task[int]) -> None:
        if not status.is_ready and starting is not None:
            starting.cancel()

    asked.add_done_callback(end)
    return asked


def die_of(number: int) -> NoReturn:
    """Ends at once by a signal, as if this process did not handle it."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(1)


def security(tls: Tls | None, role: str) -> Security | None:
    """Dask's security settings, or None without TLS."""
    if tls is None:
        return None
    from distributed import Security

    security = Security(
        require_encryption=True,
        tls_ca_file=tls["ca_file"],
        **{f"tls_{role}_cert": tls["cert"], f"tls_{role}_key": tls["key"]},
    )
    try:
        security.get_connection_args(role)
    except (OSError, ValueError) as error:
        files = ", ".join(f"{what} {path}" for what, path in tls.items())
        raise StartFailure(
            f"these files do not make a TLS connection: {files}: {error}; hint: the key must be that of "
            "the certificate, and all are PEM files"
        ) from error
    return security


def leave(code: int) -> NoReturn:
    """Ends at once: neither a thread that computes nor a forked parent's clean-up is waited for."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
