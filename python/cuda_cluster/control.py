"""A supervisor's control API: HTTP over the run directory's Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any

from cuda_cluster.errors import ClusterError

#: Seconds in which a running supervisor answers.
ANSWER_WITHIN = 10


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("cuda-cluster", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def read(run_directory: str, path: str) -> Any:
    """Reads from the supervisor; raises ClusterError."""
    return json.loads(_exchange(run_directory, "GET", path))


def order(run_directory: str, path: str) -> None:
    """Sends a request; raises ClusterError if the supervisor refuses it."""
    _exchange(run_directory, "POST", path)


def _exchange(run_directory: str, method: str, path: str) -> str:
    connection = _Connection(os.path.join(run_directory, "control.sock"), ANSWER_WITHIN)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"the supervisor in {run_directory} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status >= 300:
        raise ClusterError(f"the supervisor refused: {text.strip()}")
    return text
