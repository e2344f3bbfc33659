"""What event loops wait for: events of the engine's thread.

*Invariant:* a process that is a fork of another one has events of its own.
"""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from cuda_cluster import _limits
from cuda_cluster._extension import comm as _comm


class Loop:
    """What one event loop waits for."""

    loops: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.process = os.getpid()
        self.events = _comm.Events()
        self.handlers: dict[int, Callable[[], None]] = {}
        loop.add_reader(self.events.fileno(), self._on_events)

    @classmethod
    def running(cls) -> Loop:
        loop = asyncio.get_running_loop()
        found = cls.loops.get(loop)
        if found is None or found.process != os.getpid():
            _limits.bound(_comm)
            found = cls.loops[loop] = cls(loop)
        return found

    def _on_events(self) -> None:
        handlers = self.handlers
        for event in self.events.take():
            handler = handlers.get(event)
            if handler is not None:
                handler()

    async def wait(self, event: int) -> None:
        """Waits for an event, which must have been asked for."""
        future = asyncio.get_running_loop().create_future()
        self.handlers[event] = functools.partial(_resolve, future)
        try:
            await future
        finally:
            self.handlers.pop(event, None)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
