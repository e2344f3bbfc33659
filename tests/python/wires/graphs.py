"""Random graphs with kills, placed by wires: each has the result that it has here, without Dask.

    python tests/python/wires/graphs.py RUNS [SEED]       500 for the long form (scripts/bench-wires.sh N graphs)

Each run makes a graph of layers of arrays of up to 300 KB, kills a worker in two of three runs, and
compares every element of the last layer. A run is made again from its seed.
"""

import os
import random
import signal
import sys
import time

import bed
import numpy as np

#: Fast enough that a graph takes a second, and as unlike as a DGX-1's.
FASTEST = 40e6


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


def there(client, tasks, last, kill):
    futures = {}
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
    found = there(client, tasks, last, state if state.random() < 2 / 3 else None)
    for key, one, other in zip(last, found, here(tasks, last)):
        np.testing.assert_array_equal(one, other, err_msg=f"seed {seed}, {key}")
    return len(last)


def main(runs, first=0, workers=4):
    compared = moved = 0
    with bed.cluster(near_and_far(workers), name="graphs") as client:
        assert bed.moved(client) is not None, "nothing is placed by wires"
        for seed in range(first, first + runs):
            compared += run(client, seed)
        moved = bed.moved(client)
    print(f"{runs} graphs from seed {first}, {compared} results are equal; {moved} tasks moved")
    return moved


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
