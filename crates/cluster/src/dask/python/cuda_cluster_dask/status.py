"""What a process tells its supervisor: JSON lines on the status pipe (`wire::status` in Rust)."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cuda_cluster_dask.lanes import Peer, Peers

VARIABLE = "CUDA_CLUSTER_STATUS_FD"
Then = Literal["rest", "return", "end_cluster"]

#: Most characters of a reason: it is shown in a line.
LONGEST_REASON = 16 << 10

CHANGES_WITHIN = 0.5  # Seconds: whoever asks for the state waits for the answer.


class Status:
    """The status pipe. Without one (a process started by hand) nobody is told.

    *Invariant:* no program that a task starts inherits the pipe.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.is_ready = False
        self._peers: Peers | None = None
        self._answering: asyncio.Future[None] | None = None

    @classmethod
    def from_environment(cls) -> Status:
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return cls(None)
        os.set_inheritable(int(text), False)
        return cls(int(text))

    def bound(self, cpus: str, mems: str, notes: list[str]) -> None:
        self._tell(status="bound", cpus=cpus, mems=mems, notes=notes)

    def step(self, step: str) -> None:
        self._tell(status="step", step=step)

    def forks(self) -> None:
        """From now on whoever asks gets a process that waits for the scheduler itself."""
        self._tell(status="forks")

    def killed_at(self, percent: float | None) -> None:
        """At how many percent of its memory limit the process is to be killed; None for never."""
        self._tell(status="killed_at", percent=percent)

    def ready(self, address: str, peers: Peers | None = None) -> None:
        """From now on the event loop that runs answers the supervisor's questions; `peers` are the
        worker's connections (`lanes.Peers`)."""
        self.is_ready = True
        self._peers = peers
        self._tell(status="ready", address=address, peers=[] if peers is None else peers.told())
        if self._descriptor is not None and stat.S_ISSOCK(os.fstat(self._descriptor).st_mode):
            asyncio.get_running_loop().add_reader(self._descriptor, self._answer, self._descriptor)

    def _answer(self, descriptor: int) -> None:
        try:
            asked = os.read(descriptor, 64)
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        if asked and self._peers is not None and self._peers.have_changed():
            self._answering = asyncio.ensure_future(self._answer_with_changes(self._peers))
        elif asked:
            self._tell(status="alive")
        else:
            # The supervisor is gone, and this process with it.
            asyncio.get_running_loop().remove_reader(descriptor)

    async def _answer_with_changes(self, peers: Peers) -> None:
        condition: dict[str, list[Peer]] = {}
        try:
            changes = await asyncio.wait_for(peers.changes(), CHANGES_WITHIN)
            condition = {} if changes is None else {"peers": changes}
        except asyncio.TimeoutError:
            pass  # The next answer has them.
        finally:
            self._tell(status="alive", condition=condition)

    def working(self) -> None:
        """The worker begins its first task, which may be the cause of its end."""
        self._tell(status="working")

    def dashboard(self, link: str) -> None:
        self._tell(status="dashboard", link=link)

    def note(self, text: str) -> None:
        self._tell(status="note", text=text)

    def leaving(self, then: Then, reason: str | None) -> None:
        """What is to follow; the exit status is to be 0."""
        self._tell(status="leaving", then=then, reason=reason)

    def failed(self, reason: str) -> None:
        # The log has all of it.
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"
        self._tell(status="failed", reason=shown)

    def _tell(self, **message: object) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            # A supervisor that is gone takes this process with it; there is nobody to tell.
            self._descriptor = None
