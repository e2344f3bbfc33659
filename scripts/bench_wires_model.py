"""What placing tasks by wires saves on the wires alone; called by bench-wires.sh model.

Dask's own scheduler, with workers that are only known to it, places the tasks of x + x.T one after the
other, as it does when all blocks of x are there. Then each wire has bytes to carry, and the longest of
them says when the last task has what it needs. Nothing is moved and no time passes, so that a machine with
load gives the same figures; work stealing, computing and messages are left out.
"""

import asyncio
import collections
import logging
import os
import statistics

import bed
from bench_wires_cost import add_workers, task
from cuda_cluster_dask import by_wires
from distributed import Scheduler

FASTEST, WORKERS = float(os.environ.get("FASTEST", "1e9")), int(os.environ.get("WORKERS", "8"))
TURNS = int(os.environ.get("TURNS", "7"))


async def longest(rows, blocks, size, hooked, seconds_known, seed):
    """Seconds until the last task has what it needs, bytes that moved, tasks that were moved, how many times its share of
    the tasks the busiest worker has."""
    async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
        known = add_workers(scheduler, len(rows))
        rates = {
            str(a): {str(b): rate / 1e9 for b, rate in enumerate(row) if rate is not None}
            for a, row in enumerate(rows)
        }
        plugin = by_wires.ByWires(scheduler, rates)
        plugin._decide()
        if not hooked:
            plugin.hooks.take()
        at = lambda i, j: known[((i * blocks + j) * 7 + seed * 13 + (i * j + seed) % 5) % len(known)]
        x = {(i, j): task(scheduler, ("x", i, j), size, at(i, j)) for i in range(blocks) for j in range(blocks)}
        scheduler.bandwidth = statistics.fmean(r for row in rows for r in row if r)
        carried, placed = {}, collections.Counter()
        for (i, j), one in x.items():
            ts = task(scheduler, ("add", i, j), needs={one, x[j, i]})
            ts.priority = (0, i, j)
            if seconds_known:
                ts.prefix.duration_average = 0.01
            ws = scheduler.decide_worker_non_rootish(ts)
            scheduler._add_to_processing(ts, ws, "model")
            placed[ws] += 1
            for needed in ts.dependencies:
                if needed not in ws.has_what:
                    (holder,) = needed.who_has
                    carried.setdefault((holder, ws), set()).add(needed)
        wire = lambda ends: rows[known.index(ends[0])][known.index(ends[1])]
        took = max(len(each) * size / wire(ends) for ends, each in carried.items())
        moved = sum(map(len, carried.values())) * size
        for address in list(scheduler.workers):
            scheduler.running.discard(scheduler.workers.pop(address))
        for plugin_name in list(scheduler.plugins):
            scheduler.plugins.pop(plugin_name, None)
        return took, moved, plugin.hooks.moved, max(placed.values()) * len(rows) / len(x)


def main():
    logging.getLogger("distributed").setLevel(logging.ERROR)
    rows = bed.dgx_1(WORKERS, FASTEST)
    for blocks in (6, 10, 20):
        for known in (True, False):
            seen = []
            for seed in range(TURNS):
                ours = asyncio.run(longest(rows, blocks, 32 << 20, True, known, seed))
                dasks = asyncio.run(longest(rows, blocks, 32 << 20, False, known, seed))
                seen.append((dasks[0] / ours[0], ours[0], dasks[0], ours[1] / dasks[1], ours[2], ours[3], dasks[3]))
            ratio, mine, theirs, bytes_more, moved, *most = (statistics.median(one) for one in zip(*seen))
            print(
                f"  x + x.T of {blocks} x {blocks} blocks, durations {'known' if known else 'not known'}: by wires "
                f"{mine:.2f} s, as Dask {theirs:.2f} s, {ratio:.2f} times ({min(seen)[0]:.2f} to "
                f"{max(seen)[0]:.2f}); {bytes_more:.2f} times the bytes, {moved:g} tasks moved; "
                f"the busiest worker has {most[0]:.2f} times its share (as Dask: {most[1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
