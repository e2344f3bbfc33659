"""What a process tells its supervisor: JSON lines on the status pipe (`wire::status` in Rust)."""

from __future__ import annotations

import json
import os

#: Most characters of a reason: it is shown in a line.
LONGEST_REASON = 16 << 10


class Pipe:
    """The status pipe. Without one (a process started by hand) nobody is told.

    *Invariant:* no program that this process starts inherits the pipe.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def bound(self, cpus: str, mems: str, notes: list[str]) -> None:
        self._tell(status="bound", cpus=cpus, mems=mems, notes=notes)

    def step(self, step: str) -> None:
        self._tell(status="step", step=step)

    def note(self, text: str) -> None:
        self._tell(status="note", text=text)

    def failed(self, reason: str) -> None:
        # The log has all of it.
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"
        self._tell(status="failed", reason=shown)

    def close(self) -> None:
        """Nothing more is told: an executed program closes it likewise."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _tell(self, **message: object) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            # A supervisor that is gone takes this process with it; there is nobody to tell.
            self._descriptor = None
