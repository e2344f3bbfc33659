"""What a worker over ``direct://`` does before its first message, so that it takes no longer than later ones:
touches memory, and imports Dask's serializers for NumPy. Together that takes as long as a large message. In a
process of a nanny's, Python's garbage collector no longer looks at what is there by then, modules above all.

*Invariant:* nothing here waits, and nothing that fails here is told: who needs it is told then.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from typing import Any

import psutil  # type: ignore[import-untyped]

from cuda_cluster._internals import CPU_COUNT, import_serializers

#: Of the machine's free memory, a worker that starts touches at most this share.
FREE = 64

#: And at most so many bytes for each processor that it may use, which clear the pages: each
#: GiB can take a second.
PER_CPU = 128 << 20


def begin(worker: Any, direct: Any, kept: int) -> None:
    """Begins, for a worker that may hold so many bytes."""
    direct.prepare_memory(touched(kept))
    # Before there is any object of a task. The launcher's workers have done so, and another program's own
    # process has objects of its own.
    if worker.nanny is not None:
        gc.freeze()
    # Dask imports it itself where it is installed; this does not, as it takes memory.
    if "numpy" in sys.modules:
        threading.Thread(target=_import_serializers, name="serializers", daemon=True).start()


def touched(kept: int) -> int:
    """How many bytes are touched: half of what may be held, if the machine has many times as much, and
    processors for it."""
    available: int = psutil.virtual_memory().available
    cpus: int = CPU_COUNT
    return min(kept // 2, available // FREE, PER_CPU * cpus)


def _import_serializers() -> None:
    with contextlib.suppress(Exception):
        import_serializers(sys.modules["numpy"].ndarray)
