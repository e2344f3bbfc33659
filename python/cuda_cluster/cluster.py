"""Acting: a supervised cluster that belongs to this Python.

The program holds the other end of a pipe, and knows this process: the cluster ends with it, however
it ends. A thread reads what the program tells.

*Invariant:* `up` returns a READY cluster, or raises with nothing of it left.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

from cuda_cluster import control, program
from cuda_cluster.errors import ClusterError
from cuda_cluster.model import ClusterState, Event, Plan, read


class Owned:
    """A cluster that is on its way, or there: `cuda-cluster up` and what it has told so far.

    Starts at once; `wait_ready` says how it went.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        spec: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        arguments = [program.program_path(), "up", "-o", "json", f"--owner={os.getpid()}"]
        spec_file = program.SpecFile(spec) if isinstance(spec, Mapping) else None
        if spec_file is not None:
            arguments.append(f"--file={spec_file.path}")
        elif spec is not None:
            arguments.append(f"--file={os.fspath(spec)}")  # type: ignore[arg-type]
        arguments += program.flags(flags)
        try:
            # In a session of its own: Ctrl-C is for the Python program alone.
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else {**os.environ, **env},
                pass_fds=() if spec_file is None else (spec_file.descriptor,),
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"cannot run {arguments[0]}: {error.strerror}") from error
        finally:
            if spec_file is not None:
                spec_file.close()
        #: What is worth knowing of the plan, a sentence each.
        self.notes: list[str] = []
        self._first: dict[str, Any] | None = None
        self._failure: ClusterError | None = None
        self._told = threading.Event()
        self._ended = threading.Event()
        self._waiting: list[Callable[[], None]] = []
        self._listeners: list[Callable[[Event | None], None]] = []
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
        """Waits until the cluster is READY; raises ClusterError when there is none."""
        self._told.wait()
        if self.state is None:
            raise self._failure or ClusterError("the cluster ended before it was READY")
        return self.state

    def when_told(self, told: Callable[[], None]) -> None:
        """Has a function called as soon as it is known how the start went; in a thread of ours."""
        with self._lock:
            if not self._told.is_set():
                self._waiting.append(told)
                return
        told()

    @property
    def state(self) -> ClusterState | None:
        """As it was when it became READY; None if it has not been."""
        return None if self._first is None else read(ClusterState, self._first)

    @property
    def failure(self) -> ClusterError | None:
        """Why it ended, if it was not asked to."""
        return self._failure

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def listen(self, heard: Callable[[Event | None], None]) -> None:
        """Has a function called with every event from now on, and with None at the end; in a thread
        of ours."""
        with self._lock:
            if not self._ended.is_set():
                self._listeners.append(heard)
                return
        heard(None)

    def let_go(self) -> None:
        """Asks for the cluster's end."""
        stdin = self._process.stdin
        if stdin is not None:
            try:
                stdin.close()
            except OSError:
                pass  # It has ended.

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Waits until nothing of the cluster is left; says whether that is so."""
        return self._ended.wait(timeout)

    def end(self, timeout: float | None = None) -> None:
        """Takes the cluster down, and waits until nothing of it is left."""
        self.let_go()
        if not self.wait_ended(timeout):
            raise TimeoutError(f"the cluster has not ended within {timeout} s")

    def _tell(self, report: dict[str, Any]) -> None:
        kind = report.get("report")
        if kind == "ready":
            self._first = report["state"]
            self._set_told()
        elif kind == "event":
            event = read(Event, report["event"])
            with self._lock:
                listeners = list(self._listeners)
            for heard in listeners:
                heard(event)
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
            listeners, self._listeners = self._listeners, []
        self._set_told()
        for heard in listeners:
            heard(None)

    def _set_told(self) -> None:
        with self._lock:
            self._told.set()
            waiting, self._waiting = self._waiting, []
        for told in waiting:
            told()


def _follow_reports(owned: weakref.ref[Owned], pipe: IO[bytes]) -> None:
    """Reads reports to their end. Does not keep the cluster: when nobody has it, it is let go."""
    with pipe:
        for line in pipe:
            cluster = owned()
            try:
                report = json.loads(line)
            except ValueError:
                continue  # Not a report.
            if cluster is not None and isinstance(report, dict):
                cluster._tell(report)
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
        """What is worth knowing of the plan; empty for a cluster that somebody else brought up."""
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
        control.order(self.run_directory, f"/v1/scale?workers={workers}")

    def restart(self, process: str) -> None:
        """Starts a worker again, or with `scheduler` the whole cluster."""
        control.order(self.run_directory, f"/v1/restart/{quote(process, safe='')}")

    def logs(self, process: str, *, tail: int | None = None) -> list[str]:
        """The lines of a process's log; of its last process, if it was restarted."""
        path = f"/v1/logs?process={quote(process, safe='')}"
        path += "" if tail is None else f"&tail={tail}"
        return [line["text"] for line in control.read(self.run_directory, path)]

    def events(self) -> Iterator[Event]:
        """What happens from now on; ends with the cluster. For clusters of this Python."""
        if self._owned is None:
            raise ClusterError("this cluster was brought up by somebody else: cuda-cluster events")
        heard: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._owned.listen(heard.put)
        return iter(heard.get, None)

    def down(self, timeout: float | None = None) -> None:
        """Takes it down, and returns when nothing of it is left."""
        if self._owned is not None:
            self._owned.end(timeout)
        else:
            program.run(["down", self.name], timeout=timeout)


_count = itertools.count()


def made_up_name() -> str:
    """A name that no other cluster of this user has. What is left of a bad end under such a name is
    removed in time."""
    return f"python-{os.getpid()}-{next(_count)}"


def up(*, spec: str | os.PathLike[str] | Mapping[str, Any] | None = None, **flags: Any) -> Cluster:
    """Brings a cluster up, and returns when it is READY. It ends with this Python.

    `flags` are those of `cuda-cluster up`, with `_` for `-`; `spec` is a file, or what would stand
    in one.

    Raises ClusterError; nothing of the cluster is left then.
    """
    named = {"name": made_up_name(), **flags}
    owned = Owned(named if spec is None else flags, spec)
    try:
        return Cluster(owned.wait_ready(), owned)
    except BaseException:
        owned.let_go()
        raise


def attach(name: str | None = None) -> Cluster:
    """A cluster that runs already, by its name; without one, the only one that runs."""
    return Cluster(read(ClusterState, program.ask(["ps", *([] if name is None else [name])])))
