"""Classes of ours that are pickled as those that they extend.

*Invariant:* what clients unpickle is importable where Dask alone is.
"""

import copyreg

from distributed.utils import import_term


def sent_as(kind):
    """A metaclass of classes that are pickled as `kind`, whose name they bear: clients have that."""

    class SentAs(type(kind)):
        def __init__(cls, name, bases, attributes):
            super().__init__(name, bases, attributes)
            cls.__name__, cls.__qualname__ = kind.__name__, kind.__qualname__
            cls.__module__ = kind.__module__

    path = f"{kind.__module__}.{kind.__qualname__}"
    copyreg.pickle(SentAs, lambda _: (import_term, (path,)))
    return SentAs
