"""Peers that do not let this process in, for ``direct://``: told once, and tried more slowly.

A worker tries to reach its scheduler for ever, ten times a second, whatever the reason is why it cannot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from dask.utils import parse_timedelta

from cuda_cluster._settings import setting

logger = logging.getLogger("cuda_cluster.comm")

#: The first pause before an address is tried again, in seconds. Each is twice as long as the last.
PAUSE = 0.2

#: How often in a row an address must close connections without a word before that counts as a refusal:
#: whoever listens there may be ending.
WORDLESS = 3

#: By address: how often it has refused this process in a row.
_refused: Counter[str] = Counter()

#: How often in a row an address has closed connections without a word.
_wordless: Counter[str] = Counter()

#: Addresses that refuse this process, each with a reason that was told.
_told: set[tuple[str, str]] = set()


async def pause(address: str) -> None:
    """Waits before an address is tried that has refused this process."""
    times = _refused[address]
    if times:
        # Dask gives up an attempt after a fifth of this time.
        connect = parse_timedelta(setting("distributed.comm.timeouts.connect"))
        await asyncio.sleep(min(PAUSE * 2 ** min(times - 1, 10), connect / 10))


def note(address: str, why: str) -> None:
    """An address has refused this process: a warning says so, once for each reason."""
    if (address, why) not in _told:
        _told.add((address, why))
        logger.warning("direct:// cannot connect to %s: %s", address, why)
    _refused[address] += 1


def note_wordless(address: str, why: str) -> None:
    """An address has closed a connection instead of greeting."""
    _wordless[address] += 1
    if _wordless[address] >= WORDLESS:
        note(address, why)


def forget(address: str) -> None:
    """An address has let this process in."""
    _refused.pop(address, None)
    _wordless.pop(address, None)
    _told.difference_update([one for one in _told if one[0] == address])


def tell(listening: str, refusals: list[tuple[str, str]]) -> None:
    """Hosts that this process did not let in, each with a reason that is new."""
    for host, why in refusals:
        logger.warning("%s does not let in a peer from %s: %s", listening, host, why)
