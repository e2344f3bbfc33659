"""Code that cannot be edited: a program in which `dask_cuda` means this package.

    python -m cuda_cluster.as_dask_cuda SCRIPT.py …
    python -m cuda_cluster.as_dask_cuda -m MODULE …
    eval "$(python -m cuda_cluster.as_dask_cuda)"       # for this shell: `dask cuda worker`, too

or, before anything imports dask_cuda, `import cuda_cluster.as_dask_cuda`.

A folder with a package of that name comes first on the path of this Python and of all that it
starts, workers included. `LocalCUDACluster`, `CUDAWorker` and the command line are ours; all other
modules are those of dask-cuda where it is installed, else small ones of ours (`fallback`).

*Invariant:* nothing that is installed is changed; without this import, dask_cuda is dask-cuda.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: The folder that comes first.
FOLDER = str(Path(__file__).resolve().parent.parent / "_instead")

#: Where `dask-cuda-worker` is.
PROGRAMS = os.path.join(FOLDER, "bin")


def environment() -> dict[str, str]:
    """The environment in which `dask_cuda` means this package in other processes, too."""
    return {
        "PYTHONPATH": _first(FOLDER, os.environ.get("PYTHONPATH")),
        "PATH": _first(PROGRAMS, _first(os.path.dirname(sys.executable), os.environ.get("PATH"))),
    }


def install() -> None:
    """Makes `dask_cuda` mean this package, in this process and in those that it starts.

    Raises ImportError if dask-cuda itself was imported already.
    """
    known = sys.modules.get("dask_cuda")
    if known is not None and not (getattr(known, "__file__", None) or "").startswith(FOLDER):
        raise ImportError("dask_cuda is imported already: import cuda_cluster.as_dask_cuda first")
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    os.environ.update(environment())


def _first(folder: str, path: str | None) -> str:
    parts = [part for part in (path or "").split(os.pathsep) if part and part != folder]
    return os.pathsep.join([folder, *parts])


install()
