"""Classes of ours that are pickled as those that they extend.

*Invariant:* what clients unpickle is importable where Dask alone is.
"""

import copyreg
from typing import Any

from cuda_cluster_dask.internals import import_term


def sent_as(kind: type, extension: type) -> Any:
    """A class that is `kind` with an extension, and is pickled as `kind`, whose name it bears:
    clients have that."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    # Classes are pickled by their metaclass: it has one of its own.
    metaclass = type("SentAs", (type(kind),), {})
    copyreg.pickle(metaclass, lambda _: (import_term, (path,)))
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return metaclass(kind.__name__, (extension, kind), named)
