"""Modules that are loaded before work begins."""

import contextlib
import importlib
from collections.abc import Iterable

import dask

from cuda_cluster_fork.failure import StartFailure, describe


def load_what_is_there(names: Iterable[str]) -> None:
    for name in names:
        # Whoever needs it finds out why.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def load_early(more: Iterable[str]) -> None:
    """Imports and looks up what each worker would for itself: once before the fork, it is shared."""
    names = ["cuda_cluster_dask.worker", "tornado.platform.asyncio", *more]
    names += dask.config.get("distributed.worker.http.routes", [])
    # The worker reports what it cannot import.
    load_what_is_there(names)
    with contextlib.suppress(Exception):
        # Each worker tells it to the scheduler; what was found is remembered.
        importlib.import_module("cuda_cluster_dask.internals").get_versions()


def load(names: Iterable[str]) -> None:
    """Imports modules that the user wants; raises StartFailure naming the one that cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise StartFailure(f"cannot import {name}: {describe(error)}") from error
