"""The Rust part of ``direct://``."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any


def _load() -> Any:
    """Beside this file where it was installed, or as built in the source tree."""
    name = "cuda_cluster._comm"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError(
            f"direct:// doesn't run on a free-threaded Python, as {sys.executable} is; "
            "hint: use a Python with the GIL, or the protocol tcp"
        )
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    target = Path(__file__).resolve().parents[2] / "target"
    named = os.environ.get("CUDA_CLUSTER_COMM")
    built = [target / profile / "lib_comm.so" for profile in ("release", "debug")]
    found = [path for path in ([Path(named)] if named else built) if path.exists()]
    if not found:
        build = "cargo build --release -p cuda-cluster-comm, or name it in CUDA_CLUSTER_COMM"
        install = f"{sys.executable} -m pip install --force-reinstall cuda-cluster, whose wheel has it"
        hint = build if (target.parent / "Cargo.toml").exists() or named else install
        raise ImportError(f"direct:// needs {name}, which is not here; hint: {hint}")
    if sys.version_info < (3, 11):
        raise ImportError(
            f"{found[0]} is for Python 3.11 and newer; hint: install the wheel, which has one for 3.10"
        )
    path = str(max(found, key=lambda path: path.stat().st_mtime))
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


#: The module. Without it, importing this one is an ImportError.
comm = _load()
