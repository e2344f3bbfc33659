"""Peers that do not let this process in, for ``native://``: told once, and tried more slowly.

A worker tries to reach its scheduler for ever, ten times a second, whatever the reason is why it cannot.
"""

from __future__ import annotations

import asyncio
import logging

from dask.utils import parse_timedelta

from cuda_cluster._settings import setting

logger = logging.getLogger("cuda_cluster.comm")

#: The first pause before an address is tried again, in seconds. Each is twice as long as the last.
PAUSE = 0.2

#: By address: how often it has refused this process in a row, and why.
_refused: dict[str, tuple[int, str]] = {}


async def pause(address: str) -> None:
    """Waits before an address is tried that has refused this process."""
    times, _ = _refused.get(address, (0, ""))
    if times:
        # Dask gives up an attempt after a fifth of this time.
        connect = parse_timedelta(setting("distributed.comm.timeouts.connect"))
        await asyncio.sleep(min(PAUSE * 2 ** min(times - 1, 10), connect / 10))


def note(address: str, why: str) -> None:
    """An address has refused this process: a warning says so, unless it has said the same."""
    times, last = _refused.get(address, (0, ""))
    if why != last:
        logger.warning("native:// cannot connect to %s: %s", address, why)
    _refused[address] = times + 1, why


def forget(address: str) -> None:
    """An address has let this process in."""
    _refused.pop(address, None)


def tell(listening: str, refusals: list[tuple[str, str]]) -> None:
    """Hosts that this process did not let in, each with a reason that is new."""
    for host, why in refusals:
        logger.warning("%s does not let in a peer from %s: %s", listening, host, why)
