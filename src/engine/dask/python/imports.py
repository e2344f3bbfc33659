"""Modules that the user wants loaded before work begins."""

import importlib

from cuda_cluster_dask.failure import StartFailure, describe


def load(names):
    """Imports modules; raises StartFailure naming the one that cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise StartFailure(f"cannot import {name}: {describe(error)}") from error
