"""Proof that every pair of workers moves data over the transport that it should use.

*Invariant:* a worker that says READY has received every peer's bytes, whole and unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from distributed import Worker

from cuda_cluster_dask import control, measure
from cuda_cluster_fork.failure import StartFailure
from cuda_cluster_dask.settings import Name, Proof
from cuda_cluster_dask.status import Status

SIZE = 4 << 20  # Bytes: beyond every eager protocol, so that the bulk lanes carry them.
ROUNDS = 3  # Messages of that size after the first, for the scheduler to know how fast they are.
LOOK_AGAIN = 0.02
PEERS_STORY = 5.0  # Seconds in which a peer that failed has everything torn down.


async def peers(worker: Worker, wanted: Proof, names: dict[Name, str], status: Status) -> dict[str, str]:
    """Proves the ways to all wanted peers; returns their processes by address. `names` are these by
    the peers' names in Dask."""
    found = await _registered(worker, names.keys(), status)
    for peer, address in found.items():
        status.step(f"verifying the way to {peer}")
        used = await _fetch(worker, peer, address)
        for way in wanted["expected"]:
            if not any({lane, lane.partition("/")[0]} & set(way["lanes"]) for lane in used):
                carried = ", ".join(used) or "no lane"
                raise StartFailure(f"data from {peer} comes over {carried}; expected was {way['way']}")
    return {address: names[peer] for peer, address in found.items()}


async def _registered(worker: Worker, wanted: Collection[Name], status: Status) -> dict[Name, str]:
    """Addresses of the peers: of all when the cluster starts, of those that are there later."""
    status.step("waiting for all workers to be known to the scheduler")
    while True:
        known = (await worker.scheduler.identity(n_workers=-1))["workers"]
        found = {one["name"]: address for address, one in known.items() if one["name"] in wanted}
        missing = set(wanted) - set(found)
        if not missing or not await control.is_starting():
            found.pop(worker.name, None)
            return found
        status.step("waiting for the scheduler to know " + ", ".join(sorted(map(str, missing))))
        await asyncio.sleep(LOOK_AGAIN)


async def _fetch(worker: Worker, peer: Name, address: str) -> list[str]:
    try:
        return (await measure.measure(worker, address, SIZE, messages=1, rounds=ROUNDS))["lanes"]
    except measure.Wrong as error:
        raise StartFailure(f"data from {peer} {error}") from error
    except (OSError, TypeError) as error:
        # A peer that found its own way wrong has ended with the better story: it is heard first.
        await asyncio.sleep(PEERS_STORY)
        raise StartFailure(f"no data from {peer}: {error}") from error
