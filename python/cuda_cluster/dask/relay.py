"""Shows here what a cluster's processes print, as `LocalCluster` shows it.

They write into log files. A thread follows these and passes on what is new: what tasks print to
standard output, records of Dask's loggers to standard error. Beside them it is told which processes
died, as a nanny would tell it, in the words of `cuda-cluster events`.

*Invariant:* the logs keep everything; nothing waits for whoever reads here.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from datetime import datetime
from typing import IO, Any

from cuda_cluster.cluster import Owned
from cuda_cluster.model import ClusterState, Event

#: Seconds between two looks at the logs.
LOOK = 0.1

#: A record of a logger in Dask's own format, `distributed.admin.log-format`.
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - (\S+) - ([A-Z]+) - ")

#: Loggers that `silence_logs` is for. Others may have that format, too, which is a common one.
DASKS = {"asyncio", "bokeh", "cuda_cluster", "dask", "dask_cuda", "distributed", "tornado"}

#: What a record's further lines begin with.
PARTS = {
    "Traceback (most recent call last):": "traceback",
    "Key: ": "fields",
    "The above exception was": "between",
    "During handling of": "between",
    # What asyncio says of what failed.
    "future: ": "between",
    "handle: ": "between",
    "task: ": "between",
    "source_traceback: ": "traceback",
}

#: What Python and asyncio, whose records Dask gives no format, say on standard error.
OF_PYTHON = (
    "Exception ignored ",
    "Exception in callback ",
    "Exception in thread ",
    "Future exception was never retrieved",
    "Task exception was never retrieved",
    "Task was destroyed but it is pending",
    "Traceback (most recent call last):",
)

#: On machines that are not here, of each start.
OF_SIMULATION = "Ignoring provided memory limit"


def level_of(silence_logs: Any) -> int:
    """The least level of records to show, by `LocalCluster`'s keyword: all for False."""
    if silence_logs is False:
        return logging.NOTSET
    if silence_logs is None or silence_logs is True:
        return logging.WARNING
    level = logging.getLevelName(silence_logs.upper()) if isinstance(silence_logs, str) else silence_logs
    if not isinstance(level, int):
        raise ValueError(f"silence_logs must be a level such as 'error', or False, not {silence_logs!r}")
    return level


