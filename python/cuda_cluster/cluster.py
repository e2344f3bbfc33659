"""Acting: a supervised cluster that belongs to this Python.

`cuda-cluster up` holds the other end of a pipe and watches this process, so the cluster ends with
it, however it ends. Threads read what the program reports.

*Invariant:* `up` returns a READY cluster, or raises and leaves nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

from cuda_cluster import accepted, control, program
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState, Event, Plan, read

#: Seconds for which the program may be stopped (SIGSTOP) before nobody waits for it any longer.
PATIENCE = 10

#: Seconds between two looks whether it is.
LOOK = 1


@dataclass(frozen=True)
class Gathered:
    """Which of several processes that make one cluster this one is (`--join auto`)."""

    #: 0 has the scheduler.
    rank: int
    #: How many there are.
    size: int
    #: What the launcher calls them together; None if it does not.
    job: str | None
    #: The scheduler's file, where they meet.
    file: str


class Owned:
    """A cluster of this Python: the running `cuda-cluster up`, and what it has reported.

    Starts at once; `wait_ready` waits for READY.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        spec: program.Specs = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        path = program.program_path()
        up = [path, "up", "-o", "json", f"--owner={os.getpid()}", *program.flags(flags)]
        with program.SpecFiles(spec, flags) as files:
            try:
                # In a session of its own: Ctrl-C is for the Python program alone.
                self._process = subprocess.Popen(
                    [*up, *files.arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**program.environment(), **(env or {})},
                    pass_fds=files.descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"cannot run {path}: {error.strerror}") from error
        #: The plan's notes.
        self.notes: list[str] = []
        #: Known before READY.
        self.gathered: Gathered | None = None
        self._ready: dict[str, Any] | None = None
        self._failure: ClusterError | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._waiting: list[Callable[[], None]] = []
        self._subscribers: list[Callable[[Event | None], None]] = []
        self._lock = threading.Lock()
        self._errors: list[str] = []
        for stream, work in (("stderr", _follow_errors), ("stdout", _follow_reports)):
            pipe = getattr(self._process, stream)
            thread = threading.Thread(
                target=work, args=(weakref.ref(self), pipe), name=f"cuda-cluster {stream}", daemon=True
            )
            thread.start()
            if stream == "stderr":
                self._error_thread = thread

    def wait_ready(self) -> ClusterState:
        """Waits until the cluster is READY; raises ClusterError if it can't start."""
        self._started.wait()
        if self.state is None:
            raise self._failure or ClusterError("the cluster ended before it was READY")
        return self.state

    async def until_ready(self) -> ClusterState:
        """As `wait_ready`, in an event loop."""
        started = asyncio.Event()
        self.when_started(in_this_loop(started.set))
        await started.wait()
        return self.wait_ready()

    def when_started(self, call: Callable[[], None]) -> None:
        """Calls a function when the start has succeeded or failed; in a thread of this object's."""
        with self._lock:
            if not self._started.is_set():
                self._waiting.append(call)
                return
        call()

    @property
    def state(self) -> ClusterState | None:
        """As it was when it became READY; None if it has not been."""
        return None if self._ready is None else read(ClusterState, self._ready)

    @property
    def failure(self) -> ClusterError | None:
        """Why it ended; None if it was asked to."""
        return self._failure

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def subscribe(self, call: Callable[[Event | None], None]) -> None:
        """Calls a function with every later event, and with None at the end; in a thread of this
        object's."""
        with self._lock:
            if not self._ended.is_set():
                self._subscribers.append(call)
                return
        call(None)

    def release(self) -> None:
        """Asks the cluster to end."""
        stdin = self._process.stdin
        if stdin is not None:
            try:
                stdin.close()
            except OSError:
                pass  # It has ended.

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Waits until nothing of the cluster is left; returns whether that is so."""
        return self._ended.wait(timeout)

    async def until_ended(self) -> None:
        """Waits until nothing of the cluster is left, in an event loop."""
        ended = asyncio.Event()
        end = in_this_loop(ended.set)
        self.subscribe(lambda event: end() if event is None else None)
        await ended.wait()

    def end(self, timeout: float | None = None) -> None:
        """Takes the cluster down, and waits until nothing of it is left. Warns if it had failed, or
        had to be killed."""
        self.release()
        deadline = None if timeout is None else time.monotonic() + timeout
        watch = Watch(self)
        while not self.wait_ended(
            LOOK if deadline is None else max(0, min(LOOK, deadline - time.monotonic()))
        ):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the cluster has not ended within {timeout} s")
            watch.look()
        if self._failure is not None:
            warnings.warn(str(self._failure), RuntimeWarning, stacklevel=3)

    def _handle(self, report: dict[str, Any]) -> None:
        kind = report.get("report")
        if kind == "gathered":
            self.gathered = Gathered(*(report[name] for name in ("rank", "size", "job", "file")))
        elif kind == "ready":
            self._ready = report["state"]
            self._set_started()
        elif kind == "event":
            event = read(Event, report["event"])
            with self._lock:
                subscribers = list(self._subscribers)
            for call in subscribers:
                call(event)
        elif kind == "failed":
            self._failure = ClusterError.of(
                report["message"],
                causes=report.get("causes", ()),
                hint=report.get("hint"),
                exit_code=report.get("exit_code"),
            )

    def _end(self) -> None:
        code = self._process.wait()
        self._error_thread.join(timeout=5)
        if self._failure is None and code != 0:
            self._failure = ClusterError.from_text("\n".join(self._errors), code)
        with self._lock:
            self._ended.set()
            subscribers, self._subscribers = self._subscribers, []
        self._set_started()
        for call in subscribers:
            call(None)

    def _set_started(self) -> None:
        with self._lock:
            self._started.set()
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


class Watch:
    """Notices that the program, which kills a cluster whose supervisor does not answer, is itself
    stopped."""

    def __init__(self, owned: Owned) -> None:
        self._pid = owned._process.pid
        self._going = time.monotonic()

    def look(self) -> None:
        """Raises ClusterError if it has been stopped for some time."""
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                state = file.read().rpartition(") ")[2][:1]
        except OSError:
            return  # It has ended.
        if state not in ("T", "t"):
            self._going = time.monotonic()
        elif time.monotonic() - self._going >= PATIENCE:
            raise ClusterError(
                f"the cluster does not end: process {self._pid}, its 'cuda-cluster up', is stopped "
                "(SIGSTOP, or a debugger)",
                hint=f"kill -CONT {self._pid}",
            )


def in_this_loop(call: Callable[[], Any]) -> Callable[[], None]:
    """A function for other threads that calls `call` in the running event loop, if that still runs."""
    loop = asyncio.get_running_loop()

    def schedule() -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # The loop has ended.

    return schedule


def _follow_reports(owned: weakref.ref[Owned], pipe: IO[bytes]) -> None:
    """Reads reports until their end. Holds no reference to the cluster, which ends when nobody does."""
    with pipe:
        for line in pipe:
            cluster = owned()
            try:
                report = json.loads(line)
            except ValueError:
                continue  # Not a report.
            if cluster is not None and isinstance(report, dict):
                cluster._handle(report)
            del cluster
    cluster = owned()
    if cluster is not None:
        cluster._end()


def _follow_errors(owned: weakref.ref[Owned], pipe: IO[bytes]) -> None:
    with pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\n")
            cluster = owned()
            if cluster is not None:
                if text.startswith("note: "):
                    cluster.notes.append(text.removeprefix("note: "))
                else:
                    cluster._errors.append(text)
            del cluster


class Cluster:
    """A running cluster. As a context manager it is taken down at the end, if it is ours."""

    def __init__(self, state: ClusterState, owned: Owned | None = None) -> None:
        self._owned = owned
        self.name = state.name
        self.engine = state.engine
        self.run_directory = state.run_directory

    def __repr__(self) -> str:
        ended = self._owned is not None and self._owned.has_ended
        return f"<cuda_cluster.Cluster {self.name!r}{', ended' if ended else ''}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._owned is not None:
            self.down()

    @property
    def notes(self) -> list[str]:
        """The plan's notes; empty for a cluster that another program started."""
        return [] if self._owned is None else list(self._owned.notes)

    def state(self, *, wide: bool = False) -> ClusterState:
        """As it is now; `wide` with memory in use and where the threads run."""
        path = "/v1/state?wide=true" if wide else "/v1/state"
        return read(ClusterState, control.read(self.run_directory, path))

    def plan(self) -> Plan:
        """What was decided."""
        return read(Plan, control.read(self.run_directory, "/v1/plan"))

    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        env = program.ask(["env", self.name])["env"]
        return {str(name): str(value) for name, value in env.items()}

    def scale(self, workers: int) -> None:
        """Has this many workers run: the first ones of the plan."""
        workers = accepted.WHOLE.take("workers", workers)
        control.order(self.run_directory, f"/v1/scale?workers={workers}")

    def restart(self, process: str) -> None:
        """Starts a worker again, or with `scheduler` the whole cluster."""
        process = accepted.TEXT.take("process", process)
        control.order(self.run_directory, f"/v1/restart/{quote(process, safe='')}")

    def logs(self, process: str, *, tail: int | None = None) -> list[str]:
        """The lines of a process's log; of its last process, if it was restarted."""
        process = accepted.TEXT.take("process", process)
        path = f"/v1/logs?process={quote(process, safe='')}"
        path += "" if tail is None else f"&tail={accepted.WHOLE.take('tail', tail)}"
        return [line["text"] for line in control.read(self.run_directory, path)]

    def events(self) -> Iterator[Event]:
        """What happens from now on; ends with the cluster. For clusters of this Python."""
        if self._owned is None:
            raise ClusterError("another program started this cluster: use cuda-cluster events")
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._owned.subscribe(events.put)
        return iter(events.get, None)

    def down(self, timeout: float | None = None) -> None:
        """Takes it down, and returns when nothing of it is left."""
        if self._owned is not None:
            self._owned.end(timeout)
        else:
            program.run(["down", self.name], timeout=timeout)


_count = itertools.count()


def made_up_name() -> str:
    """A name that no other cluster of this user has. A failed start under such a name leaves no
    files."""
    return f"python-{os.getpid()}-{next(_count)}"


def up(*, spec: program.Specs = None, **flags: Any) -> Cluster:
    """Brings a cluster up, and returns when it is READY. It ends with this Python.

    `flags` are those of `cuda-cluster up`, with `_` for `-`; `spec` is a file, what would stand in
    one (`${…}` in a mapping is only text), or a list of them that are merged in their order.

    Raises ClusterError; nothing of the cluster is left then.
    """
    flags = accepted.taken(flags)
    named = {"name": made_up_name(), **flags}
    owned = Owned(named if spec is None else flags, spec)
    try:
        return Cluster(owned.wait_ready(), owned)
    except BaseException:
        owned.release()
        raise


def attach(name: str | None = None) -> Cluster:
    """A cluster that runs already, by its name; without one, the only one that runs."""
    known = [] if name is None else [accepted.TEXT.take("name", name)]
    return Cluster(read(ClusterState, program.ask(["ps", *known])))
