"""What placing by wires costs Dask's scheduler; called by bench-wires.sh cost.

First a decision alone: for a task that needs two results of two workers, of 1 KiB and of 8 MiB each, while
each worker waits for 20 others. Then graphs of small tasks through a scheduler and workers of one
process, with and without the hooks in turns.
"""

import asyncio
import os
import pathlib
import random
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "crates/cluster/src/python"))

import dask  # noqa: E402
from cuda_cluster_dask import by_wires  # noqa: E402
from cuda_cluster_dask.wires import Table  # noqa: E402
from distributed import Client, Scheduler, Worker, wait  # noqa: E402
from distributed.scheduler import WorkerState  # noqa: E402
from distributed.worker import Status  # noqa: E402

#: In a graph.
TASKS = int(os.environ.get("TASKS", "20000"))
TURNS = int(os.environ.get("TURNS", "7"))


def wires_of(names):
    """A tenth of the pairs is fast."""
    return {a: {b: 10.0 if (i - j) % 10 == 1 else 1.0 for j, b in enumerate(names) if a != b}
            for i, a in enumerate(names)}  # fmt: skip


def add_workers(scheduler, count):
    known = []
    for number in range(count):
        address = f"tcp://10.0.0.1:{1000 + number}"
        ws = WorkerState(
            address=address, status=Status.running, pid=1, name=str(number), nthreads=1, memory_limit=1 << 34,
            local_directory="", nanny="", server_id=str(number), services={}, versions={}, extra={},
            scheduler=scheduler,
        )  # fmt: skip
        scheduler.workers[address] = ws
        scheduler.running.add(ws)
        known.append(ws)
    return known


def task(scheduler, key, size=None, holder=None, needs=()):
    ts = scheduler.new_task(key, object(), "memory" if holder else "waiting")
    if holder is not None:
        ts.set_nbytes(size)
        scheduler.add_replica(ts, holder)
    for needed in needs:
        ts.add_dependency(needed)
    return ts


async def decisions(workers):
    async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
        known = add_workers(scheduler, workers)
        names = [ws.name for ws in known]
        plugin = by_wires.ByWires(scheduler, wires_of(names))
        state = random.Random(1)
        for ws in known:
            for number in range(20):
                holder = state.choice([one for one in known if one is not ws])
                ws._inc_needs_replica(task(scheduler, f"{ws.name}-{number}", 1 << 20, holder))
        for size in (1 << 10, 8 << 20):
            todo = []
            for number in range(400):
                one, other = state.sample(known, 2)
                needs = [task(scheduler, f"{size}-{number}-{end}", size, ws) for end, ws in (("a", one), ("b", other))]
                todo.append(task(scheduler, f"{size}-{number}", needs=needs))
            taken = {}
            for which in ("as Dask", "by wires"):
                table = Table.of(plugin.wires.rates(), {ws.name: ws for ws in known})
                plugin.hooks.know(table)
                plugin.hooks.put() if which == "by wires" else plugin.hooks.take()
                rounds = []
                for _ in range(TURNS):
                    began = time.thread_time()
                    for ts in todo:
                        scheduler.decide_worker_non_rootish(ts)
                    rounds.append((time.thread_time() - began) / len(todo))
                taken[which] = min(rounds) * 1e6
            plugin.hooks.take()
            print(
                f"  {workers:4} workers, {size >> 10:5} KiB:  by wires {taken['by wires']:7.1f} µs a decision, "
                f"as Dask {taken['as Dask']:6.1f} µs",
                flush=True,
            )
        for address in list(scheduler.workers):
            scheduler.running.discard(scheduler.workers.pop(address))


def none(*_):
    return None


def graph(tag, count=TASKS, width=200):
    """Layers, in which each task needs two of the layer before."""
    made = {(f"one-{tag}", 0, at): (none,) for at in range(width)}
    for layer in range(1, count // width):
        for at in range(width):
            needs = [(f"one-{tag}", layer - 1, (at + step) % width) for step in (0, 7)]
            made[f"one-{tag}", layer, at] = (none, *needs)
    return made, [(f"one-{tag}", count // width - 1, at) for at in range(width)]


async def graphs(workers=4):
    async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
        added = [Worker(scheduler.address, name=str(one), nthreads=1) for one in range(workers)]
        await asyncio.gather(*added)
        plugin = by_wires.ByWires(scheduler, wires_of([str(one) for one in range(workers)]))
        plugin._decide()
        async with Client(scheduler.address, asynchronous=True) as client:
            seen = {"by wires": [], "as Dask": []}
            for turn in range(-1, TURNS):
                for which in sorted(seen, reverse=turn % 2 == 0):
                    plugin.hooks.put() if which == "by wires" else plugin.hooks.take()
                    made, last = graph(f"{turn}-{which}")
                    began = time.perf_counter()
                    futures = client.get(made, last, sync=False)
                    await wait(futures)
                    if turn >= 0:
                        seen[which].append(len(made) / (time.perf_counter() - began))
                    del futures
            ours, dasks = (statistics.median(seen[which]) for which in ("by wires", "as Dask"))
            ratio = statistics.median(a / b for a, b in zip(*seen.values()))
            print(f"  {TASKS} tasks: by wires {ours:.0f} tasks/s, as Dask {dasks:.0f}, {ratio:.3f} times", flush=True)
        plugin.hooks.take()
        await asyncio.gather(*(worker.close() for worker in added))


def main():
    import logging

    logging.getLogger("distributed").setLevel(logging.ERROR)
    with dask.config.set({"distributed.scheduler.worker-saturation": "inf"}):
        for workers in (8, 64, 256):
            asyncio.run(decisions(workers))
        asyncio.run(graphs())


if __name__ == "__main__":
    main()
