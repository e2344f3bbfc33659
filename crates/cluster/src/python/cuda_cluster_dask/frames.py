"""Memory for the frames of Python's calls.

CPython (since 3.11) keeps the frames of a thread in pieces of 16 KiB, and gives a piece back to the kernel as
soon as nothing is in it (`_PyThreadState_PopFrame`). A call at an unlucky depth, which is the first in a piece,
so costs two system calls; a loop of such calls, like the imports of the first graph, ten thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

#: Half a MiB of words of 8 bytes, of which nothing is touched: CPython takes a piece of the next power of two, and
#: what is left of it is as much again for what is called from there.
WORDS = (1 << 16) + 1


def in_one_piece(call: Callable[[], R]) -> R:
    """Calls it, with room for the frames of all that it calls in the same piece."""
    return call()


# The interpreter takes it for what the function's own code needs at most.
in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=WORDS)
