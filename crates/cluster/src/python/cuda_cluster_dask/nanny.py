"""What Dask asks of a worker's nanny: plugins and restarts.

The supervisor is the nanny of all workers, and Dask cannot ask it. So each worker tells the
scheduler that it is its own nanny. It runs nanny plugins in its own process, before it is a worker,
or later when they are registered. To be restarted, it leaves, and the supervisor starts the next.

*Invariant:* every nanny plugin that the scheduler knows has run before the worker's first task.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
import tempfile
import time
from typing import Any, cast

import dask
from distributed import Worker, rpc
from tornado.ioloop import IOLoop

from cuda_cluster_dask import internals
from cuda_cluster_fork.failure import StartFailure
from cuda_cluster_dask.internals import (
    Comm,
    CommClosedError,
    FatalCommClosedError,
    WorkSpace,
    connect,
    error_message,
    pickle,
)
from cuda_cluster_dask.settings import Name, WorkerSettings

logger = logging.getLogger("distributed.nanny")

SCRATCH = "dask-scratch-space"  # Where `distributed` puts the directories of its servers.
LOOK_AGAIN = 0.5  # Seconds; connecting has a patience of its own.
WRITTEN = 0.01  # Seconds; a scheduler that starts writes its file soon.
WHOLE_WITHIN = 5  # Seconds; and as soon all of it.
ANSWER = 0.05  # Seconds for an answer to be sent.

#: What to do about a refusal of `direct://`, by a word of it (`greeting.rs`).
HINTS = {
    "secret": "; hint: the scheduler's secret is in the file that 'cuda-cluster env' names there; copy it, "
    "and name the copy here: DASK_DISTRIBUTED__COMM__DIRECT__SECRET_FILE",
    "version": "; hint: install one version of cuda-cluster on all hosts",
}

#: What has the protocols that Dask itself does not know.
PACKAGES = {"direct": "cuda-cluster", "ucx": "distributed-ucxx-cu13", "ucxx": "distributed-ucxx-cu13"}

# In the answer to a plugin: whether the worker is about to be restarted because of it.
RESTARTS = "cuda-cluster-restarts"


class Nanny:
    """As much of `distributed.Nanny` as plugins use. `env` is this process's environment."""

    worker: Worker | None = None
    scheduler: rpc | None = None

    def __init__(self, settings: WorkerSettings, name: Name, connection_args: dict[str, Any]) -> None:
        self.scheduler_addr, self._scheduler_file = settings["scheduler"], settings["scheduler_file"]
        self.connection_args = connection_args
        self.loop = self.io_loop = IOLoop.current()
        self.name = name
        self.env = os.environ
        self.plugins: dict[str, Any] = {}
        self._directory: Any = None
        self._scratch = settings["plan"]["local_directory"]
        self._introduction: Comm | None = None

    async def introduce(self, patience: float | None, is_first: bool) -> None:
        """Runs the plugins that the scheduler knows; it registers no other one meanwhile. Who comes for
        the first time and is not let in is told so at once."""
        try:
            comm = await asyncio.wait_for(self._connect(is_first), patience)
        except asyncio.TimeoutError:
            where = self.scheduler_addr or self._scheduler_file
            raise StartFailure(f"no scheduler at {where} within {patience:g} s") from None
        await comm.write({"op": internals.REGISTER_NANNY, "address": f"nanny of {self.name}"})
        answer = await comm.read()
        for name, plugin in answer.get(internals.NANNY_PLUGINS, {}).items():
            await self.plugin_add(plugin, name)
        self._introduction = comm

    async def introduced(self) -> None:
        """Tells the scheduler that the worker is registered."""
        if self._introduction is None:
            return
        try:
            await self._introduction.write({"status": "ok"})
            await self._introduction.close()
        except CommClosedError:
            pass  # The worker's own connection tells what is the matter.

    async def _connect(self, is_first: bool) -> Comm:
        while True:
            # One that has come back may listen elsewhere, and a file may be that of an earlier one.
            if self._scheduler_file is not None:
                self.scheduler_addr = await _read_address(self._scheduler_file)
            _must_speak(str(self.scheduler_addr))
            try:
                comm = await connect(self.scheduler_addr, **self.connection_args)
                self.scheduler = rpc(self.scheduler_addr, connection_args=self.connection_args)
                return comm
            except FatalCommClosedError as error:
                if is_first:
                    raise StartFailure(f"{error}{HINTS.get(_said(error), '')}") from error
                await asyncio.sleep(LOOK_AGAIN)
            except OSError:
                logger.info("Waiting to connect to: %26s", self.scheduler_addr)
                await asyncio.sleep(LOOK_AGAIN)

    def adopt(self, worker: Worker) -> None:
        """Has a worker that is not started yet answer for its nanny."""
        self.worker = worker
        worker.handlers.update({name: getattr(self, name) for name in internals.OF_A_NANNY})

    @property
    def worker_address(self) -> str | None:
        return None if self.worker is None else self.worker.contact_address

    @property
    def local_directory(self) -> str:
        """Modules in it can be imported, as in a nanny's. It goes with the process."""
        if self._directory is None:
            asked = self._scratch or dask.config.get("temporary-directory")
            space = WorkSpace(os.path.join(asked or tempfile.gettempdir(), SCRATCH))
            self._directory = space.new_work_dir(prefix="nanny-")
            sys.path.insert(0, self._directory.dir_path)
        return cast(str, self._directory.dir_path)

    async def plugin_add(self, plugin: Any, name: str | None = None) -> dict[str, Any]:
        plugin = pickle.loads(plugin) if isinstance(plugin, bytes) else plugin
        name = name or str(getattr(plugin, "name", type(plugin).__name__))
        self.plugins[name] = plugin
        logger.info("Starting Nanny plugin %s", name)
        try:
            await _call(plugin, "setup", self)
        except Exception as error:
            logger.exception("Nanny plugin %s failed to setup", name)
            return error_message(error)
        restarts = self.worker is not None and bool(getattr(plugin, "restart", False))
        if restarts:
            # Not before the answer is sent: the scheduler closes the connection with the worker.
            self.loop.call_later(ANSWER, self.restart, reason=f"nanny-plugin-{name}-restart")
        return {"status": "OK", RESTARTS: restarts}

    async def plugin_remove(self, name: str) -> dict[str, Any]:
        logger.info("Removing Nanny plugin %s", name)
        try:
            await _call(self.plugins.pop(name, None), "teardown", self)
        except Exception as error:
            logger.exception("Nanny plugin %s failed to teardown", name)
            return error_message(error)
        return {"status": "OK"}

    async def kill(self, timeout: float | None = None, reason: str = "nanny-kill") -> None:
        await self.restart(reason=reason)

    async def restart(self, timeout: float | None = None, reason: str = "nanny-restart") -> str:
        if self.worker is not None:
            await self.worker.come_back(reason)
        return "OK"


