"""What this process's worker has received from each other worker, for the history.

*Invariant:* each transfer that Dask's worker has noted is counted once, and what is told has a limited
length.
"""

from __future__ import annotations

from collections import deque
from typing import Any

#: The most senders that are told: addresses of workers that have ended stay until others need their place.
MOST = 1024


class Received:
    """Bytes by sender, as Dask sizes them."""

    def __init__(self) -> None:
        self.by_sender: dict[str, int] = {}
        self.total = 0
        self._last: dict[str, Any] | None = None

    def count(self, log: deque[dict[str, Any]]) -> None:
        """Counts what is new in a worker's log, which forgets all but the last transfers."""
        new = []
        for transfer in reversed(log):
            if transfer is self._last:
                break
            new.append(transfer)
        for transfer in reversed(new):
            sender, size = str(transfer["who"]), int(transfer["total"])
            self.total += size
            if size:
                # The last is the one that has sent last.
                self.by_sender[sender] = self.by_sender.pop(sender, 0) + size
            if len(self.by_sender) > MOST:
                del self.by_sender[next(iter(self.by_sender))]
        if new:
            self._last = new[0]


#: A process has one worker.
received = Received()
