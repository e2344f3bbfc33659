"""Random graphs with kills and little memory, placed by wires: each has the result that it has here, without Dask.

    python tests/python/wires/graphs.py RUNS [SEED]       500 for the long form (scripts/bench-wires.sh N graphs)

Each run makes a graph of layers of arrays of up to 300 KB, kills a worker in two of three runs, fills the memory
of another in every second, so that Dask pauses it, and compares every element of the last layer. Workers may hold
less than a graph does, and write the rest to the disk. A run is made again from its seed.
"""

import os
import random
import signal
import sys
import threading
import time

import bed
import numpy as np
from distributed import Status

#: Fast enough that a graph takes a second, and as unlike as a DGX-1's.
FASTEST = 40e6

#: Of a worker; Dask pauses it at 0.8 of it, and ends it at 0.95.
LIMIT = 384 << 20
#: The share of it that results may have; Dask writes the rest to the disk.
TARGET = 0.003


def fill(dask_worker):
    """Takes so much memory until Dask has paused the worker."""
    threading.Thread(target=_fill, args=(dask_worker,), daemon=True).start()


def _fill(worker):
    taken = np.ones(int(LIMIT * 0.85) - worker.monitor.get_process_memory(), "uint8")
    until = time.monotonic() + 10
    while worker.status != Status.paused and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    del taken


def _written(dask_worker):
    """Its process, and how many bytes it has written to the disk."""
    return os.getpid(), dask_worker.data.cumulative_metrics["disk-write", "bytes"]


def pauses(client):
    """How often workers were paused, as the scheduler saw it, also of those that have died since."""
    told = (what for events in client.get_events().values() for _, what in events if isinstance(what, dict))
    return sum(what.get("action") == "worker-status-change" and what.get("status") == "paused" for what in told)


def make(seed, size):
    return np.random.default_rng(seed).integers(0, 1000, size)


def mix(number, *arrays):
    """Any change of order, size or content of what it gets changes what it gives."""
    length = max(array.size for array in arrays)
    mixed = np.zeros(length, "int64")
    for place, array in enumerate(arrays):
        mixed = (mixed * 31 + np.resize(array, length) * (place + 1) + number) % 1_000_003
    return mixed


def graph(state, tag):
    """Tasks by key: a function, numbers, and the keys of what it needs."""
    tasks, layer = {}, []
    for at in range(state.randint(3, 12)):
        key = f"made-{tag}-0-{at}"
        tasks[key] = (make, (state.getrandbits(32), state.choice([100, 10_000, 40_000])), [])
        layer.append(key)
    for depth in range(1, state.randint(2, 5)):
        before, layer = layer, []
        for at in range(state.randint(2, 12)):
            key = f"mixed-{tag}-{depth}-{at}"
            needs = state.sample(sorted(tasks), min(len(tasks), state.randint(1, 4)))
            needs.append(state.choice(before))
            tasks[key] = (mix, (state.getrandbits(16),), needs)
            layer.append(key)
    return tasks, layer


def here(tasks, last):
    found = {}
    for key, (function, numbers, needs) in tasks.items():
        found[key] = function(*numbers, *(found[one] for one in needs))
    return [found[key] for key in last]


def there(client, tasks, last, kill, press):
    """What the cluster makes of it; `kill` and `press` choose whom, if anybody."""
    futures = {}
    if press is not None:
        client.run(fill, workers=[press.choice(sorted(bed.workers_of(client)))], on_error="ignore")
        time.sleep(press.uniform(0, 0.6))  # so long the memory takes
    for key, (function, numbers, needs) in tasks.items():
        futures[key] = client.submit(function, *numbers, *(futures[one] for one in needs), key=key)
    if kill is not None:
        time.sleep(kill.uniform(0, 0.4))
        pids = list(client.run(os.getpid, on_error="ignore").values())
        os.kill(kill.choice(sorted(pids)), signal.SIGKILL)
    return client.gather([futures[key] for key in last])


def run(client, seed):
    """Returns how many tasks were compared."""
    state = random.Random(seed)
    tasks, last = graph(state, seed)
    kill, press = (state if state.random() < share else None for share in (2 / 3, 1 / 2))
    found = there(client, tasks, last, kill, press)
    for key, one, other in zip(last, found, here(tasks, last)):
        np.testing.assert_array_equal(one, other, err_msg=f"seed {seed}, {key}")
    return len(last)


def main(runs, first=0, workers=4):
    """Returns how many tasks were placed elsewhere, pauses, and bytes that were written to the disk."""
    compared, seen = 0, {}
    config = {"distributed.worker.memory.target": str(TARGET)}
    words = ("--memory-limit", str(LIMIT), "--device-memory-limit", "0")
    with bed.cluster(near_and_far(workers), name="graphs", config=config, words=words) as client:
        assert bed.moved(client) is not None, "nothing is placed by wires"
        for seed in range(first, first + runs):
            compared += run(client, seed)
            # What the killed had done before is counted up to the last run.
            for said in client.run(_written, on_error="return").values():
                if not isinstance(said, OSError):  # of one whose death the scheduler has not seen
                    pid, bytes_written = said
                    seen[pid] = bytes_written
        moved, paused = bed.moved(client), pauses(client)
    written = sum(seen.values())
    print(
        f"{runs} graphs from seed {first}, {compared} results are equal; {moved} tasks moved, {paused} pauses, "
        f"{written / 1e6:.0f} MB to the disk",
        flush=True,
    )
    return moved, paused, written


def near_and_far(workers):
    """A ring of fast wires; the others are a tenth as fast."""
    fast = lambda a, b: (a - b) % workers in (1, workers - 1)
    return [
        [None if a == b else FASTEST if fast(a, b) else FASTEST / 10 for b in range(workers)]
        for a in range(workers)
    ]


if __name__ == "__main__":
    # Its cluster ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