def _must_speak(address: str) -> None:
    """Raises what to install if this Python has nothing for an address; a file tells it only now."""
    protocol = address.partition("://")[0]
    try:
        internals.get_backend(protocol)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(protocol)
        unknown = package is not None and isinstance(error, ValueError)
        hint = f"; hint: {sys.executable} -m pip install {package}" if unknown else ""
        raise StartFailure(
            f"this Python cannot speak to the scheduler at {address}: {error}{hint}"
        ) from error


def _said(refusal: FatalCommClosedError) -> str:
    """Which of `HINTS` is about a refusal."""
    return next((word for word in HINTS if f" {word}" in str(refusal)), "")


async def _read_address(file: str) -> str:
    """The address in a scheduler's file, as soon as it is there and whole."""
    broken = None
    while True:
        try:
            with open(file) as text:
                return cast(str, json.load(text)["address"])
        except FileNotFoundError:
            broken = None
        except OSError as error:
            raise StartFailure(f"cannot read {file}: {error.strerror}") from error
        except (LookupError, TypeError, ValueError) as error:
            # By this process's own clock: that of the host which writes it may be another.
            broken = broken or time.monotonic()
            if time.monotonic() - broken > WHOLE_WITHIN:
                raise StartFailure(f"{file} is no file of a Dask scheduler: {error!r}") from error
        await asyncio.sleep(WRITTEN)


async def _call(plugin: Any, method: str, nanny: Nanny) -> None:
    """A plugin's method, if it has one; it may be a coroutine."""
    result = getattr(plugin, method, lambda nanny: None)(nanny=nanny)
    if inspect.isawaitable(result):
        await result
