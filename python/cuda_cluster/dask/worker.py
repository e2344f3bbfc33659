"""The workers' class, for keywords that the program has no flags for.

Runs in the workers. They read the keywords, and a class that a notebook may have defined, pickled,
from the memory of the Python that started the cluster.

*Invariant:* the user's keywords override the program's.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

#: The class's path, for `--worker-class`.
PATH = "cuda_cluster.dask.worker.Configured"

#: Names the file with the pickled keywords.
VARIABLE = "CUDA_CLUSTER_WORKER_KEYWORDS"


def keep(keywords: dict[str, Any]) -> int:
    """Pickles keywords into a file in memory; returns its descriptor, to be closed when no further
    worker starts."""
    import cloudpickle

    descriptor = os.memfd_create("cuda-cluster-worker")
    os.write(descriptor, cloudpickle.dumps(keywords))
    return descriptor


def path() -> dict[str, str]:
    """The environment in which workers find the modules that this Python finds: those beside the
    script, and in folders that it added to its path."""
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    own |= {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    own |= {os.path.join(folder, "lib-dynload") for folder in own}
    folders = [os.path.abspath(folder or os.curdir) for folder in sys.path]
    more = [
        folder
        for folder in dict.fromkeys(folders)
        if os.path.realpath(folder) not in own and os.pathsep not in folder and os.path.exists(folder)
    ]
    return {"PYTHONPATH": os.pathsep.join(more)} if more else {}


def variable(descriptor: int) -> dict[str, str]:
    """The environment in which workers find the file of a descriptor."""
    return {VARIABLE: f"/proc/{os.getpid()}/fd/{descriptor}"}


def __getattr__(name: str) -> Any:
    if name != "Configured":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pickle

    from distributed import Worker

    from cuda_cluster._internals import import_term

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
