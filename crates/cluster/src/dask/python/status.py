"""What a process tells its supervisor: JSON lines on the status pipe (`wire::status` in Rust)."""

import asyncio
import json
import os
import stat

VARIABLE = "CUDA_CLUSTER_STATUS_FD"
CHANGES_WITHIN = 0.5  # Seconds: whoever asks for the state waits for the answer.


class Status:
    """The status pipe. Without one (a process started by hand) nobody is told.

    *Invariant:* no program that a task starts inherits the pipe.
    """

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self.is_ready = False
        self._peers = None
        self._answering = None

    @classmethod
    def from_environment(cls):
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return cls(None)
        os.set_inheritable(int(text), False)
        return cls(int(text))

    def bound(self, cpus, mems, notes):
        self._tell(status="bound", cpus=cpus, mems=mems, notes=notes)

    def step(self, step):
        self._tell(status="step", step=step)

    def forks(self):
        """From now on whoever asks gets a process that waits for the scheduler itself."""
        self._tell(status="forks")

    def killed_at(self, percent):
        """At how many percent of its memory limit the process is to be killed; None for never."""
        self._tell(status="killed_at", percent=percent)

    def ready(self, address, peers=None):
        """From now on the event loop that runs answers the supervisor's questions; `peers` are the
        worker's connections (`lanes.Peers`)."""
        self.is_ready = True
        self._peers = peers
        self._tell(status="ready", address=address, peers=[] if peers is None else peers.told())
        if self._descriptor is not None and stat.S_ISSOCK(os.fstat(self._descriptor).st_mode):
            asyncio.get_running_loop().add_reader(self._descriptor, self._answer)

    def _answer(self):
        try:
            asked = os.read(self._descriptor, 64)
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        if asked and self._peers is not None and self._peers.have_changed():
            self._answering = asyncio.ensure_future(self._answer_with_changes())
        elif asked:
            self._tell(status="alive")
        else:
            # The supervisor is gone, and this process with it.
            asyncio.get_running_loop().remove_reader(self._descriptor)

    async def _answer_with_changes(self):
        condition = {}
        try:
            changes = await asyncio.wait_for(self._peers.changes(), CHANGES_WITHIN)
            condition = {} if changes is None else {"peers": changes}
        except asyncio.TimeoutError:
            pass  # The next answer has them.
        finally:
            self._tell(status="alive", condition=condition)

    def working(self):
        """The worker begins its first task, which may be the cause of its end."""
        self._tell(status="working")

    def dashboard(self, link):
        self._tell(status="dashboard", link=link)

    def note(self, text):
        self._tell(status="note", text=text)

    def leaving(self, then, reason):
        """`then` is `rest`, `return` or `end_cluster`; the exit status is to be 0."""
        self._tell(status="leaving", then=then, reason=reason)

    def failed(self, reason):
        self._tell(status="failed", reason=reason)

    def _tell(self, **message):
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            # A supervisor that is gone takes this process with it; there is nobody to tell.
            self._descriptor = None
