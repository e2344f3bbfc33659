"""Stands for dask-cuda: see `cuda_cluster.as_dask_cuda`.

Modules that are not here are dask-cuda's own where it is installed; else those of `fallback`.
"""

from importlib.machinery import PathFinder
from pathlib import Path

_here = Path(__file__).resolve().parent


def _installed():
    """The folders of an installed dask-cuda, this one being passed over."""
    import sys

    path = [one for one in sys.path if Path(one or ".").resolve() != _here.parent]
    found = PathFinder.find_spec("dask_cuda", path)
    return list(found.submodule_search_locations or ()) if found is not None else []


__path__ = [str(_here), *_installed(), str(_here / "fallback")]

from cuda_cluster.dask import CUDAWorker, LocalCUDACluster  # noqa: E402
from cuda_cluster.dask.client import _register_serializers  # noqa: E402

_register_serializers()

__version__ = "26.10.0"
__git_commit__ = ""
__all__ = ["CUDAWorker", "LocalCUDACluster"]
