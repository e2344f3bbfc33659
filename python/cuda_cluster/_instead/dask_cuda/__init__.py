"""Stands for dask-cuda: see `cuda_cluster.as_dask_cuda`.

Modules that are not here are dask-cuda's own where it is installed and can be imported; else those
of `fallback`, and of all others it is said why they can't be imported.
"""

import sys
import warnings
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path

_here = Path(__file__).resolve().parent


def _installed():
    """The folders of an installed dask-cuda, this one being passed over."""
    path = [one for one in sys.path if Path(one or ".").resolve() != _here.parent]
    found = PathFinder.find_spec("dask_cuda", path)
    return list(found.submodule_search_locations or ()) if found is not None else []


def _usable(folders):
    """The folders, if what is in them can be imported: dask-cuda may lack what it needs."""
    global __path__
    if not folders:
        return []
    __path__ = folders
    try:
        for module in ("utils", "initialize"):
            import_module(f"{__name__}.{module}")
    except Exception as error:
        for name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
            del sys.modules[name]
        warnings.warn(
            f"the installed dask-cuda can't be imported ({type(error).__name__}: {error}), "
            "so modules of cuda-cluster's stand for it; install what it lacks",
            stacklevel=2,
        )
        sys.meta_path.append(_Broken(error))
        return []
    return folders


class _Broken:
    """Says why modules of dask-cuda that nothing stands for are not there."""

    def __init__(self, why):
        self._why = why

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            raise ModuleNotFoundError(f"there is no {name}", name=name) from self._why
        return None


__path__ = [str(_here)]
__path__ = [str(_here), *_usable(_installed()), str(_here / "fallback")]

from cuda_cluster.dask import CUDAWorker, LocalCUDACluster  # noqa: E402
from cuda_cluster.dask.client import _register_serializers  # noqa: E402

_register_serializers()

# That of the interface, which stands there alone.
__version__ = metadata.Distribution.at(_here.parent / "dask_cuda.dist-info").version
__git_commit__ = ""
__all__ = ["CUDAWorker", "LocalCUDACluster"]
