"""The page of this user's clusters in JupyterLab, for jupyter-server-proxy.

It finds `panel` by an entry point, shows a tile in Lab's launcher, and starts the page's process when
somebody opens it: on a Unix socket of its own, which only this user can use. The page's guards hold.

*Invariant:* imports nothing of Jupyter's; a missing program is told when the panel is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuda_cluster import program
from cuda_cluster.errors import ProgramNotFound

#: Seconds in which the page's process has to answer.
TIMEOUT = 30


def panel() -> dict[str, Any]:
    """What jupyter-server-proxy asks for: the command, where it listens, and the tile."""
    try:
        path = program.program_path()
    except ProgramNotFound:
        # An error here would take all other panels with it.
        path = program.NAME
    return {
        "command": [path, "dashboard", "--no-browser", "--listen", "{unix_socket}"],
        "unix_socket": True,
        "timeout": TIMEOUT,
        "new_browser_tab": False,
        "launcher_entry": {
            "enabled": True,
            "title": "cuda-cluster",
            "category": "Other",
            "icon_path": str(Path(__file__).with_name("icon.svg")),
        },
    }
