"""What a process tells its supervisor: JSON lines on the status pipe (`wire::status` in Rust)."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from typing import TYPE_CHECKING, Any, Literal

from cuda_cluster_fork.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda_cluster_dask.lanes import Peers

VARIABLE = "CUDA_CLUSTER_STATUS_FD"
Then = Literal["rest", "disband", "return", "end_cluster"]

CHANGES_WITHIN = 0.5  # Seconds: whoever asks for the state waits for the answer.


class Status(Pipe):
    """The status pipe, as a process of Dask's uses it."""

    def __init__(self, descriptor: int | None) -> None:
        super().__init__(descriptor)
        self.is_ready = False
        self._peers: Peers | None = None
        self._work: Callable[[], dict[str, object]] | None = None
        self._answering: asyncio.Future[None] | None = None
        #: What is to be told of each worker from elsewhere.
        self._held: dict[str, dict[str, object]] = {}
        self._noted: set[str] = set()

    @classmethod
    def from_environment(cls) -> Status:
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return cls(None)
        os.set_inheritable(int(text), False)
        return cls(int(text))

    def forks(self) -> None:
        """From now on whoever asks gets a process that waits for the scheduler itself."""
        self._tell(status="forks")

    def killed_at(self, percent: float | None) -> None:
        """At how many percent of its memory limit the process is to be killed; None for never."""
        self._tell(status="killed_at", percent=percent)

    def ready(
        self, address: str, peers: Peers | None = None, work: Callable[[], dict[str, object]] | None = None
    ) -> None:
        """From now on the event loop that runs answers the supervisor's questions; `peers` are the
        worker's connections (`lanes.Peers`), and `work` says what it has done."""
        self.is_ready = True
        self._peers, self._work = peers, work
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
            self._alive({})
        else:
            # The supervisor is gone, and this process with it.
            asyncio.get_running_loop().remove_reader(descriptor)

    async def _answer_with_changes(self, peers: Peers) -> None:
        condition: dict[str, object] = {}
        try:
            changes = await asyncio.wait_for(peers.changes(), CHANGES_WITHIN)
            condition = {} if changes is None else {"peers": changes}
        except asyncio.TimeoutError:
            pass  # The next answer has them.
        finally:
            self._alive(condition)

    def _alive(self, condition: dict[str, object]) -> None:
        if self._work is not None:
            condition.update(self._work())
        self._tell(status="alive", condition=condition)

    def working(self) -> None:
        """The worker begins its first task, which may be the cause of its end."""
        self._tell(status="working")

    def dashboard(self, link: str) -> None:
        self._tell(status="dashboard", link=link)

    def joined(self, worker: dict[str, Any]) -> None:
        """A worker from elsewhere has joined this scheduler."""
        self._tell_of(worker["name"], status="joined", worker=worker)

    def parted(self, name: str, lost: bool, reason: str) -> None:
        """A worker from elsewhere is not this scheduler's any more."""
        self._tell_of(name, status="parted", name=name, lost=lost, reason=reason)

    def noted(self, text: str) -> None:
        """A note about a worker from elsewhere, once."""
        if text not in self._noted:
            self._noted.add(text)
            self._tell_of(f"note: {text}", status="note", text=text)

    def _tell_of(self, worker: str, /, **message: object) -> None:
        """Tells of a worker as soon as there is room: a scheduler does not wait for a supervisor that
        does not read. What was told of it before, and has not been written yet, is out of date."""
        self._held.pop(worker, None)
        self._held[worker] = message
        self._write_held()

    def _write_held(self) -> None:
        while self._held and self._descriptor is not None:
            if not has_room(self._descriptor):
                asyncio.get_running_loop().add_writer(self._descriptor, self._write_held)
                return
            self._tell(**self._held.pop(next(iter(self._held))))
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_writer(self._descriptor)

    def leaving(self, then: Then, reason: str | None, lost: bool = False) -> None:
        """What is to follow; the exit status is to be 0. `lost`: for want of a scheduler."""
        self._tell(status="leaving", then=then, reason=reason, lost=lost)


def has_room(descriptor: int) -> bool:
    """Whether a line can be written without waiting: a socket says so while less than a quarter of its
    buffer is in use, which is more than the longest line."""
    asked = select.poll()
    asked.register(descriptor, select.POLLOUT)
    return bool(asked.poll(0))
