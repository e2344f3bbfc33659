"""The workers' class where keywords ask for more than the program has flags for.

Runs in the workers. The keywords, and a class that may be of a notebook, come pickled from the
Python that started the cluster: in its memory, so that nothing is left on a disk.

*Invariant:* what a user gave beats what the program gives.
"""

from __future__ import annotations

import os
from typing import Any

#: What the program is told the class is.
PATH = "cuda_cluster.dask.worker.Configured"

#: Names the file with the pickled keywords.
VARIABLE = "CUDA_CLUSTER_WORKER_KEYWORDS"


def keep(keywords: dict[str, Any]) -> int:
    """Keeps keywords for workers; returns the descriptor of what holds them, to be closed when no
    worker will start any more."""
    import cloudpickle

    descriptor = os.memfd_create("cuda-cluster-worker")
    os.write(descriptor, cloudpickle.dumps(keywords))
    return descriptor


def variable(descriptor: int) -> dict[str, str]:
    """What workers need in their environment to find what is kept."""
    return {VARIABLE: f"/proc/{os.getpid()}/fd/{descriptor}"}


def __getattr__(name: str) -> Any:
    if name != "Configured":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pickle

    from distributed import Worker
    from distributed.utils import import_term

    with open(os.environ[VARIABLE], "rb") as file:
        keywords = pickle.load(file)
    base = keywords.pop("class", Worker)
    base = import_term(base) if isinstance(base, str) else base
    plugins = tuple(keywords.pop("plugins", ()))

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        given |= keywords
        given["plugins"] = (*given.get("plugins", ()), *plugins)
        base.__init__(self, *args, **given)

    body = {"__init__": __init__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), body)
