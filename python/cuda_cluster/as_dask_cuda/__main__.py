"""Runs a script or a module in which `dask_cuda` means this package; without one, prints what a
shell evaluates to have the same."""

import os
import runpy
import shlex
import sys

from cuda_cluster import as_dask_cuda

USAGE = "usage: python -m cuda_cluster.as_dask_cuda [-m MODULE | SCRIPT] ..."


def main(arguments: list[str]) -> None:
    if not arguments:
        for name, value in as_dask_cuda.environment().items():
            print(f"export {name}={shlex.quote(value)}")
        return
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.exit(USAGE)
        module, *rest = arguments[1:]
        sys.argv = [module, *rest]
        # As `python -m` does.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif arguments[0].startswith("-"):
        sys.exit(USAGE)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