class _Log:
    """A log file, of which what is appended is read; also of the files that take its place."""

    def __init__(self, path: str, *, at_end: bool) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""
        if at_end and self._open():
            assert self._file is not None
            self._file.seek(0, os.SEEK_END)
        #: Whether the last record is shown.
        self.shows_record = False
        #: What of the last record the last line was; None if it was a task's.
        self._part: str | None = None

    def lines(self) -> list[tuple[str, str]]:
        """The complete lines since the last call, each with the time at which it was written."""
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        data = self._rest + self._file.read()
        if self._was_replaced() and self._open():
            data += self._file.read()
        *whole, self._rest = data.split(b"\n")
        # What is without a time is of the log itself: the number of a file.
        parts = (line.decode(errors="replace").partition(" ") for line in whole)
        return [(at, line) for at, _, line in parts if at.endswith("Z")]

    def begin(self, part: str | None, *, shown: bool) -> None:
        """Takes note of the first line of a record, or of what Python says, and of what may follow."""
        self._part = part
        self.shows_record = shown

    def belongs_to_record(self, line: str) -> bool:
        """Whether a line is one of the last record: of a traceback, or of a task that failed."""
        if self._part is None:
            return False
        if self._part == "fields":
            self._part = self._part if line else None
            return True
        starts = [part for start, part in PARTS.items() if line.startswith(start)]
        if starts:
            self._part = starts[0]
        elif self._part == "traceback":
            # The error stands at the end, at the beginning of its line.
            self._part = self._part if line[:1] in ("", " ") else "between"
        elif line.strip():
            self._part = None
        return self._part is not None

    def _open(self) -> bool:
        try:
            file = open(self._path, "rb")
        except OSError:
            return False
        if self._file is not None:
            self._file.close()
        self._file = file
        return True

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False  # The cluster has ended.

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Relay:
    """Follows the logs of a run directory from now on."""

    def __init__(self, run_directory: str, least: int, *, simulated: bool) -> None:
        self._folder = os.path.join(run_directory, "logs")
        self._least = least
        self._simulated = simulated
        self._logs: dict[str, _Log] = {}
        #: Since when the cluster ends.
        self._ends_since: datetime | None = None
        self._stopped = threading.Event()
        #: How processes ended that have not been started again.
        self._ends: dict[str, str] = {}
        self._find(at_end=True)
        self._thread = threading.Thread(target=self._follow, name="cuda-cluster relay", daemon=True)
        self._thread.start()

    def expect_end(self) -> None:
        """From now on only what tasks print is shown: records are those of a wanted end."""
        now = datetime.now().astimezone()
        # As exactly as logs tell it.
        self._ends_since = now.replace(microsecond=now.microsecond // 1000 * 1000)

    def tell(self, event: Event | None) -> None:
        """Shows how a process ended that nobody asked to end; of a cluster's events, these."""
        if event is None or event.process is None or self._ends_since is not None:
            return
        if event.event == "exited":
            self._ends[event.process] = event.json["reason"]
        elif event.event == "restarting":
            reason = self._ends.pop(event.process, None)
            if reason is not None and event.json["deaths_at_work"]:
                self._say(logging.WARNING, event, reason)
        elif event.event == "failed":
            self._say(logging.ERROR, event, f"failed: {event.json['reason']}")

    def _say(self, level: int, event: Event, text: str) -> None:
        if level >= self._least:
            time = _time(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S,%f")[:23]
            name = logging.getLevelName(level)
            _write(sys.stderr, f"{time} - cuda_cluster - {name} - {event.process}: {text}")

    def stop(self) -> None:
        """Shows what is left, also of files that are deleted already, and ends."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _follow(self) -> None:
        while not self._stopped.wait(LOOK):
            self._find(at_end=False)
            self._pass_on()
        self._pass_on()
        for log in self._logs.values():
            log.close()

    def _find(self, *, at_end: bool) -> None:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return  # The cluster has ended.
        for name in names:
            if name.endswith(".log") and name not in self._logs:
                self._logs[name] = _Log(os.path.join(self._folder, name), at_end=at_end)

    def _pass_on(self) -> None:
        for log in self._logs.values():
            for at, line in log.lines():
                self._show(log, at, line)

    def _show(self, log: _Log, at: str, line: str) -> None:
        record = RECORD.match(line)
        if record is not None:
            level = logging.getLevelName(record[2])
            is_dasks = record[1].partition(".")[0] in DASKS
            shown = not is_dasks or not isinstance(level, int) or level >= self._least
            shown = shown and not (self._simulated and OF_SIMULATION in line)
            is_of_end = self._is_of_end(line[:23])
            # Only these have more lines; as a wanted end is told of, others too.
            grave = not isinstance(level, int) or level >= logging.WARNING
            part = "between" if grave or is_of_end else None
            log.begin(part, shown=shown and not is_of_end)
        elif not log.belongs_to_record(line):
            if not line.startswith(OF_PYTHON):
                _write(sys.stdout, line)
                return
            log.begin("traceback", shown=not self._is_of_end(at))
        if log.shows_record:
            _write(sys.stderr, line)

    def _is_of_end(self, at: str) -> bool:
        try:
            return self._ends_since is not None and _time(at).astimezone() >= self._ends_since
        except ValueError:
            return False  # A task printed what resembles a record.


def follow(owned: Owned, state: ClusterState, least: int) -> Relay:
    """Shows from now on what a READY cluster of this Python prints, and which of its processes die."""
    relay = Relay(state.run_directory, least, simulated=state.simulated)
    owned.subscribe(relay.tell)
    return relay


def _time(text: str) -> datetime:
    """A time as events, logs and their records have it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00").replace(",", "."))


def _write(stream: Any, line: str) -> None:
    try:
        stream.write(line + "\n")
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass  # There is none, it is closed, or nobody reads it.
