"""Which tasks need a worker with a GPU: by the packages that they are made of, and by what they take.

Pure: knows neither Dask nor any package, only their names.

*Invariant:* a task that nothing connects with a GPU may run anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

#: Packages whose functions and objects need a GPU.
PACKAGES = frozenset(
    "cucim cudf cudf_polars cugraph cuml cuproj cupy cupyx cuspatial cuvs cuxfilter dask_cudf nx_cugraph "
    "numba_cuda pylibcudf pylibcugraph pylibraft raft_dask rmm".split()
)

#: Modules of other packages that do. An object of PyTorch counts as of `torch.cuda` if it is on a GPU.
MODULES = ("cuda.bindings", "cuda.core", "numba.cuda", "torch.cuda")

#: Functions and methods of these packages whose results are in host memory.
TO_HOST = frozenset(
    "asnumpy copy_to_host cpu get item to_arrow to_host to_list to_numpy to_pandas tolist values_host".split()
)

#: Those whose names have no other meaning: a function that names one is taken to end with it.
SURELY_TO_HOST = frozenset("asnumpy copy_to_host to_arrow to_numpy to_pandas".split())

#: Packages whose objects are in host memory.
ON_HOST = frozenset("builtins numpy pandas pyarrow scipy".split())

#: Builtin types whose objects may hold any others.
HOLDS_ANY = frozenset("dict frozenset list set tuple object".split())

#: Dask assigns the tasks of its p2p shuffle to workers by itself, whatever resources they have.
ASSIGNED = "distributed.shuffle"


class Kind(NamedTuple):
    """What is known of a task."""

    #: It must run where there is a GPU.
    needs_gpu: bool
    #: Its result is in a GPU's memory, as far as is known.
    on_device: bool


def kind(modules: Iterable[str], functions: Iterable[str], dependencies: Iterable[bool]) -> Kind:
    """The kind of a task: from the modules of everything in it, the names of the functions that its result
    comes from, and for each task that it takes a result of, whether that is in a GPU's memory. Most tasks
    have nothing to do with a GPU: of these the functions are not asked for."""
    modules = list(modules)
    if not any(dependencies) and not any(map(is_of_gpu, modules)):
        return Kind(False, False)
    assigned = any(_is_in(module, ASSIGNED) for module in modules)
    return Kind(not assigned, TO_HOST.isdisjoint(functions))


@lru_cache(1024)
def is_of_gpu(module: str) -> bool:
    """Whether what a module has needs a GPU."""
    return root(module) in PACKAGES or any(_is_in(module, one) for one in MODULES)


@lru_cache(1024)
def is_on_device(type_name: str | None) -> bool | None:
    """Whether a result is in a GPU's memory, by the full name of its type; None where that does not tell."""
    if type_name is None or type_name in HOLDS_ANY:
        return None
    if is_of_gpu(type_name):
        return True
    is_builtin = "." not in type_name
    return False if is_builtin or root(type_name) in ON_HOST else None


def root(module: str) -> str:
    """The package of a module."""
    return module.partition(".")[0]


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
